"""One worker's actor: where it starts, what it says, and how it is ended."""

import logging
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.durable import CheckpointPart
from orchestrator.core.evaluation import RoundReport
from orchestrator.core.slot import StepReport, WorkerFailed

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = "was killed: the memory of its machine ran out"
"""What became of a process where Ray says OutOfMemoryError, in a page of text."""


class Greeting(Protocol):
    """What a worker says of its process."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def ray_node_id(self) -> str:
        """The node it runs on."""


class News(Protocol):
    """What a worker has to say since it was last asked."""

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """Of its steps."""

    @property
    def rounds(self) -> tuple[RoundReport, ...]:
        """Of its evaluations."""

    @property
    def parts(self) -> tuple[CheckpointPart, ...]:
        """Of the checkpoints it took part in."""

    @property
    def failure(self) -> WorkerFailed | None:
        """Why it stopped, when it failed."""

    @property
    def ended_before(self) -> int | None:
        """The step before which it stands, when it stopped as asked."""

    @property
    def waits_for(self) -> str:
        """Which call of the user's data its run waits for now, in words; empty: none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device's worker starts; no Ray node: anywhere."""

    device_id: str
    ray_node_id: str | None = None
    num_gpus: int = 0
    num_threads: int = 1
    node_id: str = ""
    """What the run calls that node."""

    resource: str | None = None
    """A custom resource of the node: the worker takes one, and Ray sees that the node is used."""


@dataclass(slots=True)
class Member:
    """A worker's actor, and what is known of it."""

    actor: ActorHandle[Any]
    actors: Any
    """Ray, or what offers as much of it."""

    place: Place
    greeting: Greeting | None = None
    poll: "ray.ObjectRef[Any] | None" = None
    asked_s: float | None = None
    """Since when an answer is waited for."""

    unreachable: bool = False
    """Whether Ray could not reach it when it was last asked."""

    lost: str | None = None
    """Why it is gone."""

    ended: bool = False

    @property
    def out_of_touch(self) -> str:
        """Why it is gone if its node was not reached any more."""
        return f"lost contact with {f'node {self.place.node_id}' if self.place.node_id else 'it'}"

    def kill(self) -> None:
        """End the process at once, on whatever node it is; ``ray.kill`` needs seconds."""
        if self.ended:
            return  # its number may be another process's by now
        self.ended = True
        if self.greeting is None:
            self.actors.kill(self.actor)
        elif self.greeting.ray_node_id == self.actors.get_runtime_context().get_node_id():
            _kill_process(self.greeting.pid)
        else:
            where = _where(self.greeting.ray_node_id)
            killer = self.actors.remote(num_cpus=0, **where)(_kill_process)
            killer.remote(self.greeting.pid)


@dataclass(frozen=True, slots=True)
class Recruit:
    """A worker that is being started beside the others."""

    member: Member
    answers: tuple["ray.ObjectRef[Any]", "ray.ObjectRef[Any]"]  # to hello and load
    started_s: float


class Starter:
    """Starts workers' processes, whatever device they are for, from one class that Ray knows."""

    def __init__(self, actors: Any, actor_class: type) -> None:
        """``actors``: Ray, or what offers as much of it."""
        self._actors = actors
        # A bare actor that costs no CPU slot: Ray must never wait for room it does not need. Its
        # class is told to Ray once, as Ray never forgets one. It keeps no record of the calls:
        # they come several times a second, and such records are most of what it would keep.
        self._shell: Any = actors.remote(
            num_cpus=0, max_restarts=0, max_concurrency=8, enable_task_events=False
        )(actor_class)

    def start(self, place: Place, arguments: tuple[object, ...]) -> Member:
        """Start one; returns before it is up."""
        options = {"num_gpus": place.num_gpus, **_where(place.ray_node_id)}
        if place.resource is not None:
            options["resources"] = {place.resource: 1.0}
        return Member(self._shell.options(**options).remote(*arguments), self._actors, place)


def _where(ray_node_id: str | None) -> dict[str, Any]:
    if ray_node_id is None:
        return {}
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray_node_id, soft=False)}


def _kill_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        logger.info("process %s had ended already", pid)
