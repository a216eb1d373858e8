"""The workers of a run and what is asked of all of them together."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from orchestrator.config import RunConfig
from orchestrator.core.durable import CheckpointManifest, CheckpointPart
from orchestrator.core.evaluation import Evaluated
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Move, Plan
from orchestrator.errors import LostWorkerError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import LINGER_S, SILENT_S, Answer, Fleet
from orchestrator.runtime.link_speeds import Timings, time_pairs
from orchestrator.runtime.preflight import by_node, expel_apart, find_misses, refuse
from orchestrator.runtime.processes import emulated_stages, log_path, worker_spec
from orchestrator.runtime.same_code import same_code
from orchestrator.runtime.truth import StageTruth
from orchestrator.runtime.watch import Watch
from workers.actor import WorkerActor
from workers.meeting import Meeting
from workers.orders import Holders, agreed_samples, holders_of, last_applied
from workers.worker import Assignment, Standing, TaskInfo, WorkerSpec

if TYPE_CHECKING:
    from orchestrator.core.code import KnownCode

logger = logging.getLogger(__name__)


ATTEMPTS = 4
"""So often workers try to meet, counted anew whenever one more of them is lost."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The step boundary at which all workers stand, and who holds which layer there."""

    next_step: int
    holders: Holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan to take places in, from which step on, and where layers nobody holds come from."""

    plan: Plan
    moves: tuple[Move, ...]
    first_step: int
    end_step: int
    restore: CheckpointManifest | None
    discard: bool
    evaluated: Evaluated
    run_clock_s: float  # now
    stages: Mapping[str, StageTruth] | None  # of emulated devices


class Crew:
    """Starts, loads and joins workers, and gives them their places in plans.

    They join through a store of this process, every time through a new one: nothing that an
    earlier world left, and nobody who still belongs to it, can disturb them.
    """

    def __init__(
        self,
        config: RunConfig,
        places: Sequence[Place],
        working_dir: str,
        *,
        host: str,
        actors: Any,
    ) -> None:
        """Start one process per device; returns before they are up.

        Args:
            config: The whole file. Where its run's folder is local, the workers' output goes
                to ``logs/`` there.
            places: Where the devices are.
            working_dir: Where the user's task is imported from.
            host: Where this process can be reached by all workers.
            actors: Ray, or what offers as much of it.
        """
        self._timeouts = config.failure.timeouts
        # Whoever waits for one that died may do so for as long as a receive: it is not hung.
        self._patience_s = self._timeouts.receive_s + SILENT_S
        self._shares_clock = config.cluster.source == "emulated"
        self._config, self._working_dir = config, working_dir
        self._places = {place.device_id: place for place in places}
        self._dataset_samples: int | None = None
        self._code: KnownCode | None = None

        def arguments(place: Place) -> tuple[object, ...]:
            return place.device_id, log_path(config, place.device_id), place.num_threads

        linger_s = min(LINGER_S, config.control.slot_s / 4.0)
        self.fleet = Fleet(WorkerActor, places, arguments, linger_s=linger_s, actors=actors)
        self._host = host
        self.infos: dict[str, TaskInfo] = {}  # by device, as of the start
        self._meetings = deque[Meeting](maxlen=2)  # some may not have left the last world
        self._world: tuple[str, ...] = ()  # who is joined, in the order of their ranks

    @property
    def is_joined(self) -> bool:
        """Whether exactly the workers that are there are joined with each other."""
        return bool(self._world) and self._world == self.fleet.device_ids

    def get_ready(self) -> TaskInfo:
        """Wait until they are up and have loaded the user's task; whoever is lost is left out.

        Returns:
            What the task turned out to be.

        Raises:
            UserCodeError: If the user's code raises.
            ConfigError: If they do not see the same dataset, or do not run the job's code.
            LostWorkerError: If nobody is left, or whoever checks the task is lost again and again.
        """
        for device_id, greeting in self.fleet.greet(self._timeouts.start_s).items():
            logger.info("%s: process %s on node %s", device_id, greeting.pid, greeting.ray_node_id)
        infos = self._load()
        self._code = same_code({d: info.code for d, info in infos.items()}, self._working_dir)
        self._dataset_samples = agreed_samples(infos)
        self.infos = infos
        return next(iter(infos.values()))

    def _load(self) -> dict[str, TaskInfo]:
        """Have all load the task, which is the same for all: one of them checks it."""
        infos: dict[str, TaskInfo] = {}
        asked = self.fleet.device_ids
        for _ in range(ATTEMPTS):
            checks = next(iter(asked), None)
            loads = self._loads(checks)
            each = {device_id: loads[device_id] for device_id in asked}
            infos |= self._prepare("load", TaskInfo, each=each, device_ids=asked)
            self._expect_somebody()
            infos = {d: info for d, info in infos.items() if d in self.fleet.device_ids}
            if checks in infos:
                return infos
            asked = self.fleet.device_ids[:1]  # whoever was to check it was lost
        raise self._lost("every worker that was to check the model")

    def join(self) -> None:
        """Join those who are there with each other; whoever is lost is left out.

        Raises:
            LostWorkerError: If nobody is left, or those who are do not find each other.
            OrchestratorError: If two of them do not reach each other.
        """
        speakers = [devices[0] for devices in self._nodes()]
        refuse(find_misses(self.fleet, speakers, self._host, self._timeouts))
        for _ in self._attempts():
            self._expect_somebody()
            if self._connect(None):
                return
        raise self._apart()

    def profile(self, device_ids: Iterable[str], *, fresh: bool = False) -> dict[str, ModelProfile]:
        """Have these workers measure the layers on their devices, all at the same time.

        Real devices are measured in wall time: what a quota or a neighbour takes, it takes.

        Args:
            device_ids: Of those who measure.
            fresh: Measure again what their machines know from earlier.

        Returns:
            What those measured who were not lost meanwhile.

        Raises:
            UserCodeError: If the user's code raises.
            LostWorkerError: If nobody is left.
        """
        answers = self._prepare(
            "profile", ModelProfile, not self._shares_clock, fresh, device_ids=device_ids
        )
        self._expect_somebody()
        return answers

    def time_messages(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Timings]:
        """How long messages of several sizes take between two devices, one pair after another.

        Returns:
            Message bytes and seconds one way, of the pairs that were not lost meanwhile.
        """
        return time_pairs(self.fleet, pairs, self._host, self._timeouts)

    def _prepare(
        self, method: str, answer: type[Answer], *arguments: object, **whom: Any
    ) -> dict[str, Answer]:
        """Ask before anything runs: nobody waits for another, and so each has all the time."""
        start_s = self._timeouts.start_s
        answers, losses = self.fleet.ask(
            method, answer, *arguments, timeout_s=start_s, patience_s=start_s, **whom
        )
        for loss in losses:
            logger.warning("device %s is left out: %s", loss.device_id, loss.reason)
        return answers

    def _expect_somebody(self) -> None:
        if not self.fleet.device_ids:
            raise self._lost("every worker")

    def _lost(self, who: str) -> LostWorkerError:
        told = "; ".join(f"device {loss.device_id}: {loss.reason}" for loss in self.fleet.losses)
        return LostWorkerError(f"{who} was lost before the first step: {told}")

    def install(self, order: Order) -> bool:
        """Have all take their places at a step boundary; False when not all could.

        Some may be lost then, or only have lost contact: ``regroup`` tells, and joins the rest.

        Raises:
            OrchestratorError: If the checkpoint or the optimizer does not fit the model.
        """
        assignment = Assignment(
            generation=order.plan.generation,
            plan=order.plan,
            device_ids=self._world,
            moves=order.moves,
            first_step=order.first_step,
            end_step=order.end_step,
            restore=order.restore,
            emulation=emulated_stages(order.stages),
            discard=order.discard,
            evaluated=order.evaluated,
            clock_zero_s=time.monotonic() - order.run_clock_s,
        )
        # Devices of other machines have monotonic clocks of their own: they go by wall time.
        wall_zero_s = None if self._shares_clock else time.time() - order.run_clock_s
        ready, _ = self.fleet.ask(
            "install",
            NoneType,
            assignment,
            wall_zero_s,
            timeout_s=self._timeouts.checkpoint_s,
            patience_s=self._patience_s,
        )
        return ready.keys() >= set(self._world)

    def save(self, watch: Watch, step: int, holders: Holders) -> tuple[CheckpointPart, ...] | None:
        """Have every layer written by the first of those who hold it; None: one of them is lost.

        Args:
            watch: Told of those lost meanwhile.
            step: The boundary at which all stand.
            holders: Who holds which layer.
        """
        if not set(self._world) >= {device for devices in holders.values() for device in devices}:
            return None  # another worker has taken the place of one that held layers
        layers: dict[str, list[int]] = {}
        for layer, devices in sorted(holders.items()):
            first = min(devices, key=self._world.index)  # who writes it during the run, too
            layers.setdefault(first, []).append(layer)
        parts, losses = self.fleet.ask(
            "save",
            CheckpointPart,
            step,
            timeout_s=self._timeouts.checkpoint_s,
            patience_s=self._timeouts.checkpoint_s,  # whoever writes waits for nobody
            device_ids=layers,
            each={device_id: (tuple(mine),) for device_id, mine in layers.items()},
        )
        watch.lose(losses)
        return tuple(parts.values()) if parts.keys() == layers.keys() else None

    # Coming and going ----------------------------------------------------------------

    def enlist(self, place: Place) -> None:
        """Start a worker on a device that has none; nobody waits for it."""
        self._places[place.device_id] = place
        if place.device_id in self._world:
            self._world = ()  # whoever takes the place is not joined yet
        self.fleet.enlist(place, self._spec(place))

    # After a fault -------------------------------------------------------------------

    def regroup(self, watch: Watch) -> Boundary | None:
        """Bring whoever is left to one step boundary, and join them again; None: nobody is left.

        A step that any of them has applied is applied by all, any other by none. Whoever does not
        reach the others is left out.

        Raises:
            LostWorkerError: If those who are left do not find each other.
        """
        for _ in self._attempts():
            self.fleet.tell("abort")
            watch.drain()
            standings = self._ask(watch, "standing", Standing)
            if not standings:
                return None
            holders = {d for d, standing in standings.items() if standing.layers}
            if self.part(watch, sorted(standings, key=lambda d: d not in holders)):
                continue  # before they try to join: who waits for somebody in vain looks hung
            step, verdict = last_applied(standings)
            self._ask(watch, "settle", NoneType, step, verdict)
            if self._connect(watch):
                return Boundary(step, holders_of({d: standings[d] for d in self._world}))
        raise self._apart()

    def part(self, watch: Watch, order: Sequence[str]) -> bool:
        """End those who do not reach all others, with all of their node; whether there are any.

        Args:
            watch: Told of them, and of those lost meanwhile.
            order: Who may be done without; those at the end go first.
        """
        found = expel_apart(self.fleet, self._nodes(), order, self._host, self._timeouts)
        watch.lose(self.fleet.losses)
        return found

    def _nodes(self) -> tuple[tuple[str, ...], ...]:
        return by_node(self._places[device_id] for device_id in self.fleet.device_ids)

    def _attempts(self) -> Iterator[None]:
        """Try again, so often, but anew whenever one more of them is lost."""
        attempts = ATTEMPTS
        while attempts:
            left = self.fleet.device_ids
            yield
            attempts = attempts - 1 if left == self.fleet.device_ids else ATTEMPTS

    def _apart(self) -> LostWorkerError:
        names = ", ".join(self.fleet.device_ids)
        return LostWorkerError(f"the workers of {names} do not find each other")

    def _connect(self, watch: Watch | None) -> bool:
        """Let all find each other; False when not all could. ``watch``: told of those lost."""
        each = self._addresses()
        # Joining is several waits in a row, of a receive each: who waits in vain is not hung.
        longest_s = self._timeouts.checkpoint_s
        joined = self._ask(watch, "connect", NoneType, each=each, timeout_s=longest_s)
        if joined.keys() == each.keys():
            self._world = tuple(each)
            return True
        return False

    def forget(self, watch: Watch, step: int, *, anew: bool) -> None:
        """Have all forget their layers, which will be restored as of ``step``.

        Args:
            watch: Told of those lost meanwhile.
            step: Where they will go on.
            anew: Build the model anew, as the seed wants it: there is nothing to restore from.
        """
        if not anew:
            self._ask(watch, "rewind", NoneType, step)
            return
        self._ask(watch, "load", TaskInfo, each=self._loads(), timeout_s=self._timeouts.start_s)
        self._world = ()

    def _ask(
        self,
        watch: Watch | None,
        method: str,
        answer: type[Answer],
        *arguments: object,
        each: Mapping[str, tuple[object, ...]] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Answer]:
        longest_s = self._timeouts.hold_s if timeout_s is None else timeout_s
        answers, losses = self.fleet.ask(
            method,
            answer,
            *arguments,
            timeout_s=longest_s,
            each=each,
            patience_s=self._patience_s,
        )
        if watch is not None:
            watch.lose(losses)
        return answers

    def _addresses(self) -> dict[str, tuple[object, ...]]:
        """What each worker is told to connect to: a store that is new, its rank of how many."""
        meeting, members = Meeting(self._host), self.fleet.device_ids
        self._meetings.append(meeting)
        return {
            device_id: (meeting.invitation, rank, len(members))
            for rank, device_id in enumerate(members)
        }

    def _loads(self, checks: str | None = None) -> dict[str, tuple[object, ...]]:
        """What each is told to load; one of them checks the task."""
        ids = self.fleet.device_ids
        return {d: (self._spec(self._places[d], check=d == checks),) for d in ids}

    def _spec(self, place: Place, *, check: bool = False) -> WorkerSpec:
        spec = worker_spec(self._config, place, self._working_dir)
        return replace(spec, dataset_samples=self._dataset_samples, code=self._code, check=check)
