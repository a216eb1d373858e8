"""RayBackend: runs the loop's plans on worker actors."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from orchestrator.config import RunConfig
from orchestrator.control.backend import Capabilities
from orchestrator.control.leases import committed_step
from orchestrator.control.recovery import judge
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.plan import Move, Plan, step_range
from orchestrator.core.schedule import SCHEDULES
from orchestrator.core.slot import (
    ClusterEvent,
    CommittedStep,
    Decision,
    DeviceLost,
    Observation,
    Recovered,
    StepReport,
    WorkerFailed,
)
from orchestrator.errors import ConfigError, LostWorkerError, OrchestratorError, UserCodeError
from orchestrator.runtime.checkpoints import Checkpoints
from orchestrator.runtime.crew import ATTEMPTS, Boundary, Order
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.runtime.progress import Meter, Progress
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.roster import Roster
from orchestrator.runtime.watch import WAKE_S, Watch


class RayBackend:
    """Implements ``Backend`` on started workers; one thread calls all but ``interrupt``."""

    def __init__(  # noqa: PLR0913 - whom to tell of what
        self,
        config: RunConfig,
        rig: Rig,
        *,
        meter: Meter,
        restore: CheckpointManifest | None = None,
        evaluations: Evaluations | None = None,
        on_step: Callable[[CommittedStep], None] = lambda _: None,
        before_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over what stands ready.

        Args:
            config: The whole file.
            rig: Workers that are loaded and connected.
            meter: Its clock runs from the first decision on.
            restore: The checkpoint to go on from.
            evaluations: Of the run; None: there are none.
            on_step: Told of every step as soon as all workers have reported it; the loop's
                own account follows at the end of the slot.
            before_checkpoint: Called before a checkpoint starts to exist, after ``on_step`` has
                been told of every step that it builds on.
        """
        self._config, self._rig = config, rig
        self._crew, self._fleet = rig.crew, rig.crew.fleet
        self._restore, self._meter, self._evaluations = restore, meter, evaluations or Evaluations()
        self._on_step, self._before_checkpoint = on_step, before_checkpoint
        self._timeouts = config.failure.timeouts
        self._checkpoints = Checkpoints(
            config,
            num_layers=rig.model.num_layers,
            num_samples=rig.num_samples,
            restore=restore,
            also=lambda: self._evaluations.kept_steps,
        )
        self._watch = Watch(
            self._fleet,
            self._timeouts,
            slot_s=config.control.slot_s,
            progress=Progress(restore.step if restore else 0, self._evaluations),
            last_step=rig.num_steps,
        )
        self._plan: Plan | None = None  # what the loop asked for
        self._generation = 0  # of the plan whose layers the workers hold
        self._holders: Mapping[int, tuple[str, ...]] = {}  # of its layers; empty: none yet
        self._run_until_s: float | None = None
        self._applied = False  # something was decided since the start, or since ``checkpoint``
        self._interrupted = threading.Event()
        self._end: OrchestratorError | None = None  # what it cost is observed before it is raised
        self._roster = Roster(
            rig,
            slot_s=config.control.slot_s,
            start_s=self._timeouts.start_s,
            next_step=self._watch.progress.next_step,
            now_s=self.now_s(),
        )
        self._told_offers = self._roster.offers()
        self._events: list[ClusterEvent] = [*self._roster.notices]  # not yet observed
        self._slot_from_s = self.now_s()
        self._watch.lose(self._fleet.losses)  # before anything ran
        self._follow()

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
            return self._observation()
        end_s = self._slot_from_s + self._config.control.slot_s
        try:
            while not self._events and not self._slot_is_over(end_s):
                self._watch.pump(max(0.0, min(WAKE_S, end_s - self.now_s())))
                events = self._watch.events()
                self._follow()
                self._take(events)
                self._events += self._roster.look(self._watch, self.now_s())
        except OrchestratorError as error:
            self._end = error
        return self._observation()

    def apply(self, decision: Decision) -> None:
        """Run the decided plan from the next step boundary on; a kept one does not pause."""
        self._applied = False  # whatever is raised here, nothing passes any more
        if self._end is not None:
            raise self._end
        self._take_up(decision)
        self._applied = True

    def _take_up(self, decision: Decision) -> None:
        plan, self._run_until_s = decision.plan, decision.run_until_s
        self._meter.clock.start()
        if self._interrupted.is_set():
            return  # the end is near: nothing is worth starting
        if decision.predicted.step_s:
            self._watch.step_s = decision.predicted.step_s
        if plan != self._plan and not self._stand():
            return  # what happened is for the next observation, and nothing runs until then
        if plan.is_idle and self._is_leaving() and not self._secure():
            return
        if plan != self._plan:
            self._meter.hold(plan.device_ids, self.now_s())
            if not plan.is_idle and not self._install(plan, decision.migration.moves):
                return
            self._plan = plan
            owes = self._evaluations.owes_checkpoint(self._watch.progress.next_step)
            if owes and not self._secure():  # a fault may have broken its checkpoint off
                return
        if not plan.is_idle:
            self._watch.go(plan.device_ids)

    def checkpoint(self) -> CheckpointManifest | None:
        """Stop at a step boundary and write all layers; None when nothing ran yet."""
        self._applied = False
        self._stand()
        self._secure()
        if isinstance(self._end, ConfigError | UserCodeError):
            raise self._end  # found behind the last step: no plan is taken up any more
        return self._checkpoints.newest

    def close(self) -> None:
        """End every worker; devices that are lost are held no longer. Safe to call twice."""
        for loss in self._fleet.losses:
            self._meter.release(loss.device_id, self.now_s())
        self._fleet.close(self._timeouts.receive_s)

    def measure(self, plan: Plan, num_steps: int) -> tuple[StepReport, ...]:
        """Run a plan for a few steps that count for nothing; before the first ``apply`` only.

        Returns:
            Every device's reports of every step; none if a device of the plan is gone.

        Raises:
            UserCodeError: If the user's code raises.
        """
        assert self._plan is None, "measuring would disturb the run"
        if set(plan.device_ids) - set(self._fleet.device_ids):
            return ()
        watch = self._watch
        kept = watch.progress, watch.last_step
        watch.progress, watch.last_step = Progress(0), num_steps
        try:
            if self._try(plan):
                return watch.progress.take()
            self._crew.regroup(watch)
            return ()
        finally:
            watch.progress, watch.last_step = kept
            self._holders = {}
            self._follow()

    def _try(self, plan: Plan) -> bool:
        """Run a plan as long as the watch allows; False when something went wrong."""
        if not self._install(plan, (), discard=True):
            return False
        self._watch.go(plan.device_ids)
        while self._watch.running:
            self._watch.pump(WAKE_S)
            if events := self._watch.events():
                judge(events, in_use=(), survives=True, checkpoint_step=None)  # the user's errors
                self._watch.end_failed(events)
                return False
        return True

    # Inside a slot -------------------------------------------------------------------

    def _slot_is_over(self, end_s: float) -> bool:
        """Whether the loop must look; asks the workers to hold where the slot ends for good."""
        now_s, watch = self.now_s(), self._watch
        cap_s = self._run_until_s
        stopped = self._interrupted.is_set() or (
            cap_s is not None and now_s >= cap_s - 2.0 * watch.step_s
        )
        if self._roster.is_repriced(self._told_offers):
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
        self._evaluations.follow()
        self._checkpoints.follow(self._watch.progress, self._before_checkpoint)
        next_step = self._watch.progress.next_step
        for loss in self._watch.lost():
            self._meter.release(loss.device_id, self.now_s())
            self._events.append(self._roster.strike(loss, next_step, self.now_s()))

    def _observation(self) -> Observation:
        self._slot_from_s = now_s = self.now_s()
        self._told_offers = self._roster.offers()
        events, self._events = tuple(self._events), []
        return Observation(
            now_s=now_s,
            usage=self._meter.cut(now_s),
            reports=self._watch.progress.take(),
            events=(*events, *self._checkpoints.failures()),
            offers=self._told_offers,
            next_step=self._watch.progress.next_step,
            devices=self._roster.devices,
            leaving=self._roster.leaving,
            checkpoint_step=self._checkpoints.newest_step,
            checkpoints=self._checkpoints.written(),
            owes_evaluation=self._watch.progress.owes_evaluation,
        )

    # At a step boundary --------------------------------------------------------------

    def _stand(self) -> bool:
        """Bring every worker to the same step boundary; False when something happened on the way.

        What happened is then in the next observation.
        """
        events = self._watch.stand()
        self._follow()
        self._take(events)
        return not self._events

    def _is_leaving(self) -> bool:
        """Whether somebody under notice holds layers that nobody else does."""
        leaving = self._roster.leaving
        return any(leaving.issuperset(devices) for devices in self._holders.values())

    def _secure(self) -> bool:
        """Write all layers where all stand, unless that is done; False as ``_stand``."""
        step = self._watch.progress.next_step
        while self._holders and self._checkpoints.newest_step != step:
            parts = self._crew.save(self._watch, step, self._holders)
            if parts is None:
                self._recover()
                step = self._watch.progress.next_step
            else:
                self._checkpoints.write(step, self._generation, parts, self._before_checkpoint)
        return not self._events

    def _install(self, plan: Plan, moves: tuple[Move, ...], *, discard: bool = False) -> bool:
        """Bring the layers where a plan wants them; False when a device was lost meanwhile."""
        if not self._crew.is_joined:
            self._recover()
            if self._events:
                return False
        progress, truth = self._watch.progress, self._rig.truth
        for _ in range(ATTEMPTS):
            order = Order(
                plan=plan,
                moves=moves,
                first_step=progress.next_step,
                end_step=self._watch.reach,
                restore=None if self._holders or discard else self._restore,
                discard=discard,
                evaluated=progress.evaluations.done,
                run_clock_s=self.now_s(),
                stages=truth.stages(plan, progress.next_step) if truth else None,
            )
            if self._crew.install(order):
                break
            self._recover()
            if self._events:
                return False
        else:
            raise LostWorkerError(f"the workers lost contact {ATTEMPTS} times while plans changed")
        self._generation, self._holders = plan.generation, plan.holders
        progress.expect(plan.device_ids, plan.generation)
        return True

    # After a fault -------------------------------------------------------------------

    def _take(self, events: Sequence[ClusterEvent]) -> None:
        """Make up for what went wrong with the workers, unless it ends the run."""
        failures = [event for event in events if isinstance(event, WorkerFailed)]
        if any(failure.would_recur for failure in failures):
            self._events += failures
        elif failures or self._uses(e.device_id for e in events if isinstance(e, DeviceLost)):
            if not self._watch.end_failed(events) and not any(
                isinstance(event, DeviceLost) for event in events
            ):
                self._events += failures  # nobody is gone, and yet they lost each other
            self._recover()

    def _recover(self) -> None:
        """Bring whoever is left to one step boundary; nothing runs until the next decision.

        Layers that nobody holds any more would be of another step than the rest: then all of
        them return to the newest checkpoint.

        Raises:
            LostWorkerError: If nobody is left, although there are devices.
        """
        started_s, progress = self.now_s(), self._watch.progress
        self._watch.lose(self._fleet.losses)  # some were found out while something was asked
        boundary = self._crew.regroup(self._watch) or self._await_anybody()
        source: Literal["replica", "checkpoint", "start"] = "replica"
        if self._holders:
            progress.settle(boundary.next_step)
        reached = progress.next_step
        if len(boundary.holders) == self._rig.model.num_layers:
            self._holders = boundary.holders
        elif self._holders or boundary.holders:
            source = self._rewind()
        self._follow()
        if self._uses(loss.device_id for loss in self._fleet.losses) or source != "replica":
            took_s, num_undone = self.now_s() - started_s, reached - progress.next_step
            self._events.append(Recovered(progress.next_step, source, num_undone, took_s))
        self._plan = None

    def _await_anybody(self) -> Boundary:
        """Wait until a lost device has a new worker: nobody else is left.

        Nobody is waited for where no device is there any more (the run goes on, idle), or
        where the run is to stop: it is resumed from the newest checkpoint, whoever comes.

        Raises:
            LostWorkerError: If none is ready in time.
        """
        self._follow()
        deadline_s = time.monotonic() + self._timeouts.start_s
        while time.monotonic() < deadline_s:
            self._events += self._roster.look(self._watch, self.now_s())
            if self._roster.is_empty or self._interrupted.is_set():
                return Boundary(0, {})
            if self._fleet.device_ids and (boundary := self._crew.regroup(self._watch)):
                return boundary
            if not self._fleet.recruited:
                break
            self._interrupted.wait(WAKE_S)
        raise LostWorkerError(
            "every worker is lost, and none came back; the same command resumes at step "
            f"{self._checkpoints.newest_step or 0}"
        )

    def _rewind(self) -> Literal["checkpoint", "start"]:
        """Let every worker forget its layers; the next plan restores them."""
        newest = self._checkpoints.newest
        step = newest.step if newest else 0
        self._crew.forget(self._watch, step, anew=newest is None)
        self._holders, self._restore = {}, newest
        self._watch.progress.rewind(step)
        return "checkpoint" if newest else "start"

    def _uses(self, device_ids: Iterable[str]) -> bool:
        return self._plan is not None and not set(self._plan.device_ids).isdisjoint(device_ids)
