"""Search, assignment and decision of one slot, in this order; every fallback is named."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.control.survey import Survey, survey
from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, Decision, PlanningProblem, StepEstimate
from orchestrator.planning.constraints import Row, broken
from orchestrator.planning.cost import CostModel
from orchestrator.planning.drift import Drift
from orchestrator.planning.event import retime
from orchestrator.planning.frontier import COST_TOLERANCE
from orchestrator.planning.guards import LedgerView
from orchestrator.planning.lyapunov import ControlOptions, Incumbent, decide
from orchestrator.planning.pricing import is_held_back, nearest_breach, refusal, search_within

if TYPE_CHECKING:
    from orchestrator.planning.assignment import AssignmentResult, SlotAssignment
    from orchestrator.planning.margins import MarginalValues
    from orchestrator.strategies.registry import Strategy

logger = logging.getLogger(__name__)

CAP_REACHED = "budget_cap_reached"
"""How the reason of a decision begins when the hard cap lets no candidate run."""

SHRINK_FACTORS = (1.0, 3.0)
"""Prices of money, in units of the best samples per dollar, at which smaller plans win."""

MOVED_PRICE_RATIO = 1.1
"""A slot that moves the price of money by more is searched for at the price of its end, too."""

MAX_PRICE_ROUNDS = 3
"""Searches of one slot at the prices that its own candidates lead to."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and how it came about."""

    decision: Decision
    solve_s: float = 0.0
    marginal_values: "MarginalValues | None" = None
    fallbacks: tuple[str, ...] = ()
    requested: tuple[tuple[str, int], ...] = ()
    """Devices that are wished for, by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Turns a problem into a decision. ``stopwatch`` serves the deadline and ``solve_s`` only."""

    strategy: "Strategy"
    assignment: "SlotAssignment"
    rows: tuple[Row, ...]
    control: ControlOptions
    stopwatch: Callable[[], float]

    def survey(self, problem: PlanningProblem, treasury: Treasury) -> Survey:
        """Teach the treasury what the first slot can show; see ``control.survey``.

        Raises:
            InfeasibleError: If not even idling would keep the average.
        """
        return survey(problem, treasury, self._propose, self.rows, self._deadline)

    def choose(
        self,
        problem: PlanningProblem,
        treasury: Treasury,
        ledger: LedgerView,
        *,
        expected: StepEstimate,
        go_on: bool = False,
        surveyed: Survey | None = None,
    ) -> Choice:
        """Search, assign, decide.

        Args:
            problem: The slot.
            treasury: Learns rho from what the search finds; V and Q of the decision are its.
            ledger: The money.
            expected: What the incumbent was predicted to take until now.
            go_on: Keep to the incumbent if it may run: the loop has only been restarted.
            surveyed: What the first look at this very slot has found.

        Raises:
            InfeasibleError: If the model, or the user's limits, never allow a plan.
        """
        started_s = self.stopwatch()
        found: tuple[Candidate, ...] = ()
        fallbacks: list[str] = []
        if not go_on or incumbent_estimate(CostModel(problem), self.rows) is None:
            # Where limits bind, a second search must know them: half of the time is its. In the
            # first slot most of the search has been the survey's.
            out_of_time = self._deadline(0.5 if self.rows or surveyed else 1.0)
            found = self._search(problem, out_of_time, surveyed)
            if out_of_time() or (surveyed and surveyed.is_cut_off):
                fallbacks.append(self._cut_off("the best plan"))
        if treasury.learn(candidate.estimate for candidate in found):
            problem = replace(
                problem,
                penalty_weight=treasury.scored_weight,
                backlog_usd=treasury.queues.backlog_usd,
            )
        cost = CostModel(problem)
        obedient, solved = self._within_rows(cost, found)
        if self.strategy.deals_shares and is_held_back(cost, found, obedient):
            found += self._priced(cost, found, fallbacks)
            obedient, solved = self._within_rows(cost, found)
        if solved and solved.fallback:
            fallbacks.append(solved.fallback)
        decision = self._decide(cost, obedient, ledger, expected)
        if decision.reason.startswith(CAP_REACHED):
            smaller = self._smaller(cost, treasury.best_ratio_samples_per_usd, fallbacks)
            decision = self._decide(cost, [*obedient, *smaller], ledger, expected)
        if _any_runs(found) and not _any_runs(obedient):
            decision = self._refused_by_rows(decision, cost, found)
        return Choice(
            decision=decision,
            solve_s=self.stopwatch() - started_s,
            marginal_values=solved.margins if solved else None,
            fallbacks=tuple(fallbacks),
        )

    def _search(
        self,
        problem: PlanningProblem,
        out_of_time: Callable[[], bool],
        surveyed: Survey | None,
    ) -> tuple[Candidate, ...]:
        """Candidates at the price of money now, and at the one that the best of them leads to.

        The best drift of a slot is the best score at the backlog of the slot's end (its first
        order condition): the search that knows scores only is asked again there until it finds
        nothing better.
        """
        drift = Drift.of(problem, self.control.slot_s)
        if surveyed:
            found = _surcharged(problem, surveyed.found)
            asked_usd = surveyed.asked_samples_per_usd * problem.penalty_weight
        else:
            found, asked_usd = self._propose(problem, out_of_time), problem.backlog_usd
        best = _best_of_slot(found, drift)
        rounding_usd = COST_TOLERANCE * drift.budget_usd_per_s * drift.slot_s
        for _ in range(MAX_PRICE_ROUNDS):
            if best is None or out_of_time():
                break
            after_usd = drift.backlog_after_usd(best.estimate.counted_usd_per_s)
            least_usd, most_usd = sorted((asked_usd, after_usd))
            if most_usd <= MOVED_PRICE_RATIO * least_usd + rounding_usd:
                break
            asked_usd = after_usd
            more = self._propose(replace(problem, backlog_usd=asked_usd), out_of_time)
            found = tuple({c.plan: c for c in (*more, *found)}.values())  # the first ones stay
            before, best = best, _best_of_slot(found, drift)
            if best is before:
                break
        return found

    def _propose(
        self, problem: PlanningProblem, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        return self.strategy.propose(problem, out_of_time=out_of_time)

    def _cut_off(self, what: str) -> str:
        """The fallback of a search that ran out of time."""
        return (
            f"deadline: {what} of {self.control.plan_deadline_s:g} s of search; "
            "control.plan_deadline_s allows more"
        )

    def _priced(
        self, cost: CostModel, found: Sequence[Candidate], fallbacks: list[str]
    ) -> tuple[Candidate, ...]:
        """What searches find that are told of the limits, in the time that is left."""
        out_of_time = self._deadline(0.5)
        more = search_within(
            lambda problem: self._propose(problem, out_of_time), cost, self.rows, found, out_of_time
        )
        if out_of_time():
            fallbacks.append(self._cut_off("the best plan within the limits"))
        return more

    def _within_rows(
        self, cost: CostModel, found: Sequence[Candidate]
    ) -> tuple[list[Candidate], "AssignmentResult | None"]:
        """Those that obey the limits, the one with the best shares first."""
        obedient = [c for c in found if broken(cost, self.rows, c) is None]
        if not found or not self.strategy.deals_shares:
            return obedient, None
        solved = self.assignment.solve(cost.problem, found, self.rows)
        return [solved.candidate, *obedient], solved

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

    def _smaller(
        self, cost: CostModel, ratio_samples_per_usd: float, fallbacks: list[str]
    ) -> list[Candidate]:
        """Plans that are best when a dollar is dear: what may still fit under the hard cap.

        Source: docs/model.md, section 4.7 (shrink).
        """
        out_of_time = self._deadline(0.5)
        found: list[Candidate] = []
        for factor in SHRINK_FACTORS:
            priced = replace(
                cost.problem, penalty_weight=1.0, backlog_usd=factor * ratio_samples_per_usd
            )
            found += self._propose(priced, out_of_time)
        if out_of_time():
            fallbacks.append(self._cut_off("the best smaller plan"))
        return [c for c in found if broken(cost, self.rows, c) is None]

    def _refused_by_rows(
        self, decision: Decision, cost: CostModel, found: Sequence[Candidate]
    ) -> Decision:
        """Name the limits as what lets nothing run; an error when nothing ever ran."""
        nearest = nearest_breach(cost, self.rows, found)
        if cost.problem.incumbent is None:
            raise refusal(nearest)
        if decision.kind != "idle":
            return decision
        reason = f"user_rows_infeasible: the plan that comes nearest to the limits breaks {nearest}"
        return replace(decision, reason=reason)

    def _deadline(self, part: float = 1.0) -> Callable[[], bool]:
        end_s = self.stopwatch() + part * self.control.plan_deadline_s
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


def _surcharged(problem: PlanningProblem, found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates of a survey with what counts for their devices in this slot."""
    cost = CostModel(problem)

    def counted(candidate: Candidate) -> Candidate:
        surcharge = cost.surcharge_usd_per_s(candidate.plan.device_ids)
        estimate = replace(candidate.estimate, surcharge_usd_per_s=surcharge)
        return Candidate(candidate.plan, estimate, cost.score(estimate))

    return tuple(map(counted, found))


def _best_of_slot(candidates: Sequence[Candidate], drift: Drift) -> Candidate | None:
    running = (c for c in candidates if not c.plan.is_idle)
    return max(running, key=lambda c: drift.slot_score(c.estimate), default=None)


def _any_runs(candidates: Sequence[Candidate]) -> bool:
    return any(not candidate.plan.is_idle for candidate in candidates)
