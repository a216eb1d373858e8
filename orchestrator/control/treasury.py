"""The money side of the loop: queues, weight V, what may still be spent, and the bound printed."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from math import fsum, inf

from orchestrator.control.ledger import Ledger, slot_bill_bound_usd
from orchestrator.control.overhead import Overhead
from orchestrator.core.budget import Allowance, BudgetOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import ControlState
from orchestrator.core.edits import PRICED, budget_changes
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.frontier import BudgetValue
from orchestrator.planning.guards import OVERRUN_STEPS, LedgerView
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.planning.queues import (
    RATIO_HEADROOM,
    Queues,
    overspend_bound_usd,
    penalty_weight,
    queue_cap_usd,
)

logger = logging.getLogger(__name__)

CHECKPOINT_RESERVE_S = 2.0
"""Run time kept paid for: every device may be held while the last checkpoint is written."""

MAX_TIME_CONSTANT_HORIZONS = 0.05
"""Largest tau_V at the start with ``kappa: auto``, in horizons: a price of money that the first
state estimated wrongly must come right in the course of the run, and leaves money unspent until."""


class Treasury:
    """Holds the virtual queues and V, and learns rho, the most samples per dollar seen.

    Source: docs/model.md, sections 4.1, 4.4 and 4.5.
    """

    def __init__(
        self,
        budget: BudgetOptions,
        control: ControlOptions,
        *,
        billing_speedup: float = 1.0,
        state: ControlState | None = None,
    ) -> None:
        self._control, self._hour_s = control, 3600.0 / billing_speedup
        self.budget = (state.budget if state else None) or budget
        """In force, which an earlier life of the run may have changed."""
        self._allowance = Allowance(self.budget.average_per_hour_usd / self._hour_s)
        self.queues = Queues()
        self.best_ratio_samples_per_usd = 0.0
        # While nothing is owed any V ranks alike.
        self.penalty_weight = control.penalty_weight or 1.0
        self.slot_bill_max_usd = self.budget_usd_per_s * control.slot_s
        self.standing_excess_usd = 0.0
        self.placeholder_usd: float | None = None
        """Q_0: where the backlog began; None while the price of money is not estimated."""
        self.opening_samples_per_usd = 0.0
        """The price of money at which the backlog opened: lambda_hat, or less under a cap."""
        self.estimated_samples_per_usd = 0.0
        """lambda_hat."""
        self.reference_samples_per_s = 0.0
        """r_ref: the rate expected at b; 0: not known."""
        self.estimated_backlog_usd = 0.0
        """V lambda_hat as estimated in this life of the run, whatever a cap made of it."""
        self.overhead = Overhead.prior(control.slot_s)
        self.is_priced = bool(state and state.best_ratio_samples_per_usd)
        """Whether the price of money was looked for at the budget in force."""
        self.slots_to_follow = 0
        """Slots in which a change of plan may still be due to a change of the budget."""
        self.inherited_usd = 0.0
        """Overspent when the budget changed, until what is left of it is below the line."""
        if state:
            self._go_on(state)

    def _go_on(self, state: ControlState) -> None:
        """Take up what an earlier life of the run left."""
        known = state.allowance or self._allowance  # billing_speedup may be another one now
        self._allowance = known.changed(state.time_s, self._allowance.usd_per_s)
        self.inherited_usd = state.inherited_usd
        self.queues = Queues(
            state.backlog_usd,
            state.forgiven_usd,
            state.progress_backlog_usd,
            state.progress_backlog_max_usd,
        )
        self.best_ratio_samples_per_usd = state.best_ratio_samples_per_usd
        self.penalty_weight = state.penalty_weight
        self.slot_bill_max_usd = state.slot_bill_max_usd
        self.standing_excess_usd = state.standing_excess_usd
        self.placeholder_usd = state.placeholder_usd
        self.opening_samples_per_usd = state.opening_samples_per_usd
        self.estimated_samples_per_usd = state.estimated_samples_per_usd
        self.reference_samples_per_s = state.reference_samples_per_s
        if state.held_s:
            self.overhead = Overhead(state.held_s, state.working_s)

    @property
    def budget_usd_per_s(self) -> float:
        """b, in force from the last slot edge on."""
        return self._allowance.usd_per_s

    @property
    def allowance(self) -> Allowance:
        """What the average allows up to any time from now on."""
        return self._allowance

    @property
    def _horizon_s(self) -> float:
        return self.budget.weight_horizon_hours * self._hour_s

    def change(self, budget: BudgetOptions, now_s: float, spent_usd: float) -> None:
        """Go by another budget from ``now_s`` on.

        What was allowed until now stays allowed, and what was overspent stays owed: the backlog
        keeps it, on top of a place-holder that follows V. So do samples that a floor misses.
        Nothing is printed as a bound that spending has left behind already.

        Args:
            budget: What holds from now on.
            now_s: A slot's edge; on the run's clock.
            spent_usd: Up to then.

        Source: docs/model.md, section 4.9.
        """
        keys = {change.key for change in budget_changes(self.budget, budget)}
        over_usd = spent_usd - self._allowance.at(now_s)
        owed = self._owed()
        self.budget, self.slots_to_follow = budget, self._control.hysteresis_slots
        self._allowance = self._allowance.changed(now_s, budget.average_per_hour_usd / self._hour_s)
        if self.best_ratio_samples_per_usd:
            self.is_priced = self.is_priced and not keys & PRICED
            self._weigh(first=True)
            if self.placeholder_usd is not None:
                self.placeholder_usd = self.penalty_weight * self.opening_samples_per_usd
        self._owe(*owed)
        self.inherited_usd = max(0.0, over_usd - self.standing_excess_usd)

    def _owed(self) -> tuple[float, Queues]:
        """Dollars of the backlog beyond the place-holder, and the queues with Z in samples."""
        debt_usd = self.queues.backlog_usd - (self.placeholder_usd or 0.0)
        missing = 1.0 / self.progress_weight if self.progress_weight else 0.0
        return debt_usd, self.queues.progress_times(missing)

    def _owe(self, debt_usd: float, missing: Queues) -> None:
        """Take up what was owed, at the place-holder and the weight of the floor as they are."""
        backlog_usd = max(0.0, (self.placeholder_usd or 0.0) + debt_usd)
        queues = missing.progress_times(self.progress_weight)
        self.queues = replace(queues, backlog_usd=backlog_usd)

    def learn(self, estimates: Iterable[StepEstimate]) -> bool:
        """Raise rho if a plan gives more samples per dollar than any before; V and Q follow.

        Returns whether it did. The price of money Q/V' does not move.
        """
        ratios = (e.samples_per_usd for e in estimates if e.cost_usd_per_s > 0)
        best = max(ratios, default=0.0)
        if best <= self.best_ratio_samples_per_usd:
            return False
        first, self.best_ratio_samples_per_usd = self.best_ratio_samples_per_usd == 0, best
        self._weigh(first=first)
        logger.info("best ratio now %.6g samples/$, V %.6g $^2/sample", best, self.penalty_weight)
        return True

    def open(self, value: BudgetValue, first_samples_per_usd: float = inf) -> None:
        """Start the backlog at the estimated price of money: before anything is spent, or anew.

        A backlog of ``Q_0 = V lambda_hat`` that nobody owes spares the overspending by which the
        queue would otherwise find its level; V is the larger for it, since the spending allowed
        above the average is ``V rho_hat - Q_0``. What is owed already comes on top.

        Args:
            value: Of the budget in the states known so far; its rate is r_ref.
            first_samples_per_usd: Largest price of money at which anything is rented anew.

        Source: docs/model.md, section 4.4.
        """
        debt_usd, missing = self._owed()
        self.placeholder_usd, self.is_priced = 0.0, True
        price = min(value.price_of_money_samples_per_usd, self.best_ratio_samples_per_usd)
        self.opening_samples_per_usd = min(price, first_samples_per_usd)
        self.estimated_samples_per_usd = price
        self._weigh(first=True)
        self.estimated_backlog_usd = self.penalty_weight * price
        cap_usd = self.queue_cap_usd
        if cap_usd is not None and cap_usd < self.penalty_weight * self.opening_samples_per_usd:
            self._open_at(cap_usd)
        self.placeholder_usd = self.penalty_weight * self.opening_samples_per_usd
        self.reference_samples_per_s = value.samples_per_s
        self._owe(debt_usd, missing)

    def _open_at(self, cap_usd: float) -> None:
        """Begin with the cap as Q_0: ``V rho_hat - Q_0`` is kappa b H, or V at its largest."""
        top = RATIO_HEADROOM * self.best_ratio_samples_per_usd
        ahead_usd = self._kappa_ratio * self.budget_usd_per_s * self._horizon_s
        weight = self._control.penalty_weight
        weight = weight or min(self._largest_weight, (ahead_usd + cap_usd) / top)
        self.opening_samples_per_usd = cap_usd / weight
        self._weigh(first=True)

    @property
    def _largest_weight(self) -> float:
        """V at which tau_V is as long as it may be; the price of money found is what it meets."""
        if self._control.kappa != "auto" or not self.estimated_samples_per_usd:
            return inf
        longest_s = MAX_TIME_CONSTANT_HORIZONS * self._horizon_s
        return longest_s * self.budget_usd_per_s / self.estimated_samples_per_usd

    def _weigh(self, *, first: bool) -> None:
        """Set V from kappa and rho; unless it is the first one, Q, Z and Q_0 follow."""
        if self._control.penalty_weight is not None:
            return
        old = self.penalty_weight
        self.penalty_weight = penalty_weight(
            self._kappa_ratio,
            self.budget_usd_per_s,
            self._horizon_s,
            self.best_ratio_samples_per_usd,
            self.opening_samples_per_usd,
            self._largest_weight,
        )
        if not first:
            rescaled = self.queues.rescaled(old, self.penalty_weight)
            self.queues = rescaled.capped(self.queue_cap_usd)
            if self.placeholder_usd:
                self.placeholder_usd = self.penalty_weight * self.opening_samples_per_usd

    @property
    def _kappa_ratio(self) -> float:
        return self._control.kappa_ratio(estimated=self.placeholder_usd is not None)

    @property
    def may_idle(self) -> bool:
        """Whether a run waits for the average; else only ``total_usd`` protects."""
        return self.budget.allow_idle

    @property
    def progress_weight(self) -> float:
        """omega_z in $/sample: what the floor counts a missing sample as; 0: there is no floor."""
        floor = self.budget.min_samples_per_s
        if not floor:
            return 0.0
        return self.budget_usd_per_s / (self.reference_samples_per_s or floor)

    @property
    def floored_weight(self) -> float:
        """V' = V + omega_z Z."""
        return self.penalty_weight + self.progress_weight * self.queues.progress_usd

    @property
    def scored_weight(self) -> float:
        """What plans are scored with: V' less the share of the time that makes no samples.

        Source: docs/model.md, section 3.7 (``r = X/T (1 - overhead share)``).
        """
        return self.floored_weight * (1.0 - self.overhead.ratio)

    @property
    def price_of_money_samples_per_usd(self) -> float:
        """Price of money: lambda = Q/V'."""
        return self.queues.backlog_usd / self.floored_weight

    @property
    def time_constant_s(self) -> float:
        """tau_V = V lambda / b, in seconds of the run's clock: how fast the price can follow."""
        return self.penalty_weight * self.price_of_money_samples_per_usd / self.budget_usd_per_s

    @property
    def line_usd(self) -> float:
        """``V rho_hat - Q_0``: above ``b t`` by more than this, only idling is allowed.

        With a progress floor V is the largest V' so far: what the floor could not get for the
        budget it takes from the average.
        """
        weight = self.penalty_weight + self.progress_weight * self.queues.progress_max_usd
        line_usd = weight * RATIO_HEADROOM * self.best_ratio_samples_per_usd
        return max(0.0, line_usd - (self.placeholder_usd or 0.0))

    @property
    def trusts_prepaid(self) -> bool:
        """Whether time paid ahead may count as free: while ``Q <= V rho_hat`` (G1).

        Source: docs/model.md, section 3.7.
        """
        top = self.floored_weight * RATIO_HEADROOM * self.best_ratio_samples_per_usd
        return self.queues.backlog_usd <= top

    @property
    def queue_cap_usd(self) -> float | None:
        """Largest backlog; None: nothing is ever forgiven."""
        line_usd = self.penalty_weight * RATIO_HEADROOM * self.best_ratio_samples_per_usd
        return queue_cap_usd(self.budget, line_usd)

    def charge(
        self,
        bill_usd: float,
        since: ClusterState,
        now: ClusterState,
        running: StepEstimate,
        *,
        samples: int = 0,
        working_s: float = 0.0,
    ) -> None:
        """Advance the queues by a slot, with its bill, its samples and its real length.

        ``working_s`` is what its steps took.
        """
        elapsed_s, self.slots_to_follow = now.now_s - since.now_s, max(0, self.slots_to_follow - 1)
        self.overhead = self.overhead.after(elapsed_s, working_s, runs=running.step_s > 0)
        missing = self.budget.min_samples_per_s * elapsed_s - samples
        self.queues = self.queues.update(
            bill_usd,
            self.budget_usd_per_s,
            elapsed_s,
            cap_usd=self.queue_cap_usd,
            shortfall_usd=self.progress_weight * missing,
        )
        held_s = elapsed_s + OVERRUN_STEPS * running.step_s
        largest_usd = max(
            slot_bill_bound_usd(cluster, held_s, running.egress_usd_per_s)
            for cluster in (since, now)
        )
        lengthened_usd = self.budget_usd_per_s * (self._control.slot_s - elapsed_s)
        self.slot_bill_max_usd = max(self.slot_bill_max_usd, largest_usd + lengthened_usd)
        standing_usd_per_s = max(since.standing_usd_per_s, now.standing_usd_per_s)
        excess_usd_per_s = max(0.0, standing_usd_per_s - self.budget_usd_per_s)
        self.standing_excess_usd += excess_usd_per_s * elapsed_s
        if self.inherited_usd:
            allowed_usd_per_s = self.budget_usd_per_s + excess_usd_per_s
            over_usd = self.inherited_usd + bill_usd - allowed_usd_per_s * elapsed_s
            paid_back = self.is_priced and over_usd <= self.line_usd  # a slot may begin with it
            self.inherited_usd = 0.0 if paid_back else max(0.0, over_usd)

    @property
    def overspend_bound_usd(self) -> float:
        """G1 slack: spent minus ``b t`` is never more. Infinite where idling is forbidden.

        While devices billed for their presence cost more than ``b``, no decision can help: what
        they cost beyond it comes on top. After a change of the budget nothing runs until what was
        overspent before is below the new line: until then it is the bound.
        """
        if not self.budget.allow_idle:
            return inf
        slack_usd = overspend_bound_usd(
            self.line_usd,
            self.budget_usd_per_s,
            slot_bill_max_usd=self.slot_bill_max_usd,
            slot_s=self._control.slot_s,
        )
        return self.standing_excess_usd + max(slack_usd, self.inherited_usd)

    def view(self, ledger: Ledger, cluster: ClusterState, running: StepEstimate) -> LedgerView:
        """What the guards of a decision need to know; ``running`` is of the incumbent."""
        reserve_usd = 0.0
        if self.budget.total_usd is not None:
            reserve_usd = CHECKPOINT_RESERVE_S * fsum(
                cluster.price_usd_per_s(device.device_id) for device in cluster.devices
            )
        return LedgerView(
            spent_usd=ledger.spent_usd,
            budget_usd=self._allowance.at(cluster.now_s),
            line_usd=self.line_usd,
            total_usd=self.budget.total_usd,
            reserve_usd=reserve_usd,
            allow_idle=self.budget.allow_idle,
            paid_until_s={hold.device_id: hold.paid_until_s for hold in ledger.holds},
            running_step_s=running.step_s,
            budget_changed=self.slots_to_follow > 0,
        )
