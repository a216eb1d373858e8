"""What one more dollar, microbatch, device or unit of a limit is worth beside the chosen plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.core.slot import Candidate
from orchestrator.planning.constraints import Row
from orchestrator.planning.continuous import best_fractional
from orchestrator.planning.cost import CostModel
from orchestrator.planning.extra import extra_groups
from orchestrator.planning.slot_table import SlotTable, slot_table

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

    def at(self, price_of_money_samples_per_usd: float) -> "MarginalValues":
        """The same rates at another price of money, for one so near that no plan changes."""
        price = price_of_money_samples_per_usd
        return replace(
            self,
            price_of_money_samples_per_usd=price,
            devices=tuple(
                replace(d, break_even_usd_per_s=d.samples_per_s / price if price > 0 else None)
                for d in self.devices
            ),
        )

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

    Shares may move freely and in fractions of a microbatch; the other groups and their cuts
    stay. One more microbatch, or one more device, is really added and the shares dealt anew; a
    device in the best of the ways that ``ExtraGroup`` names. Pools of which no device is
    present nor ``rentable``, and those whose devices could not be used, are left out.

    Args:
        cost: Of the problem whose V', Q and prices count.
        candidate: The plan that is best at these, idle apart.
        rows: The user's limits.

    Source: docs/model.md, section 5.2.
    """
    problem = cost.problem
    table = slot_table(cost, candidate, rows)
    base = best_fractional(table, rows)
    if base is None:
        return None
    batch = table.batch + problem.microbatch_samples
    grown = replace(table, batch=batch, worth=problem.penalty_weight * batch)
    if _room(grown) < batch:  # a lone group whose limit was the batch, or memory is full
        grown = slot_table(CostModel(replace(problem, batch_samples=batch)), candidate, rows)
    larger = best_fractional(grown, rows) if _room(grown) >= batch else None
    price = problem.price_of_money_samples_per_usd
    usd_per_sample = 1.0 / candidate.estimate.samples_per_usd
    worth: dict[str, float] = {}  # samples/s, by pool
    for extra in extra_groups(problem, candidate.plan, table, rows):
        found = best_fractional(extra.table, rows)
        gain = extra.part * (found.score - base.score) if found else 0.0
        worth[extra.pool] = max(worth.get(extra.pool, 0.0), gain / problem.penalty_weight)
    devices = [
        DeviceWorth(
            pool=pool,
            price_usd_per_s=problem.cluster.offer(pool).price_usd_per_s,
            samples_per_s=samples_per_s,
            break_even_usd_per_s=samples_per_s / price if price > 0 else None,
            same_cost_usd_per_s=samples_per_s * usd_per_sample,
        )
        for pool, samples_per_s in worth.items()
    ]
    return MarginalValues(
        price_of_money_samples_per_usd=price,
        microbatch_samples_per_s=(
            (larger.score - base.score) / problem.penalty_weight if larger else 0.0
        ),
        devices=tuple(devices),
        limits=base.limits,
    )


def _room(table: SlotTable) -> int:
    """The samples that all groups together may hold."""
    return sum(c * m * n for c, m, n in zip(table.count, table.size, table.cap, strict=True))
