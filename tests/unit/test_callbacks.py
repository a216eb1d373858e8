"""What callbacks hear, and how they end a run."""

import subprocess
import sys
from pathlib import Path

import pytest

import orchestrator
from orchestrator.callbacks import STOP, Callback, Callbacks, TensorBoardWriter, only
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent
from orchestrator.errors import ConfigError

STEP = CommittedStep(3, 1, 0, 8, 0.5, 1.0, loss=2.0)


class Wished:
    """A head that notes what is wished of it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def finish(self, reason: str) -> None:
        self.told.append(("finish", reason))

    def stop(self, reason: str) -> None:
        self.told.append(("stop", reason))


def test_objects_hear_what_they_have_methods_for() -> None:
    heard: list[object] = []

    class Mine:
        def on_step(self, step: CommittedStep) -> None:
            heard.append(step.step)

        def close(self) -> None:
            heard.append("closed")

    view = Callbacks([Mine(), only("on_event", lambda event: heard.append(event.kind)), Callback()])
    view.phase("starting")
    view.step(STEP)
    view.event(RunEvent(1.0, 0, "lost", "gone"))
    view.evaluation(Evaluation(10, 1, 8, 0.5))
    view.close()
    view.close()
    assert heard == [3, "lost", "closed"]


def test_one_that_returns_stop_ends_the_run_once_and_finished() -> None:
    head = Wished()
    view = Callbacks([only("on_step", lambda _: STOP)])
    view.step(STEP)  # before there is a head to tell
    view.end_with(head.finish, head.stop)
    view.step(STEP)
    assert head.told == [("finish", "stopped early: <lambda> returned STOP at step 3")]


def test_one_that_raises_stops_the_run_and_no_callback_hears_of_more() -> None:
    heard: list[int] = []

    def mine(step: CommittedStep) -> None:
        raise ValueError("a mistake of mine")

    head = Wished()
    view = Callbacks([only("on_step", mine), only("on_step", lambda step: heard.append(step.step))])
    view.end_with(head.finish, head.stop)
    view.step(STEP)
    view.step(STEP)
    message = "the callback mine.on_step raised ValueError: a mistake of mine (at step 3)"
    assert head.told == [("stop", message)]
    assert heard == []
    assert str(view.error) == message
    assert view.error is not None
    assert view.error.user_traceback.count("File ") == 1  # the user's own frame
    assert 'raise ValueError("a mistake of mine")' in view.error.user_traceback


def test_without_tensorboard_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.callbacks.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install lyray\[tensorboard\]"):
        TensorBoardWriter("logs")


def test_a_bucket_is_refused_for_tensorboard() -> None:
    with pytest.raises(ConfigError, match="cannot be written to s3://bucket/run/tensorboard"):
        TensorBoardWriter("s3://bucket/run/tensorboard")


def test_where_nothing_can_be_written_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = TensorBoardWriter(str(tmp_path / "file"))
    view = Callbacks([writer])
    view.step(STEP)
    view.step(STEP)
    view.close()
    assert view.error is None


def test_the_names_of_a_script_load_neither_ray_nor_torch() -> None:
    assert orchestrator.STOP is STOP
    code = (
        "import sys; from orchestrator import STOP, Callback; "
        "print(sorted({'ray', 'torch', 'tensorboard'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
