"""What one more dollar, microbatch, device or unit of a limit is worth beside the chosen plan.

Shape letters: A sets of alike groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import OptimizeResult, linprog  # type: ignore[import-untyped]  # ships no types

from orchestrator.core.slot import Candidate
from orchestrator.planning.constraints import Row
from orchestrator.planning.cost import CostModel
from orchestrator.planning.extra import extra_groups
from orchestrator.planning.slot_table import SlotTable, slot_table

DUAL_TOLERANCE = 1e-9
"""Relative; shadow prices below this are those of rows that do not bind."""

PERCENT = 0.01
"""Of the batch: one more unit of a least share."""


@dataclass(frozen=True, slots=True)
class DeviceWorth:
    """What one more device of a pool is worth, beside the plan at hand.

    ``samples_per_s``: what it would add to the rate, its egress paid, its own price not; 0
    when the plan would leave it idle. ``break_even_usd_per_s``: renting it pays below this
    price; None: at any, as no dollar is short. ``same_cost_usd_per_s``: below this price it
    makes samples cheaper than they are now.
    """

    pool: str
    price_usd_per_s: float
    samples_per_s: float
    break_even_usd_per_s: float | None
    same_cost_usd_per_s: float


@dataclass(frozen=True, slots=True)
class MarginalValues:
    """What one more unit of each scarce thing is worth, in seconds of the run's clock.

    ``price_of_money_samples_per_usd``: samples that one more dollar of the average brings.
    ``microbatch_samples_per_s``: what a global batch larger by one microbatch of
    ``microbatch_samples`` adds to the rate, as fill, drain and gradient sums serve more samples.
    ``limits``: of each row that binds, samples per dollar of spending, or samples/s per unit
    of share (negative: a higher one costs that much).
    """

    price_of_money_samples_per_usd: float
    microbatch_samples_per_s: float
    devices: tuple[DeviceWorth, ...]
    limits: tuple[tuple[Row, float], ...]

    def named(self, per_hour: float) -> tuple[tuple[str, float], ...]:
        """The values under the names of the user's files, which docs/operations.md explains.

        Args:
            per_hour: Dollars per billed hour of one dollar per second of the run's clock.
        """
        usd = self.price_of_money_samples_per_usd / per_hour
        found = [
            ("budget_samples_per_s", usd),
            ("microbatch_samples_per_s", self.microbatch_samples_per_s),
        ]
        for d in self.devices:
            found.append((f"device_samples_per_s.{d.pool}", d.samples_per_s))
            if d.break_even_usd_per_s is not None:
                price = d.break_even_usd_per_s * per_hour
                found.append((f"device_break_even_per_hour_usd.{d.pool}", price))
            price = d.same_cost_usd_per_s * per_hour
            found.append((f"device_same_cost_per_hour_usd.{d.pool}", price))
        for row, value in self.limits:
            one = PERCENT if row.kind == "share" else 1.0 / per_hour
            where = f".{row.where}" if row.where else ""
            found.append((f"{row.kind}_samples_per_s{where}", value * one))
        return tuple(found)


def marginal_values(
    cost: CostModel, candidate: Candidate, rows: Sequence[Row]
) -> MarginalValues | None:
    """Marginal values of a plan that runs; None when its continuous form breaks a row.

    Shares may move freely and in fractions of a microbatch, groups and cuts stay. One more
    microbatch, or one more device, is really added and the shares dealt anew; a device as
    ``ExtraGroup`` says. Pools of which no device is present, and those whose devices could not
    be used, are left out.

    Args:
        cost: Of the problem whose V', Q and prices count.
        candidate: The plan that is best at these, idle apart.
        rows: The user's limits.

    Source: docs/model.md, section 5.2.
    """
    problem = cost.problem
    table = slot_table(cost, candidate, rows)
    base = _solve(table, rows)
    if base is None:
        return None
    grown = replace(
        table,
        batch=table.batch + problem.microbatch_samples,
        worth=problem.penalty_weight * (table.batch + problem.microbatch_samples),
    )
    larger = _solve(grown, rows)
    price = problem.price_of_money_samples_per_usd
    usd_per_sample = 1.0 / candidate.estimate.samples_per_usd
    devices = []
    for extra in extra_groups(problem, candidate.plan, table, rows):
        found = _solve(extra.table, rows)
        gain = max(0.0, found.score - base.score) if found else 0.0
        samples_per_s = extra.part * gain / problem.penalty_weight
        devices.append(
            DeviceWorth(
                pool=extra.pool,
                price_usd_per_s=problem.cluster.offer(extra.pool).price_usd_per_s,
                samples_per_s=samples_per_s,
                break_even_usd_per_s=samples_per_s / price if price > 0 else None,
                same_cost_usd_per_s=samples_per_s * usd_per_sample,
            )
        )
    return MarginalValues(
        price_of_money_samples_per_usd=price,
        microbatch_samples_per_s=(
            (larger.score - base.score) / problem.penalty_weight if larger else 0.0
        ),
        devices=tuple(devices),
        limits=base.limits,
    )


@dataclass(frozen=True, slots=True)
class _Optimum:
    """J of a table's continuous form, without the price of its devices; what rows cost."""

    score: float
    limits: tuple[tuple[Row, float], ...]


def _solve(table: SlotTable, rows: Sequence[Row]) -> _Optimum | None:
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
    solved = linprog(
        -gain / table.worth,
        A_ub=np.vstack([ends, least, most, *(line for line, _ in lines)]),
        b_ub=[*[1.0] * num_sets, *[0.0] * (2 * num_sets), *(bound for _, bound in lines)],
        A_eq=[[*[1.0] * num_sets, -1.0]],
        b_eq=[0.0],
        method="highs",
    )
    if solved.status != 0:
        return None
    unit_score = table.worth / unit_s
    return _Optimum(-solved.fun * unit_score, _limits(table, rows, solved, unit_s))


def _row_line(row: Row, r: int, table: SlotTable, unit_s: float) -> tuple[np.ndarray, float]:
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
    table: SlotTable, rows: Sequence[Row], solved: OptimizeResult, unit_s: float
) -> tuple[tuple[Row, float], ...]:
    """Shadow prices of the rows that bind, in samples per unit of each."""
    duals = -solved.ineqlin.marginals[3 * len(table.tau) :]
    found = []
    for r, (row, dual) in enumerate(zip(rows, duals, strict=True)):
        if abs(dual) <= DUAL_TOLERANCE:
            continue
        value = float(dual) * table.batch / unit_s
        if row.kind == "share":
            found.append((row, -value * float(solved.x[-1])))
        else:
            found.append((row, value / _unit_usd_per_s(row, table, r)))
    return tuple(found)
