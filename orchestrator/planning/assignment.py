"""The slot's choice among elite candidates under the user's rows, by one mixed-integer problem.

Shape letters: K candidates, G groups (padded to the most of any candidate).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog  # type: ignore[import-untyped]  # ships no types

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import SolverError
from orchestrator.planning.constraints import Row, RowUse, broken, row_use
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.waterfill import as_microbatches

FloatArray = NDArray[np.float64]

MAX_CANDIDATES = 4
"""Best running candidates that take part: the solver's time grows with their number."""

MAX_ROUNDS = 4
"""Dinkelbach rounds; the last one usually confirms the one before."""

GAIN_TOLERANCE = 1e-9
"""Relative gain in J below which a round brought nothing."""

DUAL_TOLERANCE = 1e-9
"""Shadow prices below this are those of rows that do not bind."""

SOLVER = {"output_flag": False, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9, "threads": 1}


@dataclass(frozen=True, slots=True)
class AssignmentResult:
    """The best candidate that obeys every row; its shares may differ from those proposed.

    ``shadow_prices``: for each row that binds, what one more unit of it would bring: samples
    per dollar for spending, samples/s per unit of share (negative). ``fallback``: why the
    solver's answer was not used, or why nothing but idle is left; None when all went well.
    """

    candidate: Candidate
    shadow_prices: tuple[tuple[str, float], ...] = ()
    fallback: str | None = None


class SlotAssignment:
    """Solves the slot's assignment; the CVXPY problem is compiled once for every shape.

    Args:
        time_limit_s: Of one solve; beyond it the best proposal that obeys the rows stands.

    Source: docs/model.md, section 5.2.
    """

    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._programs: dict[tuple[int, int, int], _Program] = {}

    def solve(
        self, problem: PlanningProblem, candidates: Sequence[Candidate], rows: Sequence[Row]
    ) -> AssignmentResult:
        """Pick candidate and counts of microbatches; idle when none obeys the rows.

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
        best = obedient[0] if obedient else idle
        # Others may obey with other shares, but what obeys already must not miss its place.
        running = [*obedient[:MAX_CANDIDATES], *(c for c in ranked if c not in obedient)]
        running = running[:MAX_CANDIDATES]
        if not running:
            return AssignmentResult(idle)
        tables = [_table(cost, candidate, rows) for candidate in running]
        shape = (len(running), max(len(table.tau) for table in tables), len(rows))
        if shape not in self._programs:
            self._programs[shape] = _Program(*shape)
        try:
            found = self._programs[shape].best(tables, rows, score(best), self._time_limit_s)
        except SolverError as error:
            return AssignmentResult(best, fallback=f"assignment: {error}")
        if found is not None:
            dealt = _dealt(cost, running[found[0]], found[1])
            if broken(cost, rows, dealt) is None and score(dealt) > score(best):
                best = dealt
        if best.plan.is_idle:
            row = broken(cost, rows, running[0])
            return AssignmentResult(
                best, fallback=f"user_rows_infeasible: no plan keeps {row.name}" if row else None
            )
        return AssignmentResult(best, _shadow_prices(_table(cost, best, rows), rows))


@dataclass(frozen=True, slots=True)
class _Table:
    """The figures of one candidate, per group where a tuple."""

    tau: tuple[float, ...]  # s
    fixed: tuple[float, ...]  # what a step lasts beyond n tau, gradient sums included, s
    size: tuple[int, ...]  # samples of a full microbatch
    cap: tuple[int, ...]  # most microbatches
    usd: tuple[float, ...]  # egress of one microbatch
    step_usd: float  # egress of the gradient sums
    usd_per_s: float  # of the devices
    uses: tuple[RowUse, ...]
    worth: float  # V' X, $^2
    backlog_usd: float
    batch: int

    def score(self, counts: Sequence[int]) -> float:
        """J of these counts."""
        step_s = self.step_s(counts)
        egress_usd = self.step_usd + sum(e * n for e, n in zip(self.usd, counts, strict=True))
        worth = self.worth - self.backlog_usd * egress_usd
        return worth / step_s - self.backlog_usd * self.usd_per_s

    def step_s(self, counts: Sequence[int]) -> float:
        """Step time of these counts."""
        return max(f + t * n for f, t, n in zip(self.fixed, self.tau, counts, strict=True))


def _table(cost: CostModel, candidate: Candidate, rows: Sequence[Row]) -> _Table:
    """Closed form of every group, shifted so that it meets the candidate's own estimate."""
    groups, estimate, problem = candidate.plan.groups, candidate.estimate, cost.problem
    sizes = [group.microbatches[0] for group in groups]
    curves = [
        cost.curve(group.stages, size, candidate.plan.schedule, replicated=len(groups) > 1)
        for group, size in zip(groups, sizes, strict=True)
    ]
    after_s = estimate.step_s - max(estimate.group_s)
    boundary_usd = sum(cost.egress_usd(g.stages, m) for g in groups for m in g.microbatches)
    return _Table(
        tau=tuple(curve.period_s for curve in curves),
        fixed=tuple(
            group_s - group.num_samples / size * curve.period_s + after_s
            for group, size, curve, group_s in zip(
                groups, sizes, curves, estimate.group_s, strict=True
            )
        ),
        size=tuple(sizes),
        cap=tuple(
            max(curve.max_microbatches, len(group.microbatches))
            for curve, group in zip(curves, groups, strict=True)
        ),
        usd=tuple(cost.egress_usd(g.stages, size) for g, size in zip(groups, sizes, strict=True)),
        step_usd=max(0.0, estimate.egress_usd_per_s * estimate.step_s - boundary_usd),
        usd_per_s=estimate.cost_usd_per_s - estimate.egress_usd_per_s,
        uses=tuple(row_use(cost, row, groups, estimate) for row in rows),
        worth=problem.penalty_weight * problem.batch_samples,
        backlog_usd=problem.backlog_usd,
        batch=problem.batch_samples,
    )


class _Program:
    """The mixed-integer problem of one shape; its data are Parameters, so it compiles once.

    Times are in units of the shortest proposed step and worth in units of V' X, which keeps
    the solver's absolute tolerances small beside the figures.
    """

    def __init__(self, num_candidates: int, num_groups: int, num_rows: int) -> None:
        K, G = self._shape = num_candidates, num_groups
        self._chosen = cp.Variable(K, boolean=True)
        self._count = cp.Variable((K, G), integer=True)
        self._time = cp.Variable(K, nonneg=True)
        self._tau, self._fixed, self._egress, self._size, self._cap, self._real = (
            cp.Parameter((K, G)) for _ in range(6)
        )
        self._worth = cp.Parameter(K)
        # Backlog times price is formed in NumPy: a product of two Parameters is not DPP.
        self._time_price = cp.Parameter(K)
        self._batch, self._batch_most = cp.Parameter(), cp.Parameter()
        chosen_KG = cp.reshape(self._chosen, (K, 1), order="C") @ np.ones((1, G))
        waits_KG = (
            cp.reshape(self._time, (K, 1), order="C") @ np.ones((1, G))
            - cp.multiply(self._fixed, chosen_KG)
            - cp.multiply(self._tau, self._count)
        )
        samples_K = cp.sum(cp.multiply(self._size, self._count), axis=1)
        constraints = [
            cp.sum(self._chosen) <= 1,
            self._count >= cp.multiply(self._real, chosen_KG),
            self._count <= cp.multiply(self._cap, chosen_KG),
            samples_K >= self._batch * self._chosen,
            samples_K <= self._batch_most * self._chosen,
            waits_KG >= 0,
        ]
        self._rows = [
            (cp.Parameter(K), cp.Parameter((K, G)), cp.Parameter(K)) for _ in range(num_rows)
        ]
        if num_rows:
            # T is the end of some group: a limit on a rate is not kept by waiting.
            last = cp.Variable((K, G), boolean=True)
            self._longest = cp.Parameter()
            constraints += [
                waits_KG <= self._longest * (1 - last),
                cp.sum(last, axis=1) >= self._chosen,
                last <= self._real,
            ]
        constraints += [
            time @ self._time + cp.sum(cp.multiply(count, self._count)) + step @ self._chosen <= 0
            for time, count, step in self._rows
        ]
        worth = self._worth @ self._chosen - cp.sum(cp.multiply(self._egress, self._count))
        self._problem = cp.Problem(cp.Maximize(worth - self._time_price @ self._time), constraints)

    def best(
        self, tables: Sequence[_Table], rows: Sequence[Row], floor: float, time_limit_s: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """Candidate index and counts of the best J above ``floor``; None when there is none.

        Dinkelbach: J is a ratio; with J itself as the price of time the best ratio scores 0.

        Raises:
            SolverError: If the solver gave no answer within its limit.
        """
        unit_s = self._fill(tables, rows)
        found, score = None, floor
        for _ in range(MAX_ROUNDS):
            # A hair of price keeps T at the end of a group when time is worth nothing.
            self._time_price.value = np.array(
                [
                    max((t.backlog_usd * t.usd_per_s + score) * unit_s / t.worth, 1e-6)
                    for t in tables
                ]
            )
            answer = self._answer(time_limit_s)
            if answer is None:
                break
            reached = tables[answer[0]].score(answer[1])
            if reached <= score + GAIN_TOLERANCE * abs(score):
                break
            found, score = answer, reached
        return found

    def _answer(self, time_limit_s: float) -> tuple[int, tuple[int, ...]] | None:
        with warnings.catch_warnings():
            # The status says it too, and better.
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            try:
                self._problem.solve(solver=cp.HIGHS, time_limit=time_limit_s, **SOLVER)
            except cp.error.SolverError as error:
                raise SolverError(f"HiGHS failed: {error}") from error
        if self._problem.status in cp.settings.INF_OR_UNB:
            return None
        if self._problem.status != cp.OPTIMAL or self._chosen.value is None:
            raise SolverError(
                f"HiGHS ended {self._problem.status!r} after at most {time_limit_s} s; "
                "raise control.plan_deadline_s"
            )
        k = int(np.argmax(self._chosen.value))
        if self._chosen.value[k] < 0.5:
            return None
        counts = np.rint(self._count.value[k]).astype(int)
        return k, tuple(int(n) for n in counts if n > 0)

    def _fill(self, tables: Sequence[_Table], rows: Sequence[Row]) -> float:
        """Set every Parameter but the price of time; returns the unit of time in seconds."""
        G = self._shape[1]

        def grid(values: Sequence[Sequence[float]]) -> FloatArray:
            return np.array([[*row, *[0.0] * (G - len(row))] for row in values], dtype=np.float64)

        proposed = [[-(-t.batch // s) for s in t.size] for t in tables]
        unit_s = min(
            f + tau for t in tables for f, tau in zip(t.fixed, t.tau, strict=True) if f + tau > 0
        )
        self._tau.value = grid([t.tau for t in tables]) / unit_s
        self._fixed.value = grid([t.fixed for t in tables]) / unit_s
        self._size.value = grid([t.size for t in tables])
        self._cap.value = np.minimum(grid([t.cap for t in tables]), grid(proposed))
        self._real.value = grid([[1.0] * len(t.tau) for t in tables])
        self._egress.value = grid([[t.backlog_usd * e / t.worth for e in t.usd] for t in tables])
        self._worth.value = np.array([1 - t.backlog_usd * t.step_usd / t.worth for t in tables])
        self._batch.value = float(tables[0].batch)
        # What the last microbatch lacks is cut off afterwards; it is less than one.
        self._batch_most.value = tables[0].batch + max(max(t.size) for t in tables) - 1.0
        if rows:
            self._longest.value = 2.0 * max(
                t.step_s(counts) / unit_s for t, counts in zip(tables, proposed, strict=True)
            )
        for r, (row, (time, count, step)) in enumerate(zip(rows, self._rows, strict=True)):
            uses = [table.uses[r] for table in tables]
            if row.kind == "share":
                time.value = np.zeros(len(tables))
                step.value = np.full(len(tables), row.limit)
                reads = [
                    [-size / t.batch * reads for size, reads in zip(t.size, use.reads, strict=True)]
                    for t, use in zip(tables, uses, strict=True)
                ]
                count.value = grid(reads)
                continue
            unit_usd = unit_s * max(row.limit, *(use.usd_per_s for use in uses), 1e-12)
            time.value = np.array([(u.usd_per_s - row.limit) * unit_s / unit_usd for u in uses])
            step.value = np.array([use.step_usd / unit_usd for use in uses])
            count.value = grid(
                [
                    [
                        usd * size / unit_usd
                        for usd, size in zip(u.usd_per_sample, t.size, strict=True)
                    ]
                    for t, u in zip(tables, uses, strict=True)
                ]
            )
        return unit_s


def _dealt(cost: CostModel, candidate: Candidate, counts: Sequence[int]) -> Candidate:
    """The candidate with these counts; samples too many come off the group that ends last."""
    groups, schedule = candidate.plan.groups, candidate.plan.schedule
    table = _table(cost, candidate, ())
    samples = [size * n for size, n in zip(table.size, counts, strict=True)]
    ends_s = [f + t * n for f, t, n in zip(table.fixed, table.tau, counts, strict=True)]
    for g in sorted(range(len(groups)), key=lambda g: -ends_s[g]):
        surplus = sum(samples) - table.batch
        samples[g] -= min(surplus, samples[g] - 1)
    changed = []
    for group, share, size in zip(groups, samples, table.size, strict=True):
        microbatches = as_microbatches(share, size)
        stages = group.stages
        if schedule == "gpipe":
            stages = cost.with_inflight(stages, microbatches[0], len(microbatches), schedule)
        changed.append(replace(group, stages=stages, microbatches=microbatches))
    if cost.memory_error(changed, schedule) is not None:
        return candidate
    estimate = retime(cost, changed, schedule)
    plan = replace(candidate.plan, groups=tuple(changed))
    return Candidate(plan, estimate, cost.score(estimate))


def _shadow_prices(table: _Table, rows: Sequence[Row]) -> tuple[tuple[str, float], ...]:
    """What one more unit of each binding row brings, from the continuous form of the winner.

    Charnes-Cooper: u = 1/T, z = n/T; then J is linear. Variables: z of every group, u.
    """
    if not rows:
        return ()
    num_groups = len(table.tau)
    weight = table.worth / table.batch
    gain = [-table.backlog_usd * usd for usd in table.usd]
    gain.append(table.worth - table.backlog_usd * table.step_usd)
    upper, bounds = [], []
    for g in range(num_groups):
        upper.append([*(table.tau[g] * (h == g) for h in range(num_groups)), table.fixed[g]])
        bounds.append(1.0)
    for row, use in zip(rows, table.uses, strict=True):
        pairs = list(zip(table.size, use.usd_per_sample, use.reads, strict=True))
        if row.kind == "share":
            upper.append([*(-size * reads for size, _, reads in pairs), row.limit * table.batch])
            bounds.append(0.0)
        else:
            upper.append([*(size * usd for size, usd, _ in pairs), use.step_usd])
            bounds.append(row.limit - use.usd_per_s)
    solved = linprog(
        [-value for value in gain],
        A_ub=upper,
        b_ub=bounds,
        A_eq=[[*table.size, -table.batch]],
        b_eq=[0.0],
        method="highs",
    )
    if solved.status != 0:
        return ()
    found = []
    for row, marginal in zip(rows, solved.ineqlin.marginals[num_groups:], strict=True):
        value = -float(marginal) / weight
        if row.kind == "share":
            value *= -table.batch * float(solved.x[-1])
        if abs(value) > DUAL_TOLERANCE:
            found.append((row.name, value))
    return tuple(found)
