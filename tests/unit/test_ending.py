"""How a command ends when it is told to before anything was started."""

import json
import signal
from collections.abc import Callable

import pytest

from orchestrator.ending import ending, run_to_its_end, tell


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def stop_in_a_run() -> None:
    with ending("runs/tiny"):
        stop()


@pytest.mark.parametrize(("command", "run_dir"), [(stop, None), (stop_in_a_run, "runs/tiny")])
def test_sigterm_while_modules_load_ends_with_143_and_one_line(
    capsys: pytest.CaptureFixture[str], command: Callable[[], None], run_dir: str | None
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run_to_its_end(command)
    assert end.value.code == 143
    (line,) = capsys.readouterr().out.splitlines()
    said = {"status": "stopped", "reason": "stopped by SIGTERM", "run_dir": run_dir}
    assert json.loads(line) == said
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_after_the_end_was_told_changes_neither_line_nor_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told_then_stopped() -> None:
        tell("finished", "all steps done", "runs/tiny")
        stop()

    with pytest.raises(SystemExit) as end:
        run_to_its_end(told_then_stopped)
    assert end.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
