"""The continuous form of a candidate: its best J with fractional shares, and what limits cost.

Shape letters: A sets of alike groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from orchestrator.planning.constraints import Row
from orchestrator.planning.slot_table import SlotTable

FloatArray = NDArray[np.float64]

DUAL_TOLERANCE = 1e-9
"""Relative; shadow prices below this are those of rows that do not bind."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """J of a table's continuous form, without the price of its devices; what rows cost."""

    score: float
    limits: tuple[tuple[Row, float], ...]


def best_fractional(table: SlotTable, rows: Sequence[Row]) -> Optimum | None:
    """Best J of fractional shares: linear after Charnes and Cooper, with u = 1/T and z = n/T.

    Variables: of every set the part of the batch it has, times u, then u. Times are in units
    of the shortest step of one microbatch and J in V' X per unit, which keeps all near 1.
    """
    tau, fixed = np.array(table.tau), np.array(table.fixed)
    count, size = np.array(table.count), np.array(table.size)
    unit_s = float((fixed + tau).min())
    num_sets = len(tau)
    one = count * size / table.batch  # part of the batch when every group has one microbatch
    diagonal = np.eye(num_sets)
    ends = np.column_stack([diagonal * (tau / unit_s / one), fixed / unit_s])
    least = np.column_stack([-diagonal, one / size])  # a sample each
    most = np.column_stack([diagonal, -one * np.array(table.cap)])
    lines = [_row_line(row, r, table, unit_s) for r, row in enumerate(rows)]
    gain = -table.backlog_usd * np.array([*(table.batch * np.array(table.usd) / size), 0.0])
    gain[-1] = table.worth - table.backlog_usd * table.step_usd
    solved = _solve(
        cost=-gain / table.worth,
        lines=np.vstack(
            [ends, least, most, *(line for line, _ in lines), [*[1.0] * num_sets, -1.0]]
        ),
        most=[*[1.0] * num_sets, *[0.0] * (2 * num_sets), *(bound for _, bound in lines), 0.0],
    )
    if solved is None:
        return None
    unit_score = table.worth / unit_s
    limits = _limits(table, rows, solved, unit_s)
    return Optimum(-float(solved.cost) * unit_score, limits)


class _Solved(NamedTuple):
    """Of a linear program: least cost, variables, and what more on the right of a line costs."""

    cost: float
    values: FloatArray
    duals: FloatArray


def _solve(cost: FloatArray, lines: FloatArray, most: Sequence[float]) -> _Solved | None:
    """``min cost x, lines x <= most, x >= 0``, the last line an equation; None: no answer.

    HiGHS is called directly: a slot solves half a dozen, and any wrapper takes longer than it.
    """
    num_lines, num_values = lines.shape
    line_of, place = np.nonzero(lines)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = num_values, num_lines
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = np.zeros(num_values), np.full(num_values, np.inf)
    program.row_lower_ = np.array([*[-np.inf] * (num_lines - 1), most[-1]])
    program.row_upper_ = np.array(most)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.searchsorted(line_of, np.arange(num_lines + 1)).astype(np.int32)
    program.a_matrix_.index_ = place.astype(np.int32)
    program.a_matrix_.value_ = lines[line_of, place]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # its constructor has no types
    solver.setOptionValue("output_flag", False)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found = solver.getSolution()
    return _Solved(
        solver.getInfo().objective_function_value,
        np.array(found.col_value),
        np.array(found.row_dual),
    )


def _row_line(row: Row, r: int, table: SlotTable, unit_s: float) -> tuple[FloatArray, float]:
    """Coefficients of a row and its bound; dollars in units of the row's limit."""
    use = table.uses[r]
    if row.kind == "share":
        return np.array([*(-1.0 * reads for reads in use.reads), row.limit]), 0.0
    unit_usd = unit_s * _unit_usd_per_s(row, table, r)
    line = [usd * table.batch / unit_usd for usd in use.usd_per_sample]
    bound = (row.limit - use.usd_per_s) * unit_s / unit_usd
    return np.array([*line, use.step_usd / unit_usd]), bound


def _unit_usd_per_s(row: Row, table: SlotTable, r: int) -> float:
    return max(row.limit, table.uses[r].usd_per_s, 1e-12)


def _limits(
    table: SlotTable, rows: Sequence[Row], solved: _Solved, unit_s: float
) -> tuple[tuple[Row, float], ...]:
    """Shadow prices of the rows that bind, in samples per unit of each."""
    duals = -solved.duals[3 * len(table.tau) : -1]
    found = []
    for r, (row, dual) in enumerate(zip(rows, duals, strict=True)):
        if abs(dual) <= DUAL_TOLERANCE:
            continue
        value = float(dual) * table.batch / unit_s
        if row.kind == "share":
            found.append((row, -value * float(solved.values[-1])))
        else:
            found.append((row, value / _unit_usd_per_s(row, table, r)))
    return tuple(found)
