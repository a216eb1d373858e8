"""What a run knows of itself at a slot's end: cluster, bill, samples, queues, and warnings."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from orchestrator.control.alarms import Alarms
from orchestrator.control.leases import LeaseBook
from orchestrator.control.ledger import Ledger
from orchestrator.control.plannable import plannable, why_none
from orchestrator.control.records import Clock, Settled
from orchestrator.control.scribe import Scribe
from orchestrator.control.survey import standing_text
from orchestrator.control.traffic import Traffic, move_traffic, step_traffic
from orchestrator.control.treasury import Treasury
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import ControlState, LedgerEntry
from orchestrator.core.edits import BudgetNews, budget_changes
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import (
    ClusterEvent,
    CommittedStep,
    Decision,
    DeviceLost,
    Observation,
    Recovered,
    RunEvent,
    RunEventKind,
    SlotJournal,
    Usage,
    WorkerFailed,
)
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.blocks import with_surcharges
from orchestrator.planning.guards import LedgerView
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.telemetry.estimator import Estimator, Straggler
from orchestrator.telemetry.prices import PriceDoubt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The sections of the file that the loop obeys, and the size of the run."""

    training: TrainingOptions
    budget: BudgetOptions
    """What is wanted at the start; an earlier life of the run may have gone by another one."""

    control: ControlOptions
    billing_speedup: float = 1.0
    price_max_age_s: float | None = None
    """Billed seconds after which a price of a feed is not trusted any more; None: for ever."""

    num_steps: int
    num_samples: int
    """Positions of the whole run; only the last step may be short."""

    max_failures: int = -1
    """How often the loss of devices in use is survived, over all lives of the run; -1: always."""

    max_preemptions: int = -1
    """The same for devices that were taken away."""

    seed: int = 0
    code: str = ""  # what runs, in a few words


@dataclass(kw_only=True)
class Books:
    """Estimator, ledger, leases and treasury of a run, closed slot by slot. Decides nothing."""

    options: LoopOptions
    cluster: ClusterState
    model: ModelProfile
    state: ControlState | None = None
    slot: int = field(init=False)

    def __post_init__(self) -> None:
        options, state = self.options, self.state
        self.clock = Clock(options.billing_speedup)
        self.estimator = Estimator(
            _as_known(self.cluster, state),
            straggler_ratio=options.control.straggler.ratio,
            confirm_slots=options.control.straggler.confirm_slots,
            price_max_age_s=(
                None
                if options.price_max_age_s is None
                else options.price_max_age_s / options.billing_speedup
            ),
            estimates=state.estimates if state else None,
        )
        self.treasury = Treasury(
            options.budget, options.control, billing_speedup=options.billing_speedup, state=state
        )
        self.alarms = Alarms(
            options.budget, options.control, self.treasury, self.clock, state=state
        )
        self.ledger = Ledger(
            billing_speedup=options.billing_speedup,
            spent_usd=state.spent_usd if state else 0.0,
            spent_rest_usd=state.spent_rest_usd if state else 0.0,
            num_entries=state.num_ledger_entries if state else 0,
            holds=state.holds if state else (),
        )
        self.leases = LeaseBook(
            batch_samples=options.training.global_batch,
            num_samples=options.num_samples,
            next_step=state.next_step if state else 0,
            num_skipped=state.num_skipped if state else 0,
        )
        self.slot = state.slot if state else 0
        self.num_replans = state.num_replans if state else 0
        self.num_failures = state.num_failures if state else 0
        self.num_preemptions = state.num_preemptions if state else 0
        self.checkpoint_step = state.checkpoint_step if state else None
        self.leaving, self.owes_evaluation = frozenset[str](), False  # of the newest observation
        self._first_look = True
        self._step_traffic: dict[int, tuple[Traffic, ...]] = {}  # of one step, by generation
        self.moves = state.moves if state else ()
        """Of the last change of plan, not yet billed."""
        for plan in (*state.granted, state.plan) if state else ():
            if all(map(self.estimator.cluster.has, plan.device_ids)):
                self.grant(plan)

    def follow(self, news: BudgetNews) -> tuple[RunEvent, ...]:
        """Go by the budget that is wanted from now, a slot's edge, on; returns what to tell of it.

        One that is lowered to less than devices cost that do nothing is refused with a warning.
        """
        scribe, warnings = self.scribe, list(news.warnings)
        wanted = news.wanted or self.treasury.budget
        changes = budget_changes(self.treasury.budget, wanted)
        if changes and (refusal := self._refusal(wanted)):
            warnings.append(f"budget_refused: {news.source}: {refusal}")
            changes = ()
        if changes:
            self.treasury.change(wanted, self.estimator.cluster.now_s, self.ledger.spent_usd)
            self.alarms.follow(wanted)
        told = (scribe.note("warning", text) for text in warnings)
        return (*told, *scribe.budget(changes, news.source))

    def _refusal(self, budget: BudgetOptions) -> str | None:
        """Why a budget is not followed: it was lowered to what even idling would not keep."""
        standing = self.estimator.cluster.standing_usd_per_s
        allowed = budget.average_per_hour_usd / self.clock.per_hour(1.0)
        lowered = allowed < self.treasury.budget_usd_per_s
        if budget.allow_idle and lowered and standing > allowed:
            return standing_text(standing, allowed)
        return None

    @property
    def scribe(self) -> Scribe:
        """Writes the events of this moment."""
        return Scribe(self.clock.billed_s(self.estimator.cluster.now_s), self.slot)

    def grant(self, plan: Plan) -> None:
        """Let a plan use samples."""
        self.leases.grant(plan)
        self._step_traffic = {
            generation: traffic
            for generation, traffic in self._step_traffic.items()
            if self.leases.knows(generation)
        }
        self._step_traffic[plan.generation] = step_traffic(plan, self.estimator.cluster, self.model)

    def take_over(self, decision: Decision, *, replans: bool) -> None:
        """A plan of another generation follows: it moves layers and uses samples."""
        self.num_replans += replans
        self.moves = decision.migration.moves
        self.grant(decision.plan)

    def settle(self, observation: Observation, running: Decision) -> tuple[Settled, SlotJournal]:
        """Estimate, bill, commit and weigh what an observation brought."""
        estimator, since = self.estimator, self.estimator.cluster
        stragglers, doubts = estimator.stragglers, estimator.doubts
        first_events = self._begin(observation) if self._first_look else ()
        now = estimator.update(observation, running.predicted, running.plan)
        self.leaving, self.owes_evaluation = observation.leaving, observation.owes_evaluation
        committed = self.leases.samples_committed
        steps, undone_from = self._commit(observation)
        entries = self._bill(observation.usage, steps, since)
        bill_usd = fsum(entry.usd + entry.egress_usd for entry in entries)
        self.treasury.charge(
            bill_usd,
            since,
            now,
            running.predicted,
            samples=self.leases.samples_committed - committed,  # less those that are undone
            working_s=fsum(step.step_s for step in steps),
        )
        events = (
            *first_events,
            *self.checkpointed(observation.checkpoint_step),
            *self.scribe.skipped(steps),
            *self.scribe.cluster_events(observation.events),
            *self._found_since(since, stragglers, doubts),
        )
        settled = Settled(
            plan=running.plan,
            predicted=running.predicted,
            from_s=since.now_s,
            to_s=now.now_s,
            bill_usd=bill_usd,
            steps=steps,
            reports=observation.reports,
            lost=tuple(e.device_id for e in observation.events if isinstance(e, DeviceLost)),
            usage=observation.usage,
        )
        journal = SlotJournal(
            observation.reports, steps, entries, events, undone_from, observation.checkpoints
        )
        return settled, journal

    def _commit(self, observation: Observation) -> tuple[tuple[CommittedStep, ...], int | None]:
        """Steps that all their devices have done; the first of those that are undone, if any."""
        undone = [e for e in observation.events if isinstance(e, Recovered) and e.num_undone]
        reached = max([observation.next_step, *(e.next_step + e.num_undone for e in undone)])
        steps = self.leases.commit(observation.reports, applied_before=reached)
        if undone:
            self.leases.restart_at(observation.next_step)
        assert self.leases.next_step == observation.next_step, (
            f"the backend is at step {observation.next_step}, but its reports commit only up to "
            f"step {self.leases.next_step}"
        )
        return steps, observation.next_step if undone else None

    def _bill(
        self, usage: Sequence[Usage], steps: Sequence[CommittedStep], since: ClusterState
    ) -> tuple[LedgerEntry, ...]:
        """Charge devices held since, and what steps and the last change of plan sent."""
        entries = self.ledger.close(
            usage,
            since,
            self.estimator.cluster,
            traffic=[*move_traffic(self.moves, since), *self._traffic(steps)],
            doubtful_pools=self.estimator.doubtful_pools,
        )
        self.moves = ()
        return entries

    def _found_since(
        self, since: ClusterState, stragglers: Sequence[Straggler], doubts: Sequence[PriceDoubt]
    ) -> list[RunEvent]:
        """What the estimator found of prices and speeds, and what the alarms make of it."""
        scribe, found, now = self.scribe, self.estimator, self.estimator.cluster
        doubted = scribe.doubts(doubts, found.doubts, self.clock)
        for event in doubted:
            logger.warning("slot %s: price: %s", self.slot, event.detail)
        alarms = self.alarms.look(now, self.ledger.spent_usd, self.leases.samples_committed)
        for kind, text in alarms:
            logger.warning("slot %s: %s: %s", self.slot, kind, text)
        return [
            *scribe.prices(since, now, self.clock),
            *doubted,
            *scribe.stragglers(stragglers, found.stragglers, found.tried_again, now),
            *(scribe.note(kind, text) for kind, text in alarms),
        ]

    def survives(self, events: Sequence[ClusterEvent], in_use: Collection[str]) -> bool:
        """Count losses of devices in use; whether the budgets still cover them.

        Devices lost in one slot count once; those that were taken away have a budget of
        their own. Workers that lost contact although none of them is gone have failed, too. An
        error that would recur ends the run, and is nobody's failure.
        """
        if any(isinstance(e, WorkerFailed) and e.would_recur for e in events):
            return False
        lost = [e for e in events if isinstance(e, DeviceLost) and e.device_id in in_use]
        failed, preempted = not all(e.preempted for e in lost), any(e.preempted for e in lost)
        if not lost:
            failed = any(isinstance(e, WorkerFailed) for e in events)
        options = self.options
        used_up = (failed and 0 <= options.max_failures <= self.num_failures) or (
            preempted and 0 <= options.max_preemptions <= self.num_preemptions
        )
        if not used_up:
            self.num_failures += failed
            self.num_preemptions += preempted
        return not used_up

    def _begin(self, observation: Observation) -> tuple[RunEvent, ...]:
        """Start this life of the run where the backend stands, and say so."""
        self._first_look = False
        if not observation.reports:
            self.leases.restart_at(observation.next_step)  # a restored checkpoint goes on there
        kind: RunEventKind = "resumed" if self.state else "started"
        return self.scribe.start(kind, observation.next_step, self.options.code)

    def checkpointed(self, step: int | None) -> tuple[RunEvent, ...]:
        """Take note of the newest whole checkpoint; its event when it is new."""
        if step is None or step == self.checkpoint_step:
            return ()
        self.checkpoint_step = step
        return (self.scribe.note("checkpoint", f"whole; a resumed run goes on at step {step}"),)

    def _traffic(self, steps: Sequence[CommittedStep]) -> list[Traffic]:
        """Egress of the committed steps."""
        sent: list[Traffic] = []
        for generation, traffic in self._step_traffic.items():
            samples = sum(step.samples for step in steps if step.generation == generation)
            sent += [t.times(samples / self.options.training.global_batch) for t in traffic]
        return sent

    # What is planned with ------------------------------------------------------------

    def plannable(self, incumbent: Plan | None) -> ClusterState:
        """The cluster without devices that the next plan may not use."""
        held = {hold.device_id for hold in self.ledger.holds}
        kept = held | set(incumbent.device_ids if incumbent else ())
        found = self.estimator
        return plannable(found.cluster, leaving=self.leaving, stale=found.stale_pools, kept=kept)

    @property
    def why_none_plannable(self) -> str:
        """Why ``plannable`` has no devices, where it has none."""
        found = self.estimator
        return why_none(found.cluster, leaving=self.leaving, stale=found.stale_pools)

    def surcharged(self, cluster: ClusterState) -> ClusterState:
        """The cluster with what blocks of billing add to the score of using a device."""
        control = self.options.control
        return with_surcharges(
            cluster,
            {hold.device_id: hold.paid_until_s for hold in self.ledger.holds},
            horizon_s=control.hysteresis_slots * control.slot_s,
            slot_s=control.slot_s,
            prepaid_is_free=self.treasury.trusts_prepaid,
        )

    def view(self, running: Settled) -> LedgerView:
        """What the guards of a decision need to know."""
        return self.treasury.view(self.ledger, self.estimator.cluster, running.predicted)


def _as_known(cluster: ClusterState, state: ControlState | None) -> ClusterState:
    """The cluster at the time of the state, with the slow-downs known then."""
    if state is None:
        return replace(cluster, now_s=0.0)
    known = dict(state.slowdowns)
    devices = [replace(d, slowdown=known.get(d.device_id, d.slowdown)) for d in cluster.devices]
    return replace(cluster, now_s=state.time_s, devices=tuple(devices))
