"""Worker actors: started together, heard in one place, killed by pid. These workers are fakes."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray

from orchestrator.core.slot import WorkerFailed
from orchestrator.errors import UserCodeError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import Fleet
from orchestrator.runtime.session import ray_session
from orchestrator.runtime.trouble import Loss
from tests.runtime.processes import stays_alive

pytestmark = pytest.mark.runtime

NAMES = ("a-0", "b-0", "c-0")


@dataclass(frozen=True)
class Hello:
    pid: int
    ray_node_id: str


@dataclass(frozen=True)
class Said:
    reports: tuple[()] = ()
    parts: tuple[()] = ()
    failure: WorkerFailed | None = None
    ended_before: int | None = None


class FakeWorker:
    """Answers like a worker; fails on request."""

    def __init__(self, device_id: str) -> None:
        self._device_id = device_id

    def load(self, what: str) -> None:
        if what != "model":
            raise ValueError(f"no {what}")

    def hello(self) -> Hello:
        return Hello(os.getpid(), ray.get_runtime_context().get_node_id())

    def poll(self, linger_s: float) -> Said:
        time.sleep(linger_s / 10)
        return Said(ended_before=7)

    def fail(self, first: str) -> None:
        if self._device_id == first:
            time.sleep(0.3)
            raise UserCodeError("loss raised ValueError: no", "Traceback of the user")
        raise RuntimeError(f"lost contact with {first}: closed")

    def misbehave(self) -> str:
        if self._device_id == "a-0":
            raise RuntimeError("lost contact with c-0: closed")
        if self._device_id == "b-0":
            raise MemoryError("too large")
        time.sleep(60.0)
        return "late"

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return self._device_id

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_session(len(NAMES)):
            yield


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    started = Fleet(FakeWorker, [Place(name) for name in NAMES], lambda place: (place.device_id,))
    started.greet(60.0)
    yield started
    started.close(5.0)


def test_workers_work_at_the_same_time(fleet: Fleet) -> None:
    started_s = time.monotonic()
    answers, losses = fleet.ask("nap", str, timeout_s=30.0, each=dict.fromkeys(NAMES, (1.0,)))
    assert losses == ()
    assert answers == {name: name for name in NAMES}
    assert time.monotonic() - started_s < 2.0  # one after another: 3 s


def test_of_many_errors_the_users_own_is_raised(fleet: Fleet) -> None:
    with pytest.raises(UserCodeError, match="no") as raised:
        fleet.ask("fail", str, "b-0", timeout_s=30.0)
    assert raised.value.user_traceback == "Traceback of the user"


def test_whoever_does_not_answer_is_ended_and_named(fleet: Fleet) -> None:
    each = {"a-0": (0.0,), "b-0": (5.0,), "c-0": (0.0,)}
    answers, (loss,) = fleet.ask("nap", str, timeout_s=1.0, each=each)
    assert answers.keys() == {"a-0", "c-0"}
    assert loss.device_id == "b-0"
    assert "device b-0 did not answer 'nap' within 1 s" in loss.reason


def test_news_come_with_their_device(fleet: Fleet) -> None:
    seen: dict[str, int | None] = {}
    deadline_s = time.monotonic() + 30.0
    while len(seen) < len(NAMES) and time.monotonic() < deadline_s:
        heard, losses = fleet.gather(1.0)
        assert losses == ()
        seen.update({device_id: news.ended_before for device_id, news in heard})
    assert seen == dict.fromkeys(NAMES, 7)


def test_a_killed_process_is_a_loss_told_once(fleet: Fleet) -> None:
    fleet.gather(0.1)
    fleet.kill("b-0")
    losses = []
    deadline_s = time.monotonic() + 30.0
    while not losses and time.monotonic() < deadline_s:
        losses += fleet.gather(0.5)[1]
    assert [(loss.device_id, loss.reason) for loss in losses] == [("b-0", "its process was killed")]
    assert fleet.gather(0.5)[1] == ()
    assert [loss.device_id for loss in fleet.losses] == ["b-0"]


def test_a_stopped_process_is_ended_once_it_is_silent_for_too_long(fleet: Fleet) -> None:
    """meta-pytorch/torchft#164, #196: it is known to be dead, and the others wait for time-outs."""
    greeting = fleet.greet(30.0)["c-0"]
    os.kill(greeting.pid, signal.SIGSTOP)
    lost = []
    deadline_s = time.monotonic() + 30.0
    while not lost and time.monotonic() < deadline_s:
        fleet.gather(0.2)
        lost += fleet.kill_silent(1.0)
    assert [loss.device_id for loss in lost] == ["c-0"]
    assert "answered nothing for" in lost[0].reason
    assert not stays_alive(greeting.pid)


def muster(fleet: Fleet, longest_s: float = 60.0) -> tuple[tuple[str, ...], tuple[Loss, ...]]:
    """Wait for the next who is ready or does not make it."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        ready, losses = fleet.muster(longest_s)
        if ready or losses:
            return ready, losses
        time.sleep(0.05)
    raise TimeoutError


def test_a_lost_device_gets_a_new_worker_that_ranks_last(fleet: Fleet) -> None:
    fleet.kill("a-0")
    while not fleet.losses:
        fleet.gather(0.5)
    assert fleet.device_ids == ("b-0", "c-0")
    fleet.enlist(Place("a-0"), "model")
    assert fleet.recruited == {"a-0"}
    assert muster(fleet) == (("a-0",), ())
    assert fleet.device_ids == ("b-0", "c-0", "a-0")
    assert (fleet.losses, fleet.recruited) == ((), frozenset())
    answers, _ = fleet.ask("nap", str, 0.0, timeout_s=60.0, device_ids=["a-0"])
    assert answers == {"a-0": "a-0"}


def test_a_new_worker_that_cannot_load_or_is_too_slow_is_no_member(fleet: Fleet) -> None:
    fleet.enlist(Place("d-0"), "nothing")
    ready, (loss,) = muster(fleet)
    assert (ready, loss.device_id) == ((), "d-0")
    assert "ValueError: no nothing" in loss.reason
    fleet.enlist(Place("d-0"), "model")
    _, (loss,) = muster(fleet, longest_s=-1.0)
    assert "not ready within" in loss.reason
    assert "d-0" not in fleet.device_ids


def test_a_new_worker_whose_device_goes_before_it_is_ready_is_dismissed(fleet: Fleet) -> None:
    fleet.enlist(Place("e-0"), "model")
    fleet.dismiss("e-0")
    assert fleet.recruited == frozenset()
    assert fleet.muster(60.0) == ((), ())
    assert "e-0" not in fleet.device_ids


def test_whoever_fails_by_itself_or_is_silent_is_ended_and_a_mere_symptom_is_not(
    fleet: Fleet,
) -> None:
    answers, losses = fleet.ask("misbehave", str, timeout_s=3.0)
    assert answers == {}
    assert sorted(loss.device_id for loss in losses) == ["b-0", "c-0"]
    reasons = {loss.device_id: loss.reason for loss in losses}
    assert "MemoryError: too large" in reasons["b-0"]
    assert "did not answer 'misbehave'" in reasons["c-0"]
    assert fleet.device_ids == ("a-0",)
