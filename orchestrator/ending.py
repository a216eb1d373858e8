"""How a command ends: with one message on stderr, one line of JSON on stdout, one exit code."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from orchestrator.credentials import masked
from orchestrator.errors import ConfigError, OrchestratorError, UserCodeError, as_told

_ENDED_BY_TYPER = {
    2: (ConfigError.status, "the arguments are wrong, see the message on stderr"),
    130: ("stopped", "interrupted before anything was started"),
}

_told: list[str] = []
"""The status lines written so far: a process ends with exactly one."""


class _Terminated(BaseException):
    """SIGTERM came; no BaseException of Python's own, which Typer would take for its own."""


def run_to_its_end(command_line: Callable[[], None]) -> NoReturn:
    """Run a Typer application and end the process with the exit code of what happened."""
    _told.clear()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with ending(None):
            command_line()
    except SystemExit as end:
        if end.code in _ENDED_BY_TYPER and not _told:
            tell(*_ENDED_BY_TYPER[end.code], None)
        raise
    except BrokenPipeError:  # the reader of our output has gone; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(0)


def _terminate(number: int, frame: FrameType | None) -> None:
    if not _told:  # else the end is under way, and its code is known
        raise _Terminated


def tell(status: str, reason: str, run_dir: str | None) -> None:
    """Write the last line on stdout: what a script reads."""
    line = json.dumps({"status": status, "reason": masked(reason), "run_dir": run_dir})
    _told.append(line)
    print(line, flush=True)


@contextmanager
def ending(run_dir: str | None) -> Iterator[None]:
    """Turn an error that a user can meet into its message, its status line and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        tell("stopped", "interrupted", run_dir)
        sys.exit(130)
    except _Terminated:
        tell("stopped", "stopped by SIGTERM", run_dir)
        sys.exit(128 + signal.SIGTERM)
    except BrokenPipeError:
        raise
    except Exception as error:  # the shell: no trace of ours on the screen
        _give_up(as_told(error), run_dir)


def _give_up(error: OrchestratorError, run_dir: str | None) -> NoReturn:
    if isinstance(error, UserCodeError) and error.user_traceback:
        print(error.user_traceback.rstrip(), file=sys.stderr)
    print(f"lyray: {masked(str(error))}", file=sys.stderr, flush=True)
    tell(error.status, str(error), run_dir)
    sys.exit(error.exit_code)
