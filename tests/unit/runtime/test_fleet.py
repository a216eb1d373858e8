"""What becomes of workers that Ray cannot reach."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
)

from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import Fleet
from orchestrator.runtime.trouble import Loss


@dataclass(frozen=True, eq=False)
class Method:
    remote: Callable[..., object]


class Shell(Method):
    """What starts an actor."""

    def options(self, **options: object) -> "Shell":
        return self


class OutOfReach:
    """An actor; every call of it errs."""

    def __getattr__(self, name: str) -> Method:
        return Method(lambda *arguments: object())


@dataclass
class Actors:
    """As much of Ray as a fleet asks for."""

    killed: list[object] = field(default_factory=list)
    error: Exception | None = None

    def remote(self, **options: object) -> Callable[[type], Shell]:
        return lambda actor_class: Shell(lambda *arguments: actor_class())

    def wait(self, refs: Sequence[object], **options: object) -> tuple[list[object], list[object]]:
        return list(refs), []

    def get(self, ref: object) -> object:
        raise ActorUnavailableError("no answer", None) if self.error is None else self.error

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


def test_a_worker_out_of_reach_is_ended_when_it_is_taken_for_lost() -> None:
    actors = Actors()
    fleet = Fleet(OutOfReach, [Place("a-0")], lambda place: (), actors=actors)
    answers, losses = fleet.ask("standing", NoneType, timeout_s=1.0)
    assert answers == {}
    assert losses == (Loss("a-0", "lost contact with it"),)
    assert len(actors.killed) == 1
    assert fleet.device_ids == ()


def fleet_of(actors: Actors) -> Fleet:
    places = [Place("a-0", node_id="a-node0")]
    return Fleet(OutOfReach, places, lambda place: (), linger_s=0.0, actors=actors)


def test_a_worker_that_stays_out_of_reach_is_found_however_often_it_was_asked() -> None:
    fleet = fleet_of(Actors())
    for _ in range(3):
        assert fleet.gather(0.05) == ((), ())
    (loss,) = fleet.kill_silent(0.1)
    assert loss.device_id == "a-0"
    assert loss.reason.startswith("lost contact with node a-node0 for ")
    assert fleet.device_ids == ()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("The actor died because its node has died. Node Id: 1", "lost contact with node a-node0"),
        ("its worker process has died. Worker exit type: SYSTEM_ERROR", "its process was killed"),
    ],
)
def test_of_a_node_that_is_gone_nobody_says_that_a_process_was_killed(
    told: str, reason: str
) -> None:
    fleet = fleet_of(Actors(error=RayActorError(error_msg=told)))
    assert fleet.gather(0.0) == ((), (Loss("a-0", reason),))


def test_a_worker_that_ray_killed_for_memory_is_told_of_as_such_and_in_one_line() -> None:
    full = OutOfMemoryError("2 worker(s) were killed\nTop 10 memory users:\n...")
    fleet = fleet_of(Actors(error=full))
    why = "was killed: the memory of its machine ran out"
    assert fleet.gather(0.0) == ((), (Loss("a-0", f"its process {why}"),))
    fleet = Fleet(OutOfReach, [Place("a-0")], lambda place: (), actors=Actors(error=full))
    fleet.enlist(Place("b-0"))
    assert fleet.muster(60.0) == ((), (Loss("b-0", f"its new worker {why}"),))


def test_a_new_worker_whose_node_has_just_gone_is_lost_and_ends_nothing() -> None:
    """ray-project/ray#24875: a second node dies while the first is being replaced."""
    actors = Actors(error=ActorUnschedulableError("The node doesn't exist any more"))
    fleet = Fleet(OutOfReach, [Place("a-0")], lambda place: (), actors=actors)
    fleet.enlist(Place("b-0"))
    ready, (loss,) = fleet.muster(60.0)
    assert (ready, loss.device_id) == ((), "b-0")
    assert loss.reason.startswith("its new worker failed: ")
    assert fleet.recruited == frozenset()
    assert fleet.device_ids == ("a-0",)


def test_an_answer_that_nobody_has_listened_to_yet_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All may be asked for something that takes long, such as a checkpoint or to join others."""
    actors = Actors()
    fleet = fleet_of(actors)
    monkeypatch.setattr(actors, "wait", lambda refs, **options: ([], list(refs)))
    assert fleet.gather(0.0) == ((), ())  # it is asked, and has not answered yet
    monkeypatch.undo()
    assert fleet.kill_silent(-1.0) == ()
    monkeypatch.setattr(actors, "wait", lambda refs, **options: ([], list(refs)))
    (loss,) = fleet.kill_silent(-1.0)
    assert loss.reason.startswith("it answered nothing for")
    assert fleet.losses == (loss,)
