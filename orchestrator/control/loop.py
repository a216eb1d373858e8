"""The control loop: one slot at a time, the same code against Ray and against the simulation."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import TYPE_CHECKING

from orchestrator.control.backend import Backend
from orchestrator.control.chooser import CAP_REACHED, Choice, Chooser, incumbent_estimate
from orchestrator.control.leases import LeaseBook
from orchestrator.control.ledger import Ledger
from orchestrator.control.records import Clock, Scribe, Settled, Totals, all_done, make_record
from orchestrator.control.recovery import judge
from orchestrator.control.traffic import Traffic, move_traffic, step_traffic
from orchestrator.control.treasury import Treasury
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import ControlState
from orchestrator.core.model import ModelProfile, TrainingOptions
from orchestrator.core.plan import Plan
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    Candidate,
    CommittedStep,
    Decision,
    DeviceLost,
    Observation,
    Outcome,
    OutcomeStatus,
    PlanningProblem,
    RunEvent,
    RunEventKind,
    SlotJournal,
    SlotRecord,
)
from orchestrator.errors import OrchestratorError
from orchestrator.planning.constraints import make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.guards import affordable_s
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.planning.queues import BudgetOptions
from orchestrator.telemetry.estimator import Estimator

if TYPE_CHECKING:
    from orchestrator.planning.assignment import SlotAssignment
    from orchestrator.strategies.registry import Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The sections of the file that the loop obeys, and the size of the run."""

    training: TrainingOptions
    budget: BudgetOptions
    control: ControlOptions
    billing_speedup: float = 1.0
    num_steps: int
    num_samples: int
    """Positions of the whole run; only the last step may be short."""

    seed: int = 0


def _ignore(_: object) -> None:
    """Sink of what nobody wants to see."""


@dataclass(kw_only=True)
class ControlLoop:
    """Runs one slot at a time against a backend. Owns no thread and reads no clock.

    ``book`` takes what a slot adds to the append-only files, before ``save`` takes the state
    that refers to it; both happen before the decision is applied, ``sinks`` after it.
    """

    backend: Backend
    strategy: "Strategy"
    assignment: "SlotAssignment"
    options: LoopOptions
    cluster: ClusterState
    model: ModelProfile
    state: ControlState | None = None
    sinks: Sequence[Callable[[SlotRecord], None]] = ()
    save: Callable[[ControlState], None] = _ignore
    book: Callable[[SlotJournal], None] = _ignore
    stopwatch: Callable[[], float] = lambda: 0.0
    cpu_clock: Callable[[], float] = lambda: 0.0
    outcome: Outcome | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        options, state = self.options, self.state
        self._clock = Clock(options.billing_speedup)
        self._chooser = Chooser(
            strategy=self.strategy,
            assignment=self.assignment,
            rows=make_rows(options.budget.limits, billing_speedup=options.billing_speedup),
            control=options.control,
            stopwatch=self.stopwatch,
        )
        self._estimator = Estimator(
            _as_known(self.cluster, state),
            straggler_ratio=options.control.straggler.ratio,
            confirm_slots=options.control.straggler.confirm_slots,
        )
        self._treasury = Treasury(
            options.budget, options.control, billing_speedup=options.billing_speedup, state=state
        )
        self._ledger = Ledger(
            billing_speedup=options.billing_speedup,
            spent_usd=state.spent_usd if state else 0.0,
            num_entries=state.num_ledger_entries if state else 0,
            holds=state.holds if state else (),
        )
        self._leases = LeaseBook(
            batch_samples=options.training.global_batch,
            num_samples=options.num_samples,
            next_step=state.next_step if state else 0,
        )
        self._slot = state.slot if state else 0
        self._num_replans = state.num_replans if state else 0
        self._num_skipped = state.num_skipped if state else 0
        self._checkpoint_step = state.checkpoint_step if state else None
        self._restarted = state is not None
        self._first_look = True
        self._step_traffic: dict[int, tuple[Traffic, ...]] = {}  # of one step, by generation
        self._moving: tuple[Traffic, ...] = ()  # of the last change of plan, not yet billed
        self._incumbent = state.plan if state else None
        plan = state.plan if state else Plan(0, options.training.schedules[0])
        self._decision = Decision("idle", plan, IDLE_ESTIMATE, "nothing ran yet")
        if state and (
            estimate := incumbent_estimate(CostModel(self._problem()), self._chooser.rows)
        ):
            self._decision = replace(self._decision, kind="keep", predicted=estimate)
            self._grant(state.plan)

    def tick(self) -> SlotRecord:
        """Run one slot to its end, decide the next one and return the record of the slot.

        Raises:
            UserCodeError: If the user's code raised in a worker.
            LostWorkerError: If a device of the plan is gone.
            InfeasibleError: If the model fits on no combination of the devices.
        """
        observation = self.backend.observe()
        started_cpu_s = self.cpu_clock()
        slot = self._settle(observation)
        self._judge(observation, slot, started_cpu_s)
        if self._leases.next_step >= self.options.num_steps:
            reason = all_done(self.options.num_steps, self._num_skipped)
            return self._finish("finished", reason, slot)
        choice = self._choose(slot)
        if exhausted := self._exhausted(choice.decision, slot):
            return self._finish("budget", exhausted, slot)
        self._hand_over(choice)
        self.save(self._state())
        self.backend.apply(choice.decision)
        return self._publish(slot, choice, started_cpu_s)

    def end(self, status: OutcomeStatus, reason: str) -> SlotRecord:
        """Stop at the next step boundary, write a checkpoint, settle the rest: no slot follows.

        Sets ``outcome``. For requests from outside, between two slots.
        """
        return self._finish(status, reason, None)

    # A slot that is over -------------------------------------------------------------

    def _settle(self, observation: Observation) -> Settled:
        """Estimate, bill, commit and weigh what an observation brought, and book it."""
        running, since = self._decision, self._estimator.cluster
        stragglers, lasting = self._estimator.stragglers, self._estimator.lasting_stragglers
        first_events = self._begin(observation) if self._first_look else ()
        now = self._estimator.update(observation, running.predicted, running.plan)
        steps = self._leases.commit(observation.reports)
        assert self._leases.next_step == observation.next_step, (
            f"the backend is at step {observation.next_step}, but its reports commit only up to "
            f"step {self._leases.next_step}"
        )
        entries = self._ledger.close(
            observation.usage,
            since,
            now,
            traffic=self._traffic(steps),
            doubtful_pools=self._estimator.doubtful_pools,
        )
        bill_usd = fsum(entry.usd + entry.egress_usd for entry in entries)
        self._treasury.charge(bill_usd, since, now, running.predicted)
        scribe = self._scribe()
        self._num_skipped += sum(step.skipped for step in steps)
        newly_lasting = [d for d in self._estimator.lasting_stragglers if d not in lasting]
        events = [
            *first_events,
            *self._checkpointed(observation.checkpoint_step),
            *scribe.skipped(steps),
            *scribe.cluster_events(observation.events),
            *scribe.prices(since, now, self._clock),
            *scribe.stragglers(stragglers, self._estimator.stragglers, newly_lasting, now),
        ]
        self.book(SlotJournal(observation.reports, steps, entries, tuple(events)))
        return Settled(
            plan=running.plan,
            predicted=running.predicted,
            from_s=since.now_s,
            to_s=now.now_s,
            bill_usd=bill_usd,
            steps=steps,
            reports=observation.reports,
            lost=tuple(e.device_id for e in observation.events if isinstance(e, DeviceLost)),
        )

    def _begin(self, observation: Observation) -> tuple[RunEvent, ...]:
        """Start this life of the run where the backend stands, and say so."""
        self._first_look = False
        if not observation.reports:
            self._leases.restart_at(observation.next_step)  # a restored checkpoint goes on there
        kind: RunEventKind = "resumed" if self.state else "started"
        return (self._scribe().note(kind, f"at step {observation.next_step}"),)

    def _checkpointed(self, step: int | None) -> tuple[RunEvent, ...]:
        """Take note of the newest whole checkpoint; its event when it is new."""
        if step is None or step == self._checkpoint_step:
            return ()
        self._checkpoint_step = step
        return (self._scribe().note("checkpoint", f"whole; a resumed run goes on at step {step}"),)

    def _traffic(self, steps: Sequence[CommittedStep]) -> tuple[Traffic, ...]:
        """Egress of the committed steps and of the change of plan before them."""
        sent, self._moving = list(self._moving), ()
        for generation, traffic in self._step_traffic.items():
            samples = sum(step.samples for step in steps if step.generation == generation)
            sent += [t.times(samples / self.options.training.global_batch) for t in traffic]
        return tuple(sent)

    def _judge(self, observation: Observation, slot: Settled, started_cpu_s: float) -> None:
        try:
            judge(
                observation.events,
                in_use=self._decision.plan.device_ids,
                checkpoint_step=self._checkpoint_step,
            )
        except OrchestratorError as error:
            self.save(self._state())  # what was spent and done so far is not forgotten
            self._publish_last(slot, error.status, started_cpu_s)
            raise

    # The next one --------------------------------------------------------------------

    def _choose(self, slot: Settled) -> Choice:
        if not self._treasury.best_ratio_samples_per_usd:
            self._chooser.seek_ratio(self._problem(), self._treasury)
        go_on, self._restarted = self._restarted and not slot.reports, False
        cluster = self._estimator.cluster
        view = self._treasury.view(self._ledger, cluster, slot.predicted)
        choice = self._chooser.choose(
            self._problem(), self._treasury, view, expected=slot.predicted, go_on=go_on
        )
        if go_on and choice.decision.kind == "keep":
            reason = "keep: the plan decided before the restart goes on"
            choice = replace(choice, decision=replace(choice.decision, reason=reason))
        return choice

    def _problem(self) -> PlanningProblem:
        options, can = self.options, self.backend.capabilities
        return PlanningProblem(
            cluster=self._estimator.cluster,
            model=self.model,
            batch_samples=options.training.global_batch,
            microbatch_samples=options.training.microbatch,
            schedules=tuple(s for s in options.training.schedules if s in can.schedules),
            max_team=min(options.control.max_team, can.max_team),
            overlap=options.training.overlap and can.overlap,
            penalty_weight=self._treasury.penalty_weight,
            backlog_usd=self._treasury.queues.backlog_usd,
            budget_usd_per_s=self._treasury.budget_usd_per_s,
            incumbent=self._incumbent,
            seed=options.seed,
        )

    def _exhausted(self, decision: Decision, slot: Settled) -> str | None:
        """Why ``total_usd`` lets nothing more run, None while it does."""
        if self.options.budget.total_usd is None:
            return None
        if decision.kind == "idle":
            if decision.reason.startswith(CAP_REACHED):
                return decision.reason
            view = self._treasury.view(self._ledger, self._estimator.cluster, slot.predicted)
            idle, slot_s = Candidate(decision.plan, IDLE_ESTIMATE), self.options.control.slot_s
            if affordable_s(self._problem(), idle, ledger=view, slot_s=slot_s) < slot_s:
                return f"{CAP_REACHED}: the devices present cost more than is left, even unused"
        elif decision.run_until_s and self._decision.run_until_s and not slot.steps:
            return f"{CAP_REACHED}: what is left does not pay for another step"
        return None

    def _hand_over(self, choice: Choice) -> None:
        """Make the decision the running one and let its plan use samples."""
        decision, scribe = choice.decision, self._scribe()
        for fallback in choice.fallbacks:
            logger.warning("slot %s: fallback: %s", self._slot, fallback)
        logger.info("slot %s: %s", self._slot, decision.reason)
        if self._incumbent is None or decision.plan.generation != self._incumbent.generation:
            self._num_replans += self._incumbent is not None
            self._moving = move_traffic(decision.migration.moves, self._estimator.cluster)
            self._grant(decision.plan)
        fallbacks = (scribe.note("fallback", fallback) for fallback in choice.fallbacks)
        self.book(SlotJournal(events=(*fallbacks, *scribe.decision(decision))))
        self._incumbent, self._decision = decision.plan, decision

    def _grant(self, plan: Plan) -> None:
        self._leases.grant(plan)
        self._step_traffic = {
            generation: traffic
            for generation, traffic in self._step_traffic.items()
            if self._leases.knows(generation)
        }
        self._step_traffic[plan.generation] = step_traffic(
            plan, self._estimator.cluster, self.model
        )

    def _finish(self, status: OutcomeStatus, reason: str, slot: Settled | None) -> SlotRecord:
        started_cpu_s = self.cpu_clock()
        self.save(self._state())  # a checkpoint may fail, and what was booked stays spent
        if manifest := self.backend.checkpoint():
            self.book(SlotJournal(events=self._checkpointed(manifest.step)))
        last = self._settle(self.backend.observe())
        paused = status == "budget" and self.options.budget.on_exhausted == "pause"
        self.outcome = Outcome(status, reason, resumable=paused or status == "stopped")
        self.book(SlotJournal(events=(self._scribe().note(status, reason),)))
        self.save(self._state())
        whole = slot.then(last) if slot else last
        return self._publish_last(whole, f"{status}: {reason}", started_cpu_s)

    # What is kept and shown ----------------------------------------------------------

    def _scribe(self) -> Scribe:
        return Scribe(self._clock.billed_s(self._estimator.cluster.now_s), self._slot)

    def _state(self) -> ControlState:
        treasury, cluster = self._treasury, self._estimator.cluster
        plan = self._incumbent or self._decision.plan
        return ControlState(
            slot=self._slot + 1,
            generation=plan.generation,
            plan=plan,
            time_s=cluster.now_s,
            backlog_usd=treasury.queues.backlog_usd,
            penalty_weight=treasury.penalty_weight,
            best_ratio_samples_per_usd=treasury.best_ratio_samples_per_usd,
            spent_usd=self._ledger.spent_usd,
            num_ledger_entries=self._ledger.num_entries,
            next_step=self._leases.next_step,
            samples_committed=self._leases.samples_committed,
            checkpoint_step=self._checkpoint_step,
            slowdowns=tuple((d.device_id, d.slowdown) for d in cluster.devices),
            num_replans=self._num_replans,
            num_skipped=self._num_skipped,
            holds=self._ledger.holds,
            forgiven_usd=treasury.queues.forgiven_usd,
            slot_bill_max_usd=treasury.slot_bill_max_usd,
        )

    def _publish_last(self, slot: Settled, reason: str, started_cpu_s: float) -> SlotRecord:
        idle = Plan(slot.plan.generation, slot.plan.schedule)
        choice = Choice(Decision("idle", idle, IDLE_ESTIMATE, reason))
        return self._publish(slot, choice, started_cpu_s)

    def _publish(self, slot: Settled, choice: Choice, started_cpu_s: float) -> SlotRecord:
        treasury, cluster = self._treasury, self._estimator.cluster
        totals = Totals(
            slot=self._slot,
            cluster=cluster,
            next_step=self._leases.next_step,
            samples=self._leases.samples_committed,
            backlog_usd=treasury.queues.backlog_usd,
            penalty_weight=treasury.penalty_weight,
            spent_usd=self._ledger.spent_usd,
            budget_usd=treasury.budget_usd_per_s * cluster.now_s,
            overspend_bound_usd=treasury.overspend_bound_usd,
            stragglers=self._estimator.stragglers,
            price_age_s=self._estimator.price_age_s,
            control_cpu_s=self.cpu_clock() - started_cpu_s,
        )
        record = make_record(slot, choice, totals, self._clock)
        for sink in self.sinks:
            sink(record)
        self._slot += 1
        return record


def _as_known(cluster: ClusterState, state: ControlState | None) -> ClusterState:
    """The cluster at the time of the state, with the slow-downs known then."""
    if state is None:
        return replace(cluster, now_s=0.0)
    known = dict(state.slowdowns)
    devices = tuple(
        replace(device, slowdown=known.get(device.device_id, device.slowdown))
        for device in cluster.devices
    )
    return replace(cluster, now_s=state.time_s, devices=devices)
