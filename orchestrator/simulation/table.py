"""The closed loop on a table of plans: the control law alone, many thousands of slots a second.

Shape letters: S states, K plans (0 is idle), T slots.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np

from orchestrator.planning.lyapunov import earns_pause
from orchestrator.planning.queues import Queues
from orchestrator.simulation.environments import FloatArray, IntArray


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
    hysteresis_slots: int = 10  # H_e


@dataclass(slots=True)
class TableRun:
    """What happened in every slot; arrays over slots."""

    slot_s: float
    plans: IntArray
    samples: FloatArray
    bills_usd: FloatArray
    backlogs_usd: FloatArray  # at the slot's end
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

    def since(self, slot: int) -> "TableRun":
        """The run without its first slots."""
        return TableRun(
            self.slot_s, self.plans[slot:], self.samples[slot:], self.bills_usd[slot:],
            self.backlogs_usd[slot:], self.paused[slot:],
        )  # fmt: skip


def run_table(
    table: PlanTable,
    state_T: IntArray,
    control: TableControl,
    *,
    believed: PlanTable | None = None,
    seen_T: IntArray | None = None,
) -> TableRun:
    """Run the control law over a sample path of states.

    Every slot takes the plan of largest J = V r - Q c that the guards admit; the queue is
    charged with the true bill.

    Args:
        table: The truth.
        state_T: True state of every slot.
        control: V, Q_0, b and the guards.
        believed: What the controller thinks plans give; the truth where None.
        seen_T: States that the controller sees; the true ones where None.

    Source: docs/model.md, sections 4.1, 4.5 and 4.8.
    """
    thought = believed or table
    offer_S, price_S = list(thought.offered_rates), list(thought.costs)
    rate_S, cost_S = table.rates.tolist(), table.costs.tolist()
    runs_S = thought.runs.tolist()
    slot_s, budget = control.slot_s, control.budget_usd_per_s
    states, seen = state_T.tolist(), (state_T if seen_T is None else seen_T).tolist()
    queues, spent_usd, current = Queues(control.backlog_usd), 0.0, 0
    plans, samples, bills, backlogs, paused = [], [], [], [], []
    for slot, state in enumerate(states):
        view = seen[slot]
        score_K = control.penalty_weight * offer_S[view] - queues.backlog_usd * price_S[view]
        if spent_usd - budget * slot * slot_s > control.line_usd:
            chosen = 0
        else:
            if spent_usd + slot_s * cost_S[state][int(score_K.argmax())] > control.total_usd:
                score_K[spent_usd + slot_s * table.costs[state] > control.total_usd] = -inf
            chosen = int(score_K.argmax())
            if control.pause_s and chosen != current:
                chosen = _worth_its_pause(score_K, offer_S[view], runs_S[view], current, control)
        pause_s = control.pause_s if chosen not in (current, 0) else 0.0
        bill_usd = cost_S[state][chosen] * slot_s
        queues = queues.update(bill_usd, budget, slot_s)
        spent_usd += bill_usd
        current = chosen
        plans.append(chosen)
        samples.append(rate_S[state][chosen] * max(0.0, slot_s - pause_s))
        bills.append(bill_usd)
        backlogs.append(queues.backlog_usd)
        paused.append(1.0 if pause_s else 0.0)
    return TableRun(
        slot_s, np.array(plans, dtype=np.int64), np.array(samples), np.array(bills),
        np.array(backlogs), np.array(paused),
    )  # fmt: skip


def _worth_its_pause(
    score_K: FloatArray,
    offer_K: FloatArray,
    runs_K: list[float],
    current: int,
    control: TableControl,
) -> int:
    """The best plan that earns its pause, the current one, or idle; as ``decide`` chooses."""
    lost = current != 0 and not runs_K[current]
    stays = current != 0 and not lost and score_K[current] >= 0
    for k in np.argsort(-score_K).tolist():
        if k in (current, 0) or score_K[k] < 0:
            return int(k) if score_K[k] >= 0 else 0
        rate = max(offer_K[k], offer_K[current]) if stays else offer_K[k]
        reference = score_K[current] if stays else 0.0
        if lost or earns_pause(
            gain_usd2_per_s=float(score_K[k] - reference),
            horizon_s=control.hysteresis_slots * control.slot_s,
            pause_s=control.pause_s,
            worth_usd2_per_s=control.penalty_weight * float(rate),
        ):
            return int(k)
    return 0
