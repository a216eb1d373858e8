"""RayBackend: runs the loop's plans on worker actors; the one door to the workers."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub

from orchestrator.config import RunConfig
from orchestrator.control.backend import Capabilities
from orchestrator.control.leases import committed_step
from orchestrator.control.persistence import CheckpointStore
from orchestrator.control.recovery import judge
from orchestrator.core.cluster import Offer
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Move, Plan, step_range
from orchestrator.core.schedule import SCHEDULES
from orchestrator.core.slot import ClusterEvent, CommittedStep, Decision, Observation, StepReport
from orchestrator.errors import LostWorkerError
from orchestrator.runtime.fleet import LINGER_S, Fleet, Place
from orchestrator.runtime.progress import Meter
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.watch import WAKE_S, Watch
from workers.actor import WorkerActor
from workers.emulation import EmulatedStage
from workers.output import send_output_to
from workers.profiler import profile_model
from workers.splitting import load_task, split
from workers.worker import Assignment, CheckpointPart, TaskInfo, WorkerSpec


class RayBackend:
    """Implements ``Backend`` on started workers; every method is called by one thread.

    Only ``interrupt`` may come from another one.
    """

    def __init__(
        self,
        config: RunConfig,
        rig: Rig,
        *,
        meter: Meter,
        restore: CheckpointManifest | None = None,
        on_step: Callable[[CommittedStep], None] = lambda _: None,
        before_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over what stands ready.

        Args:
            config: The whole file.
            rig: Workers that are loaded and connected.
            meter: Its clock runs from the first decision on; what an earlier life held is held
                until this one's.
            restore: The checkpoint to go on from.
            on_step: Told of every step as soon as all workers have reported it; the loop's
                own account follows at the end of the slot.
            before_checkpoint: Called before a checkpoint starts to exist, after ``on_step`` has
                been told of every step that it builds on.
        """
        self._config, self._rig, self._fleet = config, rig, rig.fleet
        self._restore, self._meter = restore, meter
        self._on_step, self._before_checkpoint = on_step, before_checkpoint
        self._timeouts = config.failure.timeouts
        self._checkpoints = CheckpointStore(
            config.run.run_url, keep_checkpoints=config.training.keep_checkpoints
        )
        self._manifest = restore
        self._watch = self._new_watch(restore.step if restore else 0, rig.num_steps)
        self._plan: Plan | None = None  # what the loop asked for
        self._installed: Plan | None = None  # whose layers the workers hold
        self._run_until_s: float | None = None
        self._applied = False  # something was decided since the start, or since ``checkpoint``
        self._told_offers = rig.cluster.offers
        self._interrupted = threading.Event()
        self._reached_s: dict[int, float] = {}
        self._slot_from_s = meter.clock.now_s()

    @property
    def capabilities(self) -> Capabilities:
        """One device a stage, and no overlap of gradient sums with backward."""
        return Capabilities(max_team=1, schedules=tuple(SCHEDULES), overlap=False)

    def now_s(self) -> float:
        """The run's clock: seconds since the run started, over all its lives."""
        return self._meter.clock.now_s()

    def interrupt(self) -> None:
        """End the slot at the next step boundary. Any thread."""
        self._interrupted.set()
        self._fleet.tell("hold", device_ids=tuple(self._watch.running))

    def observe(self) -> Observation:
        """Let the slot pass, or an event end it early, and return what happened."""
        if not self._applied:
            return self._observation(())
        end_s = self._slot_from_s + self._config.control.slot_s
        events: tuple[ClusterEvent, ...] = ()
        while not events and not self._slot_is_over(end_s):
            self._watch.pump(max(0.0, min(WAKE_S, end_s - self.now_s())))
            events = self._watch.events()
            self._follow()
        return self._observation(events)

    def apply(self, decision: Decision) -> None:
        """Run the decided plan from the next step boundary on; a kept one does not pause."""
        plan, self._run_until_s, self._applied = decision.plan, decision.run_until_s, True
        self._meter.clock.start()
        if self._interrupted.is_set():
            return  # the end is near: nothing is worth starting
        if decision.predicted.step_s:
            self._watch.step_s = decision.predicted.step_s
        if plan != self._plan:
            self._stand()
            self._meter.hold(plan.device_ids, self.now_s())
            if not plan.is_idle:
                self._install(plan, decision.migration.moves)
            self._plan = plan
        if not plan.is_idle:
            self._watch.go(plan.device_ids)

    def checkpoint(self) -> CheckpointManifest | None:
        """Stop at a step boundary and write all layers; None when nothing ran yet."""
        self._stand()
        self._applied = False
        step = self._watch.progress.next_step
        if self._installed is None or (self._manifest and self._manifest.step == step):
            return self._manifest
        parts = self._fleet.call(
            "save",
            CheckpointPart,
            step,
            timeout_s=self._timeouts.checkpoint_s,
            device_ids=self._installed.device_ids,
        )
        for device_id, part in parts.items():
            self._watch.progress.part(device_id, step, part.files)
        self._follow()
        return self._manifest

    def close(self) -> None:
        """End every worker; devices that are lost are held no longer. Safe to call twice."""
        for device_id in self._fleet.lost_ids:
            self._meter.release(device_id, self.now_s())
        self._fleet.close(self._timeouts.receive_s)

    def measure(self, plan: Plan, num_steps: int) -> tuple[StepReport, ...]:
        """Run a plan for a few steps that count for nothing; before the first ``apply`` only.

        Returns:
            Every device's reports of every step.

        Raises:
            OrchestratorError: If a worker fails meanwhile.
        """
        assert self._plan is None, "measuring would disturb the run"
        kept, self._watch = self._watch, self._new_watch(0, num_steps)
        try:
            self._install(plan, (), discard=True)
            self._watch.go(plan.device_ids)
            while self._watch.running:
                self._watch.pump(WAKE_S)
                judge(self._watch.events(), in_use=plan.device_ids, checkpoint_step=None)
            return self._watch.progress.take()
        finally:
            self._watch, self._installed = kept, None

    # Inside a slot -------------------------------------------------------------------

    def _slot_is_over(self, end_s: float) -> bool:
        """Whether the loop must look; asks the workers to hold where the slot ends for good."""
        now_s, watch = self.now_s(), self._watch
        cap_s = self._run_until_s
        stopped = self._interrupted.is_set() or (
            cap_s is not None and now_s >= cap_s - 2.0 * watch.step_s
        )
        if self._offers() != self._told_offers:
            return True
        if self._plan is None or self._plan.is_idle:
            return now_s >= end_s or stopped
        if stopped:
            watch.hold()
        if watch.running:
            return now_s >= end_s and not stopped
        if watch.holding or watch.finished:
            return True
        watch.go(self._plan.device_ids)  # the window was used up before it could be extended
        return now_s >= end_s

    def _follow(self) -> None:
        """Do what has become due: manifests of whole checkpoints, emulated events, lost devices."""
        batch, total = self._config.training.global_batch, self._rig.num_samples
        for reports in self._watch.progress.fresh():
            self._on_step(committed_step(reports, *step_range(reports[0].step, batch, total)))
        for step, files in self._watch.progress.whole_checkpoints():
            assert self._installed is not None, "parts come from an installed plan"
            self._manifest = CheckpointManifest(
                step=step,
                generation=self._installed.generation,
                files=files,
                num_layers=self._rig.model.num_layers,
                samples_committed=step_range(step, batch, total)[0],
                seed=self._config.run.seed,
                optimizer=self._config.training.optimizer.name,
            )
            self._before_checkpoint()
            self._checkpoints.write_manifest(self._manifest)
        for loss in self._watch.lost():
            self._meter.release(loss.device_id, self.now_s())
        next_step = self._watch.progress.next_step
        if self._rig.truth is not None and self._plan is not None:
            for event in self._rig.truth.events:
                if event.at_step <= next_step:
                    self._reached_s.setdefault(event.at_step, self.now_s())
            for device_id in self._rig.truth.lost_at(next_step):
                if device_id not in self._fleet.lost_ids:
                    self._fleet.kill(device_id)

    def _observation(self, events: tuple[ClusterEvent, ...]) -> Observation:
        self._slot_from_s = now_s = self.now_s()
        self._told_offers = self._offers()
        gone = self._fleet.lost_ids
        return Observation(
            now_s=now_s,
            usage=self._meter.cut(now_s),
            reports=self._watch.progress.take(),
            events=events,
            offers=self._told_offers,
            next_step=self._watch.progress.next_step,
            devices=tuple(d for d in self._rig.cluster.devices if d.device_id not in gone),
            checkpoint_step=self._manifest.step if self._manifest else None,
        )

    def _offers(self) -> tuple[Offer, ...]:
        if self._rig.truth is None:
            return self._rig.cluster.offers
        return self._rig.truth.offers_at(self._watch.progress.next_step, self._reached_s)

    # At a step boundary --------------------------------------------------------------

    def _new_watch(self, next_step: int, last_step: int) -> Watch:
        return Watch(
            self._fleet,
            self._timeouts,
            slot_s=self._config.control.slot_s,
            next_step=next_step,
            last_step=last_step,
        )

    def _stand(self) -> None:
        """Bring every worker to the same step boundary. Raises what ends the run instead."""
        events = self._watch.stand()
        self._follow()
        judge(
            events,
            in_use=self._plan.device_ids if self._plan else (),
            checkpoint_step=self._manifest.step if self._manifest else None,
        )

    def _install(self, plan: Plan, moves: tuple[Move, ...], *, discard: bool = False) -> None:
        if gone := self._fleet.lost_ids:
            raise LostWorkerError(
                f"device {gone[0]} was lost while idle, and the plan cannot change without it; "
                "the same command resumes from the last checkpoint"
            )
        first_step = self._watch.progress.next_step
        assignment = Assignment(
            generation=plan.generation,
            plan=plan,
            device_ids=self._fleet.device_ids,
            moves=moves,
            first_step=first_step,
            end_step=self._watch.reach,
            restore=None if self._installed or discard else self._restore,
            emulation=self._emulation(plan, first_step),
            discard=discard,
            clock_zero_s=time.monotonic() - self.now_s(),
        )
        # Devices of other machines have monotonic clocks of their own: they go by wall time.
        wall_zero_s = time.time() - self.now_s() if self._rig.truth is None else None
        self._fleet.call(
            "install", NoneType, assignment, wall_zero_s, timeout_s=self._timeouts.checkpoint_s
        )
        self._installed = plan
        self._watch.progress.expect(plan.device_ids, plan.generation)

    def _emulation(self, plan: Plan, first_step: int) -> Mapping[str, EmulatedStage] | None:
        if self._rig.truth is None:
            return None
        return {
            device_id: EmulatedStage(
                seconds=dict(stage.seconds),
                to_next=stage.to_next,
                to_previous=stage.to_previous,
                step_end_s=stage.step_end_s,
                slowdowns=stage.slowdowns,
            )
            for device_id, stage in self._rig.truth.stages(plan, first_step).items()
        }


# Before the first slot ---------------------------------------------------------------


def start_fleet(config: RunConfig, places: Sequence[Place], *, num_threads: int) -> Fleet:
    """Start one process per device; their output goes to ``logs/`` of the run where it is local."""

    def arguments(place: Place) -> tuple[object, ...]:
        return place.device_id, _log_path(config, place.device_id), num_threads

    linger_s = min(LINGER_S, config.control.slot_s / 4.0)
    return Fleet(WorkerActor, places, arguments, linger_s=linger_s)


def send_output(config: RunConfig, name: str) -> None:
    """Send this process's output to ``logs/`` of the run where it is local, else leave it."""
    path = _log_path(config, name)
    if path is not None:
        send_output_to(path)


def _log_path(config: RunConfig, name: str) -> Path | None:
    run_url = config.run.run_url
    return None if "://" in run_url else Path(run_url) / "logs" / f"{name}.log"


def load_everywhere(
    config: RunConfig, fleet: Fleet, places: Sequence[Place], working_dir: str
) -> TaskInfo:
    """Have every worker import the user's task and split the model; return what it turned out.

    Raises:
        UserCodeError: If the user's code raises.
        LostWorkerError: If a worker does not come up.
    """
    timeouts, training = config.failure.timeouts, config.training
    spec = WorkerSpec(
        task=training.task,
        task_args=training.task_args,
        options=training,
        seed=config.run.seed,
        run_url=config.run.run_url,
        timeout_s=timeouts.receive_s,
        working_dir=working_dir,
    )
    infos = fleet.call(
        "load",
        TaskInfo,
        timeout_s=timeouts.start_s,
        each={
            p.device_id: (replace(spec, device="cuda" if p.num_gpus else "cpu"),) for p in places
        },
    )
    return infos[fleet.device_ids[0]]


def connect(config: RunConfig, fleet: Fleet, *, host: str) -> None:
    """Join all workers in one world; the store behind it lives as long as this process.

    Raises:
        LostWorkerError: If they do not find each other in time.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    world = fleet.device_ids
    fleet.call(
        "connect",
        NoneType,
        timeout_s=config.failure.timeouts.start_s,
        each={d: (host, store.port, rank, len(world)) for rank, d in enumerate(world)},
    )
    fleet.keep(store)


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
