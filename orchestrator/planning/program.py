"""The mixed-integer problem of a slot: which candidate, and how many microbatches each set gets.

Shape letters: K candidates, A sets of alike groups (both padded).
"""

import warnings
from collections.abc import Sequence

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import SolverError
from orchestrator.planning.constraints import Row
from orchestrator.planning.slot_table import GAIN_TOLERANCE, SlotTable

FloatArray = NDArray[np.float64]

MAX_ROUNDS = 4
"""Dinkelbach rounds; the last one usually confirms the one before."""

SOLVER = {"output_flag": False, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9, "threads": 1}


class SlotProgram:
    """The problem of one shape; its data are Parameters, so it compiles once.

    The number of groups does not count: alike groups are one set with a multiplicity c, of
    which the solver sees the fullest group's count n and the set's microbatches x. Times are in
    units of the shortest proposed step and worth in units of V' X, which keeps the solver's
    absolute tolerances small beside the figures.

    Source: docs/model.md, section 5.2.
    """

    def __init__(self, num_candidates: int, num_sets: int, num_rows: int) -> None:
        K, A = self._shape = num_candidates, num_sets
        self._chosen = cp.Variable(K, boolean=True)
        self._fullest = cp.Variable((K, A), integer=True)
        self._total = cp.Variable((K, A), integer=True)
        self._time = cp.Variable(K, nonneg=True)
        self._tau, self._fixed, self._egress, self._size, self._cap = (
            cp.Parameter((K, A)) for _ in range(5)
        )
        self._real, self._groups = cp.Parameter((K, A)), cp.Parameter((K, A))
        self._worth, self._offered = cp.Parameter(K), cp.Parameter(K)
        # Backlog times price is formed in NumPy: a product of two Parameters is not DPP.
        self._time_price = cp.Parameter(K)
        self._batch, self._batch_most = cp.Parameter(), cp.Parameter()
        self._rows = [
            (cp.Parameter(K), cp.Parameter((K, A)), cp.Parameter(K)) for _ in range(num_rows)
        ]
        chosen_KA = cp.reshape(self._chosen, (K, 1), order="C") @ np.ones((1, A))
        waits_KA = (
            cp.reshape(self._time, (K, 1), order="C") @ np.ones((1, A))
            - cp.multiply(self._fixed, chosen_KA)
            - cp.multiply(self._tau, self._fullest)
        )
        constraints = [*self._counted(chosen_KA), waits_KA >= 0]
        if num_rows:
            # T is the end of some group: a limit on a rate is not kept by waiting.
            last = cp.Variable((K, A), boolean=True)
            self._longest = cp.Parameter()
            constraints += [
                waits_KA <= self._longest * (1 - last),
                cp.sum(last, axis=1) >= self._chosen,
                last <= self._real,
            ]
        constraints += [
            time @ self._time + cp.sum(cp.multiply(count, self._total)) + step @ self._chosen <= 0
            for time, count, step in self._rows
        ]
        worth = self._worth @ self._chosen - cp.sum(cp.multiply(self._egress, self._total))
        self._problem = cp.Problem(cp.Maximize(worth - self._time_price @ self._time), constraints)

    def _counted(self, chosen_KA: cp.Expression) -> list[cp.Constraint]:
        """One candidate at most, every group at work, the batch whole; n is x / c rounded up."""
        whole_K = cp.sum(cp.multiply(self._size, self._total), axis=1)
        capacity_KA = cp.multiply(self._groups, self._fullest)
        return [
            cp.sum(self._chosen) <= 1,
            self._chosen <= self._offered,
            self._fullest >= cp.multiply(self._real, chosen_KA),
            self._fullest <= cp.multiply(self._cap, chosen_KA),
            self._total >= cp.multiply(self._groups, chosen_KA),
            self._total <= capacity_KA,
            self._total >= capacity_KA - cp.multiply(self._groups - self._real, chosen_KA),
            whole_K >= self._batch * self._chosen,
            whole_K <= self._batch_most * self._chosen,
        ]

    def best(
        self, tables: Sequence[SlotTable], rows: Sequence[Row], floor: float, time_limit_s: float
    ) -> tuple[int, tuple[int, ...]] | None:
        """Candidate index and microbatches of its sets of the best J above ``floor``.

        None when there is none. Dinkelbach: J is a ratio; with J itself as the price of time
        the best ratio scores 0. The limit is that of all rounds together; what was found before it
        passed stands.

        Raises:
            SolverError: If the solver gave no answer within its limit.
        """
        unit_s = self._fill(tables, rows)
        found, score, left_s = None, floor, time_limit_s
        for _ in range(MAX_ROUNDS):
            # A hair of price keeps T at the end of a group when time is worth nothing.
            self._time_price.value = self._column(
                [
                    max((t.backlog_usd * t.usd_per_s + score) * unit_s / t.worth, 1e-6)
                    for t in tables
                ]
            )
            try:
                answer = self._answer(tables, left_s)
            except SolverError:
                if found is None:
                    raise
                break
            if answer is None:
                break
            left_s = max(0.0, left_s - (self._problem.solver_stats.solve_time or 0.0))
            reached = tables[answer[0]].score(answer[1])
            if reached <= score + GAIN_TOLERANCE * abs(score):
                break
            found, score = answer, reached
        return found

    def _answer(
        self, tables: Sequence[SlotTable], time_limit_s: float
    ) -> tuple[int, tuple[int, ...]] | None:
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
                f"HiGHS ended {self._problem.status!r} after at most {time_limit_s} s; the best "
                "proposal that obeys the limits stands"
            )
        k = int(np.argmax(self._chosen.value))
        if self._chosen.value[k] < 0.5:
            return None
        totals = np.rint(self._total.value[k]).astype(int)
        return k, tuple(int(x) for x in totals[: len(tables[k].sets)])

    def _column(self, values: Sequence[float]) -> FloatArray:
        """One figure a candidate, padded."""
        return np.array([*values, *[0.0] * (self._shape[0] - len(values))], dtype=np.float64)

    def _grid(self, values: Sequence[Sequence[float]]) -> FloatArray:
        """One figure a candidate and set, padded."""
        grid = np.zeros(self._shape)
        for k, row in enumerate(values):
            grid[k, : len(row)] = row
        return grid

    def _fill(self, tables: Sequence[SlotTable], rows: Sequence[Row]) -> float:
        """Set every Parameter but the price of time; returns the unit of time in seconds."""
        alone = [[-(-t.batch // m) for m in t.size] for t in tables]
        unit_s = min(
            f + tau for t in tables for f, tau in zip(t.fixed, t.tau, strict=True) if f + tau > 0
        )
        self._offered.value = self._column([1.0] * len(tables))
        self._tau.value = self._grid([t.tau for t in tables]) / unit_s
        self._fixed.value = self._grid([t.fixed for t in tables]) / unit_s
        self._size.value = self._grid([t.size for t in tables])
        self._cap.value = np.minimum(self._grid([t.cap for t in tables]), self._grid(alone))
        self._real.value = self._grid([[1.0] * len(t.sets) for t in tables])
        self._groups.value = self._grid([t.count for t in tables])
        self._egress.value = self._grid(
            [[t.backlog_usd * e / t.worth for e in t.usd] for t in tables]
        )
        self._worth.value = self._column([1 - t.backlog_usd * t.step_usd / t.worth for t in tables])
        self._batch.value = float(tables[0].batch)
        # What the last microbatch lacks is cut off afterwards; it is less than one.
        self._batch_most.value = tables[0].batch + max(max(t.size) for t in tables) - 1.0
        if rows:
            self._longest.value = 2.0 * max(
                (f + tau * n) / unit_s
                for t, counts in zip(tables, alone, strict=True)
                for f, tau, n in zip(t.fixed, t.tau, counts, strict=True)
            )
        for r, row in enumerate(rows):
            self._fill_row(r, row, tables, unit_s)
        return unit_s

    def _fill_row(self, r: int, row: Row, tables: Sequence[SlotTable], unit_s: float) -> None:
        """Set the Parameters of one of the user's limits."""
        time, count, step = self._rows[r]
        uses = [table.uses[r] for table in tables]
        if row.kind == "share":
            time.value = self._column([0.0] * len(tables))
            step.value = self._column([row.limit] * len(tables))
            count.value = self._grid(
                [
                    [-m / t.batch * reads for m, reads in zip(t.size, use.reads, strict=True)]
                    for t, use in zip(tables, uses, strict=True)
                ]
            )
            return
        unit_usd = unit_s * max(row.limit, *(use.usd_per_s for use in uses), 1e-12)
        time.value = self._column([(u.usd_per_s - row.limit) * unit_s / unit_usd for u in uses])
        step.value = self._column([use.step_usd / unit_usd for use in uses])
        count.value = self._grid(
            [
                [usd * m / unit_usd for usd, m in zip(u.usd_per_sample, t.size, strict=True)]
                for t, u in zip(tables, uses, strict=True)
            ]
        )
