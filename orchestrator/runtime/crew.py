"""The workers of a run and what is asked of all of them together; the one door to them."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub

from orchestrator.config import RunConfig
from orchestrator.core.durable import CheckpointManifest, CheckpointPart
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Move, Plan
from orchestrator.errors import LostWorkerError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import LINGER_S, SILENT_S, Answer, Fleet
from orchestrator.runtime.truth import StageTruth
from orchestrator.runtime.watch import Watch
from workers.actor import WorkerActor
from workers.emulation import Delay, EmulatedStage
from workers.faults import FaultAct, Injector, ProcessFault
from workers.output import send_output_to
from workers.profiler import profile_model
from workers.splitting import load_task, split
from workers.update import Verdict
from workers.worker import Assignment, Standing, TaskInfo, WorkerSpec

logger = logging.getLogger(__name__)

Holders = Mapping[int, tuple[str, ...]]
"""Devices that hold each layer, by layer; a layer that nobody holds is missing."""

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
    run_clock_s: float  # now
    stages: Mapping[str, StageTruth] | None  # of emulated devices


class Crew:
    """Starts, loads and joins workers, and gives them their places in plans.

    They join through one store, which lives as long as this process, and every time under a
    name of its own: nothing that an earlier world left there, and nobody who still belongs to
    it, can disturb them.
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

        def arguments(place: Place) -> tuple[object, ...]:
            return place.device_id, _log_path(config, place.device_id), place.num_threads

        linger_s = min(LINGER_S, config.control.slot_s / 4.0)
        self.fleet = Fleet(WorkerActor, places, arguments, linger_s=linger_s, actors=actors)
        self._host = host
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._num_worlds = 0
        self._world: tuple[str, ...] = ()  # who is joined, in the order of their ranks

    @property
    def is_joined(self) -> bool:
        """Whether exactly the workers that are there are joined with each other."""
        return bool(self._world) and self._world == self.fleet.device_ids

    def get_ready(self) -> int:
        """Wait until all are up, have them load the user's task, and join them.

        Returns:
            Number of samples in the user's dataset.

        Raises:
            UserCodeError: If the user's code raises.
            LostWorkerError: If a worker does not come up, or finds the others too late.
        """
        for device_id, greeting in self.fleet.greet(self._timeouts.start_s).items():
            logger.info("%s: process %s on node %s", device_id, greeting.pid, greeting.ray_node_id)
        infos = self.fleet.call(
            "load", TaskInfo, timeout_s=self._timeouts.start_s, each=self._loads()
        )
        each = self._addresses()
        self.fleet.call("connect", NoneType, timeout_s=self._timeouts.start_s, each=each)
        self._world = tuple(each)
        return infos[self._world[0]].dataset_samples

    def profile(self, device_ids: Iterable[str]) -> dict[str, ModelProfile]:
        """Have these workers measure the layers on their devices, all at the same time.

        Real devices are measured in wall time: what a quota or a neighbour takes, it takes.

        Raises:
            UserCodeError: If the user's code raises.
            LostWorkerError: If a worker is lost.
        """
        return self.fleet.call(
            "profile",
            ModelProfile,
            not self._shares_clock,
            timeout_s=self._timeouts.start_s,
            device_ids=device_ids,
        )

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
            emulation=_emulation(order.stages),
            discard=order.discard,
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

        A step that any of them has applied is applied by all, any other by none.

        Raises:
            LostWorkerError: If those who are left do not find each other.
        """
        attempts = ATTEMPTS
        while attempts:
            left = self.fleet.device_ids
            self.fleet.tell("abort")
            watch.drain()
            standings = self._ask(watch, "standing", Standing)
            if not standings:
                return None
            step, verdict = last_applied(standings)
            self._ask(watch, "settle", NoneType, step, verdict)
            each = self._addresses()
            joined = self._ask(watch, "connect", NoneType, each=each)
            if joined.keys() == each.keys():
                self._world = tuple(each)
                return Boundary(step, _held({d: standings[d] for d in each}))
            attempts = attempts - 1 if left == self.fleet.device_ids else ATTEMPTS
        raise LostWorkerError(
            f"the workers of {', '.join(self.fleet.device_ids)} do not find each other any more"
        )

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
        watch: Watch,
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
        watch.lose(losses)
        return answers

    def _addresses(self) -> dict[str, tuple[object, ...]]:
        """What each worker is told to connect to: a store, its rank, and the name of the world."""
        self._num_worlds += 1
        members = self.fleet.device_ids
        place = (len(members), f"world-{self._num_worlds}")
        return {
            device_id: (self._host, self._store.port, rank, *place)
            for rank, device_id in enumerate(members)
        }

    def _loads(self) -> dict[str, tuple[object, ...]]:
        return {d: (self._spec(self._places[d]),) for d in self.fleet.device_ids}

    def _spec(self, place: Place) -> WorkerSpec:
        """What a worker needs to import the user's task and split the model."""
        training = self._config.training
        return WorkerSpec(
            task=training.task,
            task_args=training.task_args,
            options=training,
            seed=self._config.run.seed,
            run_url=self._config.run.run_url,
            timeout_s=self._timeouts.receive_s,
            working_dir=self._working_dir,
            device="cuda" if place.num_gpus else "cpu",
            faults=_process_faults(self._config, place.device_id),
        )


def last_applied(standings: Mapping[str, Standing]) -> tuple[int, Verdict | None]:
    """The boundary to go on from, and the verdict of the step before it.

    It is the one behind the newest step that anybody left has applied: all others hold its
    summed gradients. A step that only a lost worker applied is no one's: it is run again.
    """
    able = [s for s in standings.values() if s.layers] or list(standings.values())
    newest = max(able, key=lambda standing: standing.next_step)
    return newest.next_step, newest.verdict


def _held(standings: Mapping[str, Standing]) -> Holders:
    layers = sorted({layer for standing in standings.values() for layer in standing.layers})
    return {
        layer: tuple(d for d, standing in standings.items() if layer in standing.layers)
        for layer in layers
    }


def _emulation(stages: Mapping[str, StageTruth] | None) -> Mapping[str, EmulatedStage] | None:
    if stages is None:
        return None
    return {
        device_id: EmulatedStage(
            seconds=dict(stage.seconds),
            to_next=stage.to_next,
            to_previous=stage.to_previous,
            step_end_s=stage.step_end_s,
            slowdowns=stage.slowdowns,
            delays=tuple(Delay(*delay) for delay in stage.delays),
        )
        for device_id, stage in stages.items()
    }


def head_injector(config: RunConfig, driver_pid: int | None) -> Injector:
    """What breaks the head, and the process that started it, as the run's faults say."""
    faults = _process_faults(config, None)
    return Injector("head", faults, config.run.run_url, driver_pid=driver_pid)


def _process_faults(config: RunConfig, device_id: str | None) -> tuple[ProcessFault, ...]:
    """Faults of a worker's process, or of the head's."""
    kinds: Mapping[str, FaultAct] = {
        "fail": "fail",
        "kill_head": "fail",
        "hang": "hang",
        "disk_full": "disk_full",
        "cut_link": "cut_link",
        "kill_driver": "kill_driver",
    }
    return tuple(
        ProcessFault(number, kinds[fault.kind], fault.at_step, fault.where, fault.peer)
        for number, fault in enumerate(config.emulation.faults)
        if fault.kind in kinds and fault.device == device_id
    )


def send_output(config: RunConfig, name: str) -> None:
    """Send this process's output to ``logs/`` of the run where it is local, else leave it."""
    path = _log_path(config, name)
    if path is not None:
        send_output_to(path)


def _log_path(config: RunConfig, name: str) -> Path | None:
    run_url = config.run.run_url
    return None if "://" in run_url else Path(run_url) / "logs" / f"{name}.log"


def measure_model(config: RunConfig) -> ModelProfile:
    """Measure the user's model in this process, on its processor.

    Raises:
        UserCodeError: If the user's code raises.
        ConfigError: If the model cannot be split.
    """
    training = config.training
    if config.cluster.source == "emulated":
        torch.set_num_threads(1)  # as its workers run; then CPU time counts, not a busy neighbour
    task = load_task(training.task, training.task_args, config.run.seed)
    return profile_model(split(task), task, training)
