"""Search, assignment and decision of one slot, in this order; every fallback is named."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, Decision, PlanningProblem, StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.guards import LedgerView
from orchestrator.planning.lyapunov import ControlOptions, decide

if TYPE_CHECKING:
    from orchestrator.planning.assignment import SlotAssignment
    from orchestrator.planning.constraints import Row
    from orchestrator.strategies.registry import Strategy

logger = logging.getLogger(__name__)

MAX_RATIO_ROUNDS = 4
"""Searches that look for the most samples per dollar before the first slot."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and how it came about."""

    decision: Decision
    solve_s: float = 0.0
    marginal_values: tuple[tuple[str, float], ...] = ()
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Turns a problem into a decision. ``stopwatch`` serves the deadline and ``solve_s`` only."""

    strategy: "Strategy"
    assignment: "SlotAssignment"
    rows: "tuple[Row, ...]"
    control: ControlOptions
    stopwatch: Callable[[], float]

    def seek_ratio(self, problem: PlanningProblem, treasury: Treasury) -> None:
        """Teach the treasury rho before anything is spent.

        The price of money is raised to the best ratio found until no plan is worth more
        (Dinkelbach): a first V from the fastest plan alone would be too large.
        """
        for _ in range(MAX_RATIO_ROUNDS):
            best = treasury.best_ratio_samples_per_usd
            priced = replace(problem, penalty_weight=1.0, backlog_usd=best)
            found = self.strategy.propose(priced, out_of_time=self._deadline())
            if not treasury.learn(candidate.estimate for candidate in found):
                return

    def choose(
        self, problem: PlanningProblem, treasury: Treasury, ledger: LedgerView, *, go_on: bool
    ) -> Choice:
        """Search, assign, decide.

        Args:
            problem: The slot.
            treasury: Learns rho from what the search finds; V and Q of the decision are its.
            ledger: The money.
            go_on: Keep to the incumbent if it may run: the loop has only been restarted.
        """
        started_s = self.stopwatch()
        cost = CostModel(problem)
        estimate = incumbent_estimate(cost)
        found: tuple[Candidate, ...] = ()
        if not go_on or estimate is None:
            found = self.strategy.propose(problem, out_of_time=self._deadline())
        if treasury.learn(candidate.estimate for candidate in found):
            problem = replace(
                problem,
                penalty_weight=treasury.weight,
                backlog_usd=treasury.queues.backlog_usd,
            )
            cost = CostModel(problem)
        solved = self.assignment.solve(problem, found, self.rows) if found else None
        if solved:
            found = (solved.candidate, *found)
        decision = decide(
            problem=problem,
            candidates=found,
            cost=cost,
            incumbent_estimate=estimate,
            ledger=ledger,
            options=self.control,
        )
        return Choice(
            decision=decision,
            solve_s=self.stopwatch() - started_s,
            marginal_values=solved.shadow_prices if solved else (),
            fallbacks=(solved.fallback,) if solved and solved.fallback else (),
        )

    def _deadline(self) -> Callable[[], bool]:
        end_s = self.stopwatch() + self.control.plan_deadline_s
        return lambda: self.stopwatch() > end_s


def incumbent_estimate(cost: CostModel) -> StepEstimate | None:
    """The incumbent in the state of the problem; None: idle, or it lost a device or its memory."""
    problem = cost.problem
    plan = problem.incumbent
    if plan is None or plan.is_idle or not all(map(problem.cluster.has, plan.device_ids)):
        return None
    if cost.memory_error(plan.groups, plan.schedule):
        return None
    return retime(cost, plan.groups, plan.schedule)
