"""What becomes of workers that Ray cannot reach."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType

from ray.exceptions import ActorUnavailableError

from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import Fleet
from orchestrator.runtime.trouble import Loss


@dataclass(frozen=True, eq=False)
class Method:
    remote: Callable[..., object]


class OutOfReach:
    """An actor; every call of it errs."""

    def __getattr__(self, name: str) -> Method:
        return Method(lambda *arguments: object())


@dataclass
class Actors:
    """As much of Ray as a fleet asks for."""

    killed: list[object] = field(default_factory=list)

    def remote(self, **options: object) -> Callable[[type], Method]:
        return lambda actor_class: Method(lambda *arguments: actor_class())

    def wait(self, refs: Sequence[object], **options: object) -> tuple[list[object], list[object]]:
        return list(refs), []

    def get(self, ref: object) -> object:
        raise ActorUnavailableError("no answer", None)

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


def test_a_worker_out_of_reach_is_ended_when_it_is_taken_for_lost() -> None:
    actors = Actors()
    fleet = Fleet(OutOfReach, [Place("a-0")], lambda place: (), actors=actors)
    answers, losses = fleet.ask("standing", NoneType, timeout_s=1.0)
    assert answers == {}
    assert losses == (Loss("a-0", "its process was killed"),)
    assert len(actors.killed) == 1
    assert fleet.device_ids == ()
