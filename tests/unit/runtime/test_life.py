"""What the job makes of a head that does not answer, cannot be reached, or did not start."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from orchestrator.core.slot import Outcome
from orchestrator.errors import UserCodeError
from orchestrator.runtime import life
from orchestrator.runtime.signals import StopSignals

Answer = Callable[[], object]


class Refs:
    """As much of Ray as the job asks a head with: a reference is its own answer."""

    def wait(self, refs: Sequence[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        return list(refs), []

    def get(self, ref: Answer) -> object:
        return ref()


def raises(error: Exception) -> Answer:
    def answer() -> object:
        raise error

    return answer


def follow(monkeypatch: pytest.MonkeyPatch, end: Answer, news: Exception) -> Outcome:
    monkeypatch.setattr(life, "ray", Refs())
    head: Any = SimpleNamespace(
        status=SimpleNamespace(remote=lambda cursor: raises(news)),
        pid=SimpleNamespace(remote=lambda: os.getpid),
    )
    return life.follow(head, end, None, StopSignals(), life.Watchdog(head, 60.0))


@pytest.mark.parametrize("news", [ActorDiedError(), ActorUnavailableError("no answer", None)])
def test_a_run_has_ended_as_it_says_whatever_became_of_the_head_since(
    monkeypatch: pytest.MonkeyPatch, news: Exception
) -> None:
    """ray-project/ray#65025: a failover of the control plane marks a live job as failed."""
    outcome = Outcome("finished", "all done", resumable=False)
    assert follow(monkeypatch, lambda: outcome, news) is outcome
    error = RayTaskError("run", "Traceback", UserCodeError("your code raised"))
    with pytest.raises(UserCodeError, match="your code raised"):
        follow(monkeypatch, raises(error), news)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), "the head process was killed; workers ended with it"),
        (OutOfMemoryError("3 workers"), "the head process was killed: the memory of its machine"),
        (ActorUnavailableError("no answer", None), "could not be reached any more and was ended"),
        (
            RayActorError(error_msg="it died\nOSError: full", actor_init_failed=True),
            "the head process did not start: OSError: full",
        ),
    ],
)
def test_how_a_head_ended_is_told_as_far_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, error: RayError, told: str
) -> None:
    """ray-project/kuberay#2161: the head dies, and the job stays RUNNING."""
    with pytest.raises(life.HeadDiedError) as raised:
        follow(monkeypatch, raises(error), error)
    assert told in str(raised.value.told)


class Silence(Refs):
    """A head whose process stands: it answers no question, and its run ends with the process."""

    def __init__(self, head: "subprocess.Popen[bytes]", *, is_up: bool) -> None:
        self._head, self._is_up = head, is_up
        self.num_waits = 0

    def wait(self, refs: Sequence[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        self.num_waits += 1
        assert self.num_waits < 10_000, "nobody ended it"
        if self.num_waits == 1_000:
            self._is_up = True
        done = {self._answer_pid: self._is_up, self.end: self._head.poll() is not None}
        ready = [ref for ref in refs if done.get(ref)]
        return ready, [ref for ref in refs if ref not in ready]

    def _answer_pid(self) -> int:
        return self._head.pid

    def end(self) -> object:
        raise ActorDiedError

    @property
    def handle(self) -> Any:
        return SimpleNamespace(
            status=SimpleNamespace(remote=lambda cursor: raises(ActorDiedError())),
            pid=SimpleNamespace(remote=lambda: self._answer_pid),
        )


@pytest.mark.parametrize("is_up", [True, False])
def test_a_head_that_hangs_is_ended_and_told_of_but_not_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, is_up: bool
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    try:
        refs = Silence(process, is_up=is_up)
        monkeypatch.setattr(life, "ray", refs)
        watchdog = life.Watchdog(refs.handle, longest_s=0.0)
        with pytest.raises(life.HeadDiedError) as raised:
            life.follow(refs.handle, refs.end, None, StopSignals(), watchdog)
        assert "the head process answered nothing for" in str(raised.value.told)
        assert process.wait() == -signal.SIGKILL
        assert is_up or refs.num_waits >= 1_000
    finally:
        process.kill()
        process.wait()
