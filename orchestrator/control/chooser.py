"""Search, assignment and decision of one slot, in this order; every fallback is named."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, Decision, PlanningProblem, StepEstimate
from orchestrator.errors import InfeasibleError
from orchestrator.planning.constraints import Row, broken
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.guards import LedgerView
from orchestrator.planning.lyapunov import ControlOptions, Incumbent, decide

if TYPE_CHECKING:
    from orchestrator.planning.assignment import SlotAssignment
    from orchestrator.planning.margins import MarginalValues
    from orchestrator.strategies.registry import Strategy

logger = logging.getLogger(__name__)

CAP_REACHED = "budget_cap_reached"
"""How the reason of a decision begins when the hard cap lets no candidate run."""

SHRINK_FACTORS = (1.0, 3.0)
"""Prices of money, in units of the best samples per dollar, at which smaller plans win."""

MAX_RATIO_ROUNDS = 4
"""Searches that look for the most samples per dollar before the first slot."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and how it came about."""

    decision: Decision
    solve_s: float = 0.0
    marginal_values: "MarginalValues | None" = None
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Turns a problem into a decision. ``stopwatch`` serves the deadline and ``solve_s`` only."""

    strategy: "Strategy"
    assignment: "SlotAssignment"
    rows: tuple[Row, ...]
    control: ControlOptions
    stopwatch: Callable[[], float]

    def seek_ratio(self, problem: PlanningProblem, treasury: Treasury) -> None:
        """Teach the treasury rho before anything is spent.

        The price of money is raised to the best ratio found until no plan is worth more
        (Dinkelbach): a first V from the fastest plan alone would be too large.

        Raises:
            InfeasibleError: If not even idling would keep the average.
        """
        standing_usd_per_s = CostModel(problem).standing_usd_per_s
        if treasury.may_idle and standing_usd_per_s > problem.budget_usd_per_s:
            raise InfeasibleError(
                "the devices that are billed while present cost "
                f"{standing_usd_per_s / problem.budget_usd_per_s:.3g} times "
                "budget.average_per_hour_usd even when nothing runs; raise it, offer fewer "
                "devices, or write billed: while_used if unused ones are given back"
            )
        for _ in range(MAX_RATIO_ROUNDS):
            best = treasury.best_ratio_samples_per_usd
            priced = replace(problem, penalty_weight=1.0, backlog_usd=best)
            found = self.strategy.propose(priced, out_of_time=self._deadline())
            if not treasury.learn(candidate.estimate for candidate in found):
                return

    def choose(
        self,
        problem: PlanningProblem,
        treasury: Treasury,
        ledger: LedgerView,
        *,
        expected: StepEstimate,
        go_on: bool,
    ) -> Choice:
        """Search, assign, decide.

        Args:
            problem: The slot.
            treasury: Learns rho from what the search finds; V and Q of the decision are its.
            ledger: The money.
            expected: What the incumbent was predicted to take until now.
            go_on: Keep to the incumbent if it may run: the loop has only been restarted.

        Raises:
            InfeasibleError: If the model, or the user's limits, never allow a plan.
        """
        started_s = self.stopwatch()
        found: tuple[Candidate, ...] = ()
        fallbacks = []
        if not go_on or incumbent_estimate(CostModel(problem), self.rows) is None:
            out_of_time = self._deadline()
            found = self.strategy.propose(problem, out_of_time=out_of_time)
            if out_of_time():
                fallbacks.append(
                    f"deadline: the best plan of {self.control.plan_deadline_s:g} s of search; "
                    "control.plan_deadline_s allows more"
                )
        if treasury.learn(candidate.estimate for candidate in found):
            problem = replace(
                problem,
                penalty_weight=treasury.penalty_weight,
                backlog_usd=treasury.queues.backlog_usd,
            )
        cost = CostModel(problem)
        deals = found and self.strategy.deals_shares
        solved = self.assignment.solve(problem, found, self.rows) if deals else None
        if solved and solved.fallback:
            fallbacks.append(solved.fallback)
        obedient = [c for c in found if broken(cost, self.rows, c) is None]
        if solved:
            obedient.insert(0, solved.candidate)
        decision = self._decide(cost, obedient, ledger, expected)
        if decision.reason.startswith(CAP_REACHED):
            smaller = self._smaller(cost, treasury.best_ratio_samples_per_usd)
            decision = self._decide(cost, [*obedient, *smaller], ledger, expected)
        if _any_runs(found) and not _any_runs(obedient):
            decision = self._refused_by_rows(decision, problem)
        return Choice(
            decision=decision,
            solve_s=self.stopwatch() - started_s,
            marginal_values=solved.margins if solved else None,
            fallbacks=tuple(fallbacks),
        )

    def _decide(
        self,
        cost: CostModel,
        candidates: Sequence[Candidate],
        ledger: LedgerView,
        expected: StepEstimate,
    ) -> Decision:
        return decide(
            problem=cost.problem,
            candidates=candidates,
            cost=cost,
            running=Incumbent(incumbent_estimate(cost, self.rows), expected),
            ledger=ledger,
            options=self.control,
        )

    def _smaller(self, cost: CostModel, ratio_samples_per_usd: float) -> list[Candidate]:
        """Plans that are best when a dollar is dear: what may still fit under the hard cap.

        Source: docs/model.md, section 4.7 (shrink).
        """
        found: list[Candidate] = []
        for factor in SHRINK_FACTORS:
            priced = replace(
                cost.problem, penalty_weight=1.0, backlog_usd=factor * ratio_samples_per_usd
            )
            found += self.strategy.propose(priced, out_of_time=self._deadline())
        return [c for c in found if broken(cost, self.rows, c) is None]

    def _refused_by_rows(self, decision: Decision, problem: PlanningProblem) -> Decision:
        """Name the limits as what lets nothing run; an error when nothing ever ran."""
        limits = ", ".join(row.name for row in self.rows)
        if problem.incumbent is None:
            raise InfeasibleError(
                f"no plan found obeys every limit of budget.limits ({limits}); raise the limits"
            )
        if decision.kind != "idle":
            return decision
        reason = f"user_rows_infeasible: no plan found obeys every limit ({limits})"
        return replace(decision, reason=reason)

    def _deadline(self) -> Callable[[], bool]:
        end_s = self.stopwatch() + self.control.plan_deadline_s
        return lambda: self.stopwatch() > end_s


def incumbent_estimate(cost: CostModel, rows: Sequence[Row]) -> StepEstimate | None:
    """The incumbent in the state of the problem.

    None when it is idle or cannot be kept: it lost a device, or breaks memory or a limit.
    """
    plan = cost.problem.incumbent
    if plan is None or plan.is_idle or not all(map(cost.problem.cluster.has, plan.device_ids)):
        return None
    if cost.memory_error(plan.groups, plan.schedule):
        return None
    estimate = retime(cost, plan.groups, plan.schedule)
    return None if broken(cost, rows, Candidate(plan, estimate)) else estimate


def _any_runs(candidates: Sequence[Candidate]) -> bool:
    return any(not candidate.plan.is_idle for candidate in candidates)
