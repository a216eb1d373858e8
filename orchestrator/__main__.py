"""``python -m orchestrator`` is the command ``lyray``."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
