"""Drift plus penalty of whole slots: the backlog moves while a plan runs, and its price with it."""

from dataclasses import dataclass

from orchestrator.core.slot import PlanningProblem, StepEstimate


@dataclass(frozen=True, slots=True)
class Drift:
    """Where the backlog stands, and what moves it.

    The score J = V' r - Q c prices money as it is at the start of a slot. While V lambda* is
    large against what a slot costs that is all there is to say; where it is not, one slot of a
    dear plan moves the price of money from one end of the frontier to the other, and J alone
    swings between the dearest plan and idling. Costs are those that J counts.

    Source: docs/model.md, sections 4.2 (the drift before it is bounded) and 4.8.
    """

    penalty_weight: float  # V', $^2/sample
    backlog_usd: float  # Q
    budget_usd_per_s: float  # b
    slot_s: float  # D

    @classmethod
    def of(cls, problem: PlanningProblem, slot_s: float) -> "Drift":
        """That of a slot to plan for."""
        return cls(problem.penalty_weight, problem.backlog_usd, problem.budget_usd_per_s, slot_s)

    def backlog_after_usd(self, cost_usd_per_s: float) -> float:
        """Q at the end of a slot of this cost, as the queue moves: ``max(Q + (c - b) D, 0)``."""
        surplus_usd = (cost_usd_per_s - self.budget_usd_per_s) * self.slot_s
        return max(0.0, self.backlog_usd + surplus_usd)

    def slot_score(self, estimate: StepEstimate) -> float:
        """V' r less the drift of a slot, exact: ``V' r - (Q+^2 - Q^2) / (2 D)``, in $^2/s.

        Equal to ``V' r - (c - b) (Q + Q+) / 2`` while the backlog stays positive: money has the
        price of the middle of the slot. For small ``(c - b) D`` that ranks as J does.
        """
        after_usd = self.backlog_after_usd(estimate.counted_usd_per_s)
        squares = after_usd * after_usd - self.backlog_usd * self.backlog_usd
        return self.penalty_weight * estimate.samples_per_s - squares / (2.0 * self.slot_s)

    def lead(self, new: StepEstimate, old: StepEstimate) -> "Lead":
        """By how much ``new`` is ahead of ``old``, and how fast its own spending ends that.

        The lead is taken in the middle of the next slot, were the old plan to stay for it. It
        does not fade where idling would leave nothing owed: the average then goes unused, and
        waiting brings no better moment.
        """
        left_usd = self.backlog_after_usd(old.counted_usd_per_s)
        middle_usd = (self.backlog_usd + left_usd) / 2.0
        dearer_usd_per_s = new.counted_usd_per_s - old.counted_usd_per_s
        faster = new.samples_per_s - old.samples_per_s
        fading = dearer_usd_per_s * (new.counted_usd_per_s - self.budget_usd_per_s)
        return Lead(
            usd2_per_s=self.penalty_weight * faster - middle_usd * dearer_usd_per_s,
            fading_usd2_per_s2=fading if left_usd or old.samples_per_s else 0.0,
            least_s=self.slot_s,
        )


@dataclass(frozen=True, slots=True)
class Lead:
    """The score of one plan above another's, now and while the first one runs."""

    usd2_per_s: float
    fading_usd2_per_s2: float = 0.0  # what a second of running it takes off
    least_s: float = 0.0  # a plan is held for a slot at least

    def gain_usd2(self, horizon_s: float) -> float:
        """Most that the lead comes to: ``max over D <= h <= horizon of h dJ - h^2 fading / 2``.

        The new plan's spending raises (or saves) backlog at ``c - b``, which ends its lead over
        the old one at a foreseeable time. A lead that is about to vanish does not pay for a
        pause, so two plans that the optimum mixes over time take turns rarely: how long each
        dwells grows with the square root of V times the pause.

        Args:
            horizon_s: H_e D: beyond it the state of the cluster is not trusted to last.
        """
        if self.fading_usd2_per_s2 <= 0:
            return self.usd2_per_s * horizon_s
        run_s = min(horizon_s, max(self.least_s, self.usd2_per_s / self.fading_usd2_per_s2))
        return self.usd2_per_s * run_s - self.fading_usd2_per_s2 * run_s * run_s / 2.0
