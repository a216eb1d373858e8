"""What a slot looks like from outside: rates predicted and measured, devices, events."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.core.plan import Plan
from orchestrator.core.slot import CommittedStep, SlotRecord, StepEstimate, StepReport, Usage
from orchestrator.core.view import DeviceView, Rates, Spread, StepSpreads
from orchestrator.telemetry.links import zone_paths
from orchestrator.telemetry.prices import PriceDoubt

if TYPE_CHECKING:
    from orchestrator.control.chooser import Choice

NOT_FINITE = "the gradient was not finite"


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known of a slot once it is over and paid for."""

    plan: Plan
    predicted: StepEstimate
    from_s: float
    to_s: float
    bill_usd: float
    steps: tuple[CommittedStep, ...] = ()
    reports: tuple[StepReport, ...] = ()
    lost: tuple[str, ...] = ()  # devices
    usage: tuple[Usage, ...] = ()

    @property
    def elapsed_s(self) -> float:
        """The slot's real length."""
        return self.to_s - self.from_s

    def then(self, later: "Settled") -> "Settled":
        """This slot prolonged by what came right after it under the same plan."""
        return replace(
            self,
            to_s=later.to_s,
            bill_usd=self.bill_usd + later.bill_usd,
            steps=self.steps + later.steps,
            reports=self.reports + later.reports,
            lost=self.lost + later.lost,
            usage=self.usage + later.usage,
        )


@dataclass(frozen=True, slots=True)
class Clock:
    """Converts the run's seconds to billed ones, and dollars per second to dollars per hour."""

    billing_speedup: float = 1.0

    def billed_s(self, run_s: float) -> float:
        """Billed seconds of a time of the run's clock."""
        return run_s * self.billing_speedup

    def per_hour(self, usd_per_s: float) -> float:
        """True dollars per hour of a rate per second of the run."""
        return usd_per_s * 3600.0 / self.billing_speedup


@dataclass(frozen=True, slots=True)
class Totals:
    """What the run has come to at the end of a slot."""

    slot: int
    cluster: ClusterState
    next_step: int
    samples: int
    backlog_usd: float
    penalty_weight: float
    price_of_money_samples_per_usd: float
    progress_backlog_usd: float
    forgiven_usd: float
    time_constant_s: float  # of the run's clock, as is the next
    coherence_s: float | None
    spent_usd: float
    budget_usd: float
    budget: BudgetOptions  # in force from now on
    overspend_bound_usd: float
    stragglers: tuple[str, ...]
    doubts: tuple[PriceDoubt, ...]
    price_age_s: tuple[tuple[str, float], ...]
    control_cpu_s: float
    overhead_ratio: float = 0.0


def make_record(slot: Settled, choice: "Choice", totals: Totals, clock: Clock) -> SlotRecord:
    """The slot that ended, and what was decided at its end, in the units of the user's edge."""
    decision, cluster = choice.decision, totals.cluster
    newest = slot.steps[-1] if slot.steps else None
    return SlotRecord(
        slot=totals.slot,
        time_s=clock.billed_s(cluster.now_s),
        step=totals.next_step,
        generation=slot.plan.generation,
        decision=decision.kind,
        reason=decision.reason,
        plan=slot.plan,
        next_plan=decision.plan,
        predicted=predicted_rates(slot.predicted, clock, totals.overhead_ratio),
        measured=measured_rates(slot, clock),
        backlog_usd=totals.backlog_usd,
        penalty_weight=totals.penalty_weight,
        price_of_money_samples_per_usd=totals.price_of_money_samples_per_usd,
        marginal_values=(
            choice.marginal_values.named(clock.per_hour(1.0)) if choice.marginal_values else ()
        ),
        spent_usd=totals.spent_usd,
        budget_usd=totals.budget_usd,
        overspend_bound_usd=totals.overspend_bound_usd,
        solve_s=choice.solve_s,
        migration_s=decision.migration.pause_s,
        moved_bytes=sum(move.size_bytes for move in decision.migration.moves),
        control_cpu_s=totals.control_cpu_s,
        devices=device_views(cluster, decision.plan, slot, totals.stragglers, clock),
        loss=newest.loss if newest else None,
        grad_norm=newest.grad_norm if newest else None,
        lr=newest.lr if newest else 0.0,
        samples=totals.samples,
        num_late=sum(report.num_late for report in slot.reports),
        num_operations=sum(report.num_operations for report in slot.reports),
        stragglers=totals.stragglers,
        fallbacks=(*choice.fallbacks, *(doubt_text(doubt, clock) for doubt in totals.doubts)),
        group_step_s=group_step_s(slot),
        bubble_ratio=bubble_ratio(slot),
        price_age_s=totals.price_age_s,
        progress_backlog_usd=totals.progress_backlog_usd,
        forgiven_usd=totals.forgiven_usd,
        time_constant_s=clock.billed_s(totals.time_constant_s),
        coherence_s=None if totals.coherence_s is None else clock.billed_s(totals.coherence_s),
        overhead_ratio=totals.overhead_ratio,
        budget=totals.budget,
        requested=choice.requested,
        paths=zone_paths(cluster),
    )


def doubt_text(doubt: PriceDoubt, clock: Clock) -> str:
    """Which price is not known, why, and what the pool counts at meanwhile."""
    counted = f"it counts at {clock.per_hour(doubt.counted_usd_per_s):.4g} $/h"
    if doubt.cause == "stale":
        why = (
            f"last read {clock.billed_s(doubt.age_s) / 60:.3g} minutes ago, longer than "
            "cluster.price_feed.max_age_s"
        )
        return f"price: pool {doubt.pool}: {why}; {counted}, its upper price, and takes no devices"
    if doubt.cause == "jump" and doubt.read_usd_per_s is not None:
        why = f"a sudden {clock.per_hour(doubt.read_usd_per_s):.4g} $/h is not believed yet"
    else:
        why = "no price was read in the last slot"
    return f"price: pool {doubt.pool}: {why}; {counted}"


def predicted_rates(estimate: StepEstimate, clock: Clock, overhead_ratio: float = 0.0) -> Rates:
    """What the cost model said of the plan that ran; nothing for idle.

    Its rate is less the share of the time that makes no samples, as the measured one is.
    """
    runs = estimate.step_s > 0
    return Rates(
        step_s=estimate.step_s if runs else None,
        samples_per_s=estimate.samples_per_s * (1.0 - overhead_ratio) if runs else None,
        cost_per_hour_usd=clock.per_hour(estimate.cost_usd_per_s),
        peak_memory_bytes=estimate.peak_memory_bytes,
    )


def measured_rates(slot: Settled, clock: Clock) -> Rates:
    """What the slot showed: median step time, samples and dollars over its real length.

    After a switch the first steps are still the old plan's: their time is not this plan's.
    """
    peaks: dict[str, int] = {}
    for report in slot.reports:
        peaks[report.device_id] = max(peaks.get(report.device_id, 0), report.peak_memory_bytes)
    own_s = [s.step_s for s in slot.steps if s.generation == slot.plan.generation]
    samples = sum(step.samples for step in slot.steps)
    passed = slot.elapsed_s > 0
    return Rates(
        step_s=median(own_s) if own_s else None,
        samples_per_s=samples / slot.elapsed_s if passed else None,
        cost_per_hour_usd=clock.per_hour(slot.bill_usd / slot.elapsed_s) if passed else None,
        peak_memory_bytes=tuple(sorted(peaks.items())),
    )


def group_step_s(slot: Settled) -> tuple[float, ...]:
    """Per group, the mean compute time of a step on its busiest device; empty: nothing ran."""
    mean_s = {d: fmean([r.compute_s for r in mine]) for d, mine in _by_device(slot).items()}
    if not mean_s:
        return ()
    return tuple(
        max((mean_s[d] for d in group.device_ids if d in mean_s), default=0.0)
        for group in slot.plan.groups
    )


def bubble_ratio(slot: Settled) -> float | None:
    """Share of the devices' time in steps that they did not compute; None: nothing ran."""
    reports = [r for r in slot.reports if r.generation == slot.plan.generation]
    held_s = sum(report.step_s for report in reports)
    return 1.0 - sum(report.compute_s for report in reports) / held_s if held_s > 0 else None


def device_views(
    cluster: ClusterState, plan: Plan, slot: Settled, stragglers: Sequence[str], clock: Clock
) -> tuple[DeviceView, ...]:
    """Every present device and those that were lost in the slot, by id; ``plan`` is the next."""
    used, steps, busy = set(plan.device_ids), step_spreads(slot), utilization_ratios(slot)
    per_hour = {offer.pool: clock.per_hour(offer.price_usd_per_s) for offer in cluster.offers}
    present = [
        DeviceView(
            device_id=device.device_id,
            kind=device.kind,
            pool=device.pool,
            state="used" if device.device_id in used else "idle",
            slowdown=device.slowdown,
            straggler=device.device_id in stragglers,
            price_per_hour=per_hour[device.pool],
            steps=steps.get(device.device_id),
            memory_bytes=device.memory_bytes,
            utilization_ratio=busy.get(device.device_id),
        )
        for device in cluster.devices
    ]
    gone = [
        DeviceView(device_id, "", "", "lost", 1.0, False, 0.0, steps.get(device_id))
        for device_id in sorted(set(slot.lost))
    ]
    return tuple(sorted([*present, *gone], key=lambda view: view.device_id))


def step_spreads(slot: Settled) -> dict[str, StepSpreads]:
    """Where the time of the slot's steps went, by device; steps of the plan before do not count."""
    return {
        device_id: StepSpreads(
            compute=_spread([report.compute_s for report in reports]),
            wait=_spread([report.receive_s + report.reduce_s for report in reports]),
            input=_spread([report.data_s for report in reports]),
        )
        for device_id, reports in _by_device(slot).items()
    }


def utilization_ratios(slot: Settled) -> dict[str, float]:
    """By device that was held in the slot, the share of that time in which it computed.

    A step counts where it ends: one that began in the slot before may fill more than this one.
    """
    held_s: dict[str, float] = defaultdict(float)
    busy_s: dict[str, float] = defaultdict(float)
    for used in slot.usage:
        held_s[used.device_id] += used.to_s - used.from_s
    for report in slot.reports:
        busy_s[report.device_id] += report.compute_s
    return {d: min(1.0, busy_s[d] / whole_s) for d, whole_s in held_s.items() if whole_s > 0}


def _spread(times_s: Sequence[float]) -> Spread:
    if len(times_s) == 1:
        return Spread(times_s[0], times_s[0], times_s[0])
    ordered = sorted(times_s)
    return Spread(ordered[0], median(ordered), ordered[-1])


def all_done(num_steps: int, num_skipped: int) -> str:
    """Why a run ends that has run all its steps."""
    done = f"all {num_steps} steps are done"
    return f"{done}, but {num_skipped} changed nothing: {NOT_FINITE}" if num_skipped else done


def _by_device(slot: Settled) -> dict[str, list[StepReport]]:
    found: dict[str, list[StepReport]] = {}
    for report in slot.reports:
        if report.generation == slot.plan.generation:
            found.setdefault(report.device_id, []).append(report)
    return found
