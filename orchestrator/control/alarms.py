"""What a run warns of: a budget that cannot be kept, a price of money that cannot follow."""

from dataclasses import replace

from orchestrator.control.records import Clock
from orchestrator.control.treasury import Treasury
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import AlarmMark, ControlState
from orchestrator.core.slot import RunEventKind
from orchestrator.planning.alarm import InfeasibilityAlarm, alarm_window_s
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.telemetry.coherence import Coherence

MIN_COHERENCE_TIMES = 3.0
"""tau_V over the coherence time of the states: with less the price of money follows noise."""

LEAST_PRICE_RATIO = 0.01
"""Of the most samples per dollar: at a lower price of money, dollars hardly count in any score,
and it does not matter how fast it moves."""

BUDGET_INFEASIBLE = "budget_infeasible"

Warned = tuple[tuple[RunEventKind, str], ...]


class Alarms:
    """Looks at the treasury once a slot. All but the alarm is told once a life and budget.

    Source: docs/model.md, sections 4.4 and 4.6.
    """

    def __init__(
        self,
        budget: BudgetOptions,
        control: ControlOptions,
        treasury: Treasury,
        clock: Clock,
        *,
        state: ControlState | None = None,
    ) -> None:
        self._floor = budget.min_samples_per_s
        self._treasury, self._clock = treasury, clock
        self._hour_s = 3600.0 / clock.billing_speedup
        self._alarm = InfeasibilityAlarm(
            window_s=alarm_window_s(control.slot_s, self._hour_s),
            budget_usd_per_s=treasury.budget_usd_per_s,
            floor_samples_per_s=budget.min_samples_per_s,
            allow_idle=budget.allow_idle,
            marks=state.alarm_marks if state else (),
        )
        self._coherence = Coherence(control.slot_s)
        self._mean_price = 0.0  # lambda, over all slots
        self._num_slots = 0
        self._given: set[str] = set()

    def follow(self, budget: BudgetOptions) -> None:
        """Watch another budget, from the treasury's change on; a window holds one budget only."""
        self._floor = budget.min_samples_per_s
        self._alarm = replace(
            self._alarm,
            budget_usd_per_s=self._treasury.budget_usd_per_s,
            floor_samples_per_s=budget.min_samples_per_s,
            allow_idle=budget.allow_idle,
            marks=(),
        )
        self._given.clear()

    @property
    def marks(self) -> tuple[AlarmMark, ...]:
        """What the alarm compares with, to be kept over a restart."""
        return self._alarm.marks

    @property
    def coherence_s(self) -> float | None:
        """Coherence time of prices, speeds and devices; None: not known."""
        return self._coherence.coherence_s

    def look(self, now: ClusterState, spent_usd: float, samples: int) -> Warned:
        """Warnings of a slot that ended at ``now``, each an event kind and a text."""
        treasury = self._treasury
        self._coherence.add(now)
        self._num_slots += 1
        price = treasury.price_of_money_samples_per_usd
        self._mean_price += (price - self._mean_price) / self._num_slots
        mark = AlarmMark(
            time_s=now.now_s,
            backlog_usd=treasury.queues.backlog_usd,
            progress_usd=treasury.queues.progress_usd,
            penalty_weight=treasury.penalty_weight,
            spent_usd=spent_usd,
            samples=samples,
        )
        self._alarm, shortage = self._alarm.look(mark)
        found: list[tuple[RunEventKind, str]] = []
        if shortage:
            text = shortage.message(treasury.budget_usd_per_s, self._floor, self._hour_s)
            found.append(("alarm", f"{BUDGET_INFEASIBLE}: {text}"))
        found += [("warning", text) for text in (self._hasty(), self._low_cap()) if text]
        return tuple(found)

    def _hasty(self) -> str:
        """The price of money moves within the time in which the states themselves do."""
        coherence_s, treasury = self.coherence_s, self._treasury
        least = LEAST_PRICE_RATIO * treasury.best_ratio_samples_per_usd
        if coherence_s is None or self._mean_price <= least:
            return ""
        tau_s = treasury.penalty_weight * self._mean_price / treasury.budget_usd_per_s
        if tau_s >= MIN_COHERENCE_TIMES * coherence_s:
            return ""
        return self._once(
            "tau_v",
            f"tau_v: the price of money follows within {tau_s / self._hour_s:.3g} h, less than "
            f"{MIN_COHERENCE_TIMES:g} times the {coherence_s / self._hour_s:.3g} h for which "
            "prices and speeds last; a larger control.kappa or budget.horizon_hours is calmer",
        )

    def _low_cap(self) -> str:
        text = low_cap_text(self._treasury)
        return self._once("queue_cap", text) if text else ""

    def _once(self, name: str, text: str) -> str:
        if name in self._given:
            return ""
        self._given.add(name)
        return text


def low_cap_text(treasury: Treasury) -> str:
    """What a cap below V lambda* does: it forgives what the average forbids, without end."""
    cap_usd = treasury.queue_cap_usd
    wanted_usd = treasury.estimated_backlog_usd
    if cap_usd is None or cap_usd >= wanted_usd:
        return ""
    return (
        f"queue_cap: {cap_usd:.4g} $ lies below the backlog of {wanted_usd:.4g} $ at which "
        "the average would be kept: spending will stay above it, and what is above is "
        "forgiven; raise budget.queue_cap, or write auto"
    )
