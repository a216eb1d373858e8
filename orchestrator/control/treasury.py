"""The money side of the loop: backlog, weight V, what may still be spent, and the bound printed."""

import logging
from collections.abc import Iterable
from math import fsum, inf

from orchestrator.control.ledger import Ledger, slot_bill_bound_usd
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import ControlState
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.guards import OVERRUN_STEPS, LedgerView
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.planning.queues import (
    RATIO_HEADROOM,
    BudgetOptions,
    Queues,
    overspend_bound_usd,
    penalty_weight,
    queue_cap_usd,
)

logger = logging.getLogger(__name__)

CHECKPOINT_RESERVE_S = 2.0
"""Run time kept paid for: every device may be held while the last checkpoint is written."""


class Treasury:
    """Holds the virtual queue and V, and learns rho, the most samples per dollar seen.

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
        self._budget, self._control = budget, control
        self.budget_usd_per_s = budget.average_per_hour_usd / 3600.0 * billing_speedup
        self._horizon_s = budget.weight_horizon_hours * 3600.0 / billing_speedup
        self.queues = Queues()
        self.best_ratio_samples_per_usd = 0.0
        # While nothing is owed any V ranks alike.
        self.penalty_weight = control.penalty_weight or 1.0
        self.slot_bill_max_usd = self.budget_usd_per_s * control.slot_s
        if state:
            self.queues = Queues(state.backlog_usd, state.forgiven_usd)
            self.best_ratio_samples_per_usd = state.best_ratio_samples_per_usd
            self.penalty_weight = state.penalty_weight
            self.slot_bill_max_usd = state.slot_bill_max_usd

    def learn(self, estimates: Iterable[StepEstimate]) -> bool:
        """Raise rho if a plan gives more samples per dollar than any before; V and Q follow.

        Returns whether it did. The price of money Q/V does not move.
        """
        ratios = (e.samples_per_usd for e in estimates if e.cost_usd_per_s > 0)
        best = max(ratios, default=0.0)
        if best <= self.best_ratio_samples_per_usd:
            return False
        first, self.best_ratio_samples_per_usd = self.best_ratio_samples_per_usd == 0, best
        if self._control.penalty_weight is None:
            old = self.penalty_weight
            self.penalty_weight = penalty_weight(
                self._control.kappa_ratio, self.budget_usd_per_s, self._horizon_s, best
            )
            if not first:
                self.queues = self.queues.rescaled(old, self.penalty_weight)
        logger.info("best ratio now %.6g samples/$, V %.6g $^2/sample", best, self.penalty_weight)
        return True

    @property
    def may_idle(self) -> bool:
        """Whether a run waits for the average; else only ``total_usd`` protects."""
        return self._budget.allow_idle

    @property
    def line_usd(self) -> float:
        """``V rho_hat``: above ``b t`` by more than this, only idling is allowed."""
        return self.penalty_weight * RATIO_HEADROOM * self.best_ratio_samples_per_usd

    def charge(
        self, bill_usd: float, since: ClusterState, now: ClusterState, running: StepEstimate
    ) -> None:
        """Advance the queue by a slot, with its bill and its real length."""
        elapsed_s = now.now_s - since.now_s
        self.queues = self.queues.update(
            bill_usd,
            self.budget_usd_per_s,
            elapsed_s,
            cap_usd=queue_cap_usd(
                self._budget, self._control.kappa_ratio, self.budget_usd_per_s, self._horizon_s
            ),
        )
        held_s = elapsed_s + OVERRUN_STEPS * running.step_s
        largest_usd = max(
            slot_bill_bound_usd(cluster, held_s, running.egress_usd_per_s)
            for cluster in (since, now)
        )
        lengthened_usd = self.budget_usd_per_s * (self._control.slot_s - elapsed_s)
        self.slot_bill_max_usd = max(self.slot_bill_max_usd, largest_usd + lengthened_usd)

    @property
    def overspend_bound_usd(self) -> float:
        """G1 slack: spent minus ``b t`` is never more. Infinite where idling is forbidden."""
        if not self._budget.allow_idle:
            return inf
        return overspend_bound_usd(
            self.line_usd,
            self.budget_usd_per_s,
            slot_bill_max_usd=self.slot_bill_max_usd,
            slot_s=self._control.slot_s,
        )

    def view(self, ledger: Ledger, cluster: ClusterState, running: StepEstimate) -> LedgerView:
        """What the guards of a decision need to know; ``running`` is of the incumbent."""
        reserve_usd = 0.0
        if self._budget.total_usd is not None:
            reserve_usd = CHECKPOINT_RESERVE_S * fsum(
                cluster.price_usd_per_s(device.device_id) for device in cluster.devices
            )
        return LedgerView(
            spent_usd=ledger.spent_usd,
            budget_usd=self.budget_usd_per_s * cluster.now_s,
            line_usd=self.line_usd,
            total_usd=self._budget.total_usd,
            reserve_usd=reserve_usd,
            allow_idle=self._budget.allow_idle,
            paid_until_s={hold.device_id: hold.paid_until_s for hold in ledger.holds},
            running_step_s=running.step_s,
        )
