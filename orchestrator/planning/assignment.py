"""The slot's choice among elite candidates under the user's rows, by one mixed-integer problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import SolverError
from orchestrator.planning.blocks import without_surcharges
from orchestrator.planning.constraints import Row, breaches, broken
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.margins import MarginalValues, marginal_values
from orchestrator.planning.slot_table import GAIN_TOLERANCE, SlotTable, slot_table
from orchestrator.planning.waterfill import as_microbatches

if TYPE_CHECKING:
    from orchestrator.planning.program import SlotProgram

MAX_CANDIDATES = 4
"""Best running candidates that take part, of those that obey the rows and of those that might
with other shares: the solver's time grows with their number."""

LEAST_OBEDIENT = 2
"""Of those that obey already; the best of them is the mark to beat, so few need take part."""

PRICE_BIN = 0.03
"""Of the price of money, as a logarithm (docs/model.md, section 9)."""

MAX_KNOWN = 64
"""Scenes whose marginal values are remembered."""

SOLVE_LIMIT_S = 1.0
"""Longest time of one solve, whatever ``plan_deadline_s`` allows (docs/model.md, section 9)."""

Compile = Callable[[int, int, int], "SlotProgram"]
Value = Callable[[CostModel, Candidate, Sequence[Row]], MarginalValues | None]


def _compile(num_candidates: int, num_sets: int, num_rows: int) -> "SlotProgram":
    """Compile with CVXPY, which takes a second to load: without rows there is nothing to solve."""
    from orchestrator.planning.program import SlotProgram  # noqa: PLC0415 - as above

    return SlotProgram(num_candidates, num_sets, num_rows)


@dataclass(frozen=True, slots=True)
class AssignmentResult:
    """The best candidate that runs and obeys every row, idle when there is none.

    Its shares may differ from those proposed. ``margins``: what one more of each scarce thing
    is worth beside it, None when idle. ``fallback``: why the solver's answer was not
    used, or why nothing but idle is left; None when all went well.
    """

    candidate: Candidate
    margins: MarginalValues | None = None
    fallback: str | None = None


class SlotAssignment:
    """Solves the slot's assignment; the CVXPY problem is compiled once for every shape.

    Args:
        time_limit_s: Of one solve, at most ``SOLVE_LIMIT_S``; beyond it the best proposal that
            obeys the rows stands.
        compiled: Compiles the problem of a shape: candidates, sets, rows.
        valued: Values what is scarce beside a candidate.

    Source: docs/model.md, section 5.2.
    """

    def __init__(
        self,
        time_limit_s: float,
        *,
        compiled: Compile = _compile,
        valued: Value = marginal_values,
    ) -> None:
        self._time_limit_s = min(time_limit_s, SOLVE_LIMIT_S)
        self._compiled, self._valued = compiled, valued
        self._programs: dict[tuple[int, int, int], SlotProgram] = {}
        self._known: dict[tuple[object, ...], MarginalValues | None] = {}

    def solve(
        self, problem: PlanningProblem, candidates: Sequence[Candidate], rows: Sequence[Row]
    ) -> AssignmentResult:
        """Pick candidate and counts of microbatches; idle when none obeys the rows.

        Whether running is worth its price is for ``decide`` to say. Shares are first dealt by
        water-filling. Candidates of which no shares could beat the best one so found take no
        part in the problem; without rows and with equal egress none is left to be solved.

        Args:
            problem: The slot.
            candidates: Proposals of a strategy, idle among them.
            rows: The user's limits.
        """
        cost = CostModel(problem)

        def score(candidate: Candidate) -> float:
            """J at this problem's V' and Q: candidates may have been found at others."""
            return cost.score(candidate.estimate)

        idle = next(c for c in candidates if c.plan.is_idle)
        ranked = sorted((c for c in candidates if not c.plan.is_idle), key=score, reverse=True)
        obedient = [c for c in ranked if broken(cost, rows, c) is None]
        pairs = [(c, slot_table(cost, c, rows)) for c in _entered(ranked, obedient)]
        filled = (_filled(cost, *pair) for pair in pairs)
        obedient += [c for c in filled if c and broken(cost, rows, c) is None]
        best = max(obedient, key=score, default=None)
        fallback = None
        try:
            dealt = self._solved(cost, pairs, rows, score(best) if best else None)
        except SolverError as error:
            dealt, fallback = None, f"assignment: {error}"
        if dealt and broken(cost, rows, dealt) is None and (not best or score(dealt) > score(best)):
            best = dealt
        if best is None and ranked and fallback is None:
            nearest = breaches(cost, rows, ranked[0])
            why = "; ".join(breach.text for breach in nearest) or "shares that would obey"
            fallback = f"user_rows_infeasible: the best plan breaks {why}"
        margins = self._margins(cost, best, rows) if best else None
        return AssignmentResult(best or idle, margins, fallback)

    def _margins(
        self, cost: CostModel, best: Candidate, rows: Sequence[Row]
    ) -> MarginalValues | None:
        """Marginal values, remembered from slots in which all but the time was alike.

        They tell a user what to rent: blocks that begin or are paid for just now play no part.
        """
        best = replace(best, estimate=replace(best.estimate, surcharge_usd_per_s=0.0))
        price = cost.problem.price_of_money_samples_per_usd
        key = _scene(cost, best, rows)
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._valued(cost, best, rows)
        known = self._known[key]
        return known.at(price) if known else None

    def _solved(
        self,
        cost: CostModel,
        pairs: Sequence[tuple[Candidate, SlotTable]],
        rows: Sequence[Row],
        floor: float | None,
    ) -> Candidate | None:
        """The best candidate with its best shares, None when none is above the floor in J.

        Raises:
            SolverError: If the solver gave no answer within its limit.
        """
        if floor is None:  # J of an endless step
            floor = -max((t.backlog_usd * t.usd_per_s for _, t in pairs), default=0.0)
        above = floor + GAIN_TOLERANCE * abs(floor)
        pairs = [(c, table) for c, table in pairs if table.bound() > above]
        if not pairs:
            return None
        tables = [table for _, table in pairs]
        found = self._program(tables, rows).best(tables, rows, floor, self._time_limit_s)
        return _dealt(cost, *pairs[found[0]], found[1]) if found else None

    def _program(self, tables: Sequence[SlotTable], rows: Sequence[Row]) -> "SlotProgram":
        """That of the shape, padded so that few shapes are compiled."""
        num_sets = max(len(table.sets) for table in tables)
        shape = (_padded(len(tables)), _padded(num_sets), len(rows))
        if shape not in self._programs:
            self._programs[shape] = self._compiled(*shape)
        return self._programs[shape]


def _entered(ranked: Sequence[Candidate], obedient: Sequence[Candidate]) -> list[Candidate]:
    """Who takes part."""
    known = set(map(id, obedient))
    others = [c for c in ranked if id(c) not in known][:MAX_CANDIDATES]
    return [*obedient[: max(LEAST_OBEDIENT, MAX_CANDIDATES - len(others))], *others]


def _scene(cost: CostModel, best: Candidate, rows: Sequence[Row]) -> tuple[object, ...]:
    """What the marginal values of a plan depend on; prices of money by bins of 3 %."""
    problem = cost.problem
    price = problem.price_of_money_samples_per_usd
    offers = tuple([(o.pool, o.price_usd_per_s, o.billed) for o in problem.cluster.offers])
    return (
        best.plan.groups,
        best.plan.schedule,
        problem.model,
        problem.batch_samples,
        problem.microbatch_samples,
        problem.overlap,
        problem.memory_margin_ratio,
        without_surcharges(problem.cluster).devices,
        problem.cluster.links,
        offers,
        tuple(rows),
        round(log(price) / PRICE_BIN) if price > 0 else None,
    )


def _padded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _filled(cost: CostModel, candidate: Candidate, table: SlotTable) -> Candidate | None:
    """The candidate with the shares of water-filling; None when its own are as good."""
    totals = table.filled()
    if totals is None:
        return None
    score = cost.score(candidate.estimate)
    better = table.score(totals) > score + GAIN_TOLERANCE * abs(score)
    return _dealt(cost, candidate, table, totals) if better else None


def _dealt(
    cost: CostModel, candidate: Candidate, table: SlotTable, totals: Sequence[int]
) -> Candidate:
    """The candidate with these microbatches of its sets, dealt evenly within each.

    Samples too many come off the groups that end last.
    """
    groups, schedule = candidate.plan.groups, candidate.plan.schedule
    samples, ends_s = [0] * len(groups), [0.0] * len(groups)
    for a, (each, total) in enumerate(zip(table.sets, totals, strict=True)):
        whole, fuller = divmod(total, each.count)
        # Who had more before keeps more: shares change as little as they must.
        order = sorted(each.members, key=lambda g: -groups[g].num_samples)
        for place, g in enumerate(order):
            count = whole + (place < fuller)
            samples[g] = table.size[a] * count
            ends_s[g] = table.fixed[a] + table.tau[a] * count
    surplus = sum(samples) - table.batch
    for g in sorted(range(len(groups)), key=lambda g: -ends_s[g]):
        taken = min(surplus, samples[g] - 1)
        samples[g] -= taken
        surplus -= taken
    changed = []
    for group, share in zip(groups, samples, strict=True):
        microbatches = as_microbatches(share, group.microbatches[0])
        stages = group.stages
        if schedule == "gpipe":
            stages = cost.with_inflight(stages, microbatches[0], len(microbatches), schedule)
        changed.append(replace(group, stages=stages, microbatches=microbatches))
    if cost.memory_error(changed, schedule) is not None:
        return candidate
    estimate = retime(cost, changed, schedule)
    plan = replace(candidate.plan, groups=tuple(changed))
    return Candidate(plan, estimate, cost.score(estimate))
