"""The closed loop on a table of plans: the control law alone, many thousands of slots a second.

Shape letters: S states, K plans (0 is idle), T slots.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from orchestrator.core.slot import IDLE_ESTIMATE, StepEstimate
from orchestrator.planning.drift import Drift
from orchestrator.planning.lyapunov import LEAST_PAUSE_SLOTS, earns_pause
from orchestrator.planning.queues import Queues
from orchestrator.simulation.environments import FloatArray, IntArray

ROUNDING = 1e-12
"""Share of the hard cap that is left alone: sums of many bills are not exact."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    """What every plan gives and costs in every state.

    Where a plan cannot run (a device is gone) its rate is 0, and its cost what the devices
    that are left would be billed if it were tried.
    """

    rates: FloatArray  # S x K, samples/s
    costs: FloatArray  # S x K, $/s
    runs: FloatArray  # S x K, 1 where the plan can run, else 0

    def __post_init__(self) -> None:
        if not self.rates.shape == self.costs.shape == self.runs.shape:
            raise ValueError(
                f"rates {self.rates.shape}, costs {self.costs.shape} and what runs "
                f"{self.runs.shape} differ in shape; give one entry a state and plan"
            )
        if self.rates[:, 0].any() or self.costs[:, 0].any():
            raise ValueError("plan 0 of a table is idle; its rate and cost must be 0")

    @property
    def offered_rates(self) -> FloatArray:
        """Rates, minus infinity where the plan cannot run."""
        offered: FloatArray = np.where(self.runs > 0, self.rates, -inf)
        return offered

    @property
    def best_ratio_samples_per_usd(self) -> float:
        """rho: most samples per dollar of any plan in any state."""
        able = (self.runs > 0) & (self.costs > 0)
        return float((self.rates[able] / self.costs[able]).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class TableControl:
    """What the control law starts from; the same symbols as in docs/model.md, section 4."""

    penalty_weight: float  # V
    budget_usd_per_s: float  # b
    slot_s: float  # D
    backlog_usd: float = 0.0  # Q_0
    line_usd: float = inf  # ledger guard: above b t by more than this, only idling is allowed
    total_usd: float = inf  # hard cap
    pause_s: float = 0.0  # of every change to a plan that runs
    least_pause_slots: float = LEAST_PAUSE_SLOTS  # that a change counts as; 0: changes are free
    hysteresis_slots: int = 10  # H_e
    floor_samples_per_s: float = 0.0  # r_min
    progress_weight: float = 0.0  # omega_z, $/sample


@dataclass(slots=True)
class TableRun:
    """What happened in every slot; arrays over slots."""

    slot_s: float
    plans: IntArray
    samples: FloatArray
    bills_usd: FloatArray
    backlogs_usd: FloatArray  # at the slot's end
    progress_usd: FloatArray = field(default_factory=lambda: np.zeros(0))  # Z at the slot's end
    paused: FloatArray = field(default_factory=lambda: np.zeros(0))  # 1: the slot began paused

    @property
    def rate_samples_per_s(self) -> float:
        """Mean rate."""
        return float(self.samples.sum() / (self.slot_s * len(self.samples)))

    @property
    def cost_usd_per_s(self) -> float:
        """Mean cost."""
        return float(self.bills_usd.sum() / (self.slot_s * len(self.bills_usd)))

    @property
    def switches_per_hour(self) -> float:
        """Paused changes of plan."""
        return float(self.paused.sum() / (self.slot_s * len(self.paused) / 3600.0))


def run_table(
    table: PlanTable,
    state_T: IntArray,
    control: TableControl,
    *,
    believed: PlanTable | None = None,
    seen_T: IntArray | None = None,
) -> TableRun:
    """Run the control law over a sample path of states.

    Every slot takes the plan that ``decide`` would take: the best drift plus penalty of a slot
    among those of J >= 0, under the guards. The queue is charged with the true bill.

    Args:
        table: The truth.
        state_T: True state of every slot.
        control: V, Q_0, b and the guards.
        believed: What the controller thinks plans give; the truth where None.
        seen_T: States that the controller sees; the true ones where None.

    Source: docs/model.md, sections 4.1, 4.5 and 4.8.
    """
    chooser = _Chooser(believed or table, control)
    rates, costs = table.rates.tolist(), table.costs.tolist()
    slot_s, budget = control.slot_s, control.budget_usd_per_s
    seen = (state_T if seen_T is None else seen_T).tolist()
    queues, spent_usd, current = Queues(control.backlog_usd), 0.0, 0
    plans, samples, bills, backlogs, progress, paused = [], [], [], [], [], []
    for slot, state in enumerate(state_T.tolist()):
        chosen = 0
        if spent_usd - budget * slot * slot_s <= control.line_usd:
            left_usd = control.total_usd * (1 - ROUNDING) - spent_usd
            chosen = chooser.choose(seen[slot], queues, current, left_usd)
        pauses = chosen not in (current, 0) and control.pause_s > 0
        works_s = max(0.0, slot_s - control.pause_s) if pauses else slot_s
        made, bill_usd = rates[state][chosen] * works_s, costs[state][chosen] * slot_s
        missing = control.floor_samples_per_s * slot_s - made
        queues = queues.update(
            bill_usd, budget, slot_s, shortfall_usd=control.progress_weight * missing
        )
        spent_usd += bill_usd
        current = chosen
        plans.append(chosen)
        samples.append(made)
        bills.append(bill_usd)
        backlogs.append(queues.backlog_usd)
        progress.append(queues.progress_usd)
        paused.append(pauses)
    return TableRun(
        slot_s, np.array(plans, dtype=np.int64), np.array(samples), np.array(bills),
        np.array(backlogs), np.array(progress), np.array(paused, dtype=np.float64),
    )  # fmt: skip


class _Chooser:
    """The decision of a slot on a table; the rules are those of ``planning/lyapunov.py``."""

    def __init__(self, table: PlanTable, control: TableControl) -> None:
        self._control = control
        self._estimates = [
            [
                StepEstimate(step_s=1.0, samples_per_s=rate, cost_usd_per_s=cost)
                for rate, cost in zip(rates, costs, strict=True)
            ]
            for rates, costs in zip(table.rates.tolist(), table.costs.tolist(), strict=True)
        ]
        self._runs = (table.runs > 0).tolist()
        self._frontiers = [_frontier(table, s) for s in range(len(table.rates))]

    def choose(self, state: int, queues: Queues, current: int, left_usd: float) -> int:
        """Index of the plan to run next; 0: idle."""
        control, estimates = self._control, self._estimates[state]
        weight = control.penalty_weight + control.progress_weight * queues.progress_usd
        backlog_usd = queues.backlog_usd
        drift = Drift(weight, backlog_usd, control.budget_usd_per_s, control.slot_s)
        options = self._frontiers[state]
        if current and self._runs[state][current] and current not in options:
            options = [*options, current]
        most_usd_per_s = left_usd / control.slot_s
        ranked = []
        for k in options:
            estimate = estimates[k]
            cost = estimate.cost_usd_per_s
            if weight * estimate.samples_per_s >= backlog_usd * cost and cost <= most_usd_per_s:
                ranked.append((drift.slot_score(estimate), k))
        if not ranked:
            return 0
        if not control.pause_s and not control.least_pause_slots:
            return max(ranked)[1]
        ranked.sort(reverse=True)
        return self._paying([k for _, k in ranked], state, current, drift)

    def _paying(self, ranked: list[int], state: int, current: int, drift: Drift) -> int:
        """The first plan that earns its pause; the current one needs not."""
        control, estimates = self._control, self._estimates[state]
        lost = current != 0 and not self._runs[state][current]
        old = estimates[current] if current in ranked else IDLE_ESTIMATE
        for k in ranked:
            new = estimates[k]
            fastest = max(new.samples_per_s, old.samples_per_s)
            if (
                k == current
                or lost
                or earns_pause(
                    drift.lead(new, old),
                    horizon_s=control.hysteresis_slots * control.slot_s,
                    pause_s=max(control.pause_s, control.least_pause_slots * control.slot_s),
                    worth_usd2_per_s=drift.penalty_weight * fastest,
                )
            ):
                return k
        return 0


def _frontier(table: PlanTable, state: int) -> list[int]:
    """Plans that run in a state and that no cheaper one outruns; never idle."""
    able = [k for k in np.flatnonzero(table.runs[state] > 0).tolist() if k != 0]
    able.sort(key=lambda k: (table.costs[state, k], -table.rates[state, k]))
    kept: list[int] = []
    for k in able:
        if table.rates[state, k] > (table.rates[state, kept[-1]] if kept else 0.0):
            kept.append(k)
    return kept
