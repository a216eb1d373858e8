"""The user's linear limits: what of each a plan uses, and whether that is allowed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from orchestrator.core.budget import LimitOptions
from orchestrator.core.plan import Group
from orchestrator.core.slot import Candidate, StepEstimate
from orchestrator.planning.alike import AlikeSet, alike_sets
from orchestrator.planning.cost import CostModel

TOLERANCE = 1e-9
"""Relative; a plan at its limit obeys it whatever order its figures were added in."""


@dataclass(frozen=True, slots=True)
class Row:
    """One limit, per second of the run's clock.

    ``zone``: dollars spent there, egress that leaves it included. ``egress``: dollars of all
    traffic. ``share``: part of the batch whose samples enter on devices of the pool, at least.
    """

    kind: Literal["zone", "egress", "share"]
    where: str
    limit: float  # $/s, or a share

    @property
    def name(self) -> str:
        """For reports: what is limited."""
        return " ".join(word for word in (self.kind, self.where) if word)


_ALL_EGRESS = Row("egress", "", 0.0)


@dataclass(frozen=True, slots=True)
class RowUse:
    """What a plan uses of a row: ``usd_per_s * T + sum_a usd_per_sample[a] * x_a + step_usd``.

    x_a are the samples of a set of alike groups; ``reads``: which sets' samples count for a
    share.
    """

    usd_per_s: float
    usd_per_sample: tuple[float, ...]
    step_usd: float
    reads: tuple[bool, ...]


def make_rows(limits: Iterable[LimitOptions], *, billing_speedup: float = 1.0) -> tuple[Row, ...]:
    """The limits in dollars per second of the run's clock."""
    rows = []
    for limit in limits:
        if limit.pool is not None:
            rows.append(Row("share", limit.pool, limit.min_share or 0.0))
            continue
        usd_per_s = (limit.max_per_hour_usd or 0.0) * billing_speedup / 3600.0
        rows.append(Row("zone" if limit.zone else "egress", limit.zone or "", usd_per_s))
    return tuple(rows)


def sums_usd(cost: CostModel, sets: Sequence[AlikeSet], estimate: StepEstimate) -> float:
    """What the gradient sums of a step pay: all egress of a plan but that of its boundaries."""
    boundaries_usd = sum(
        _boundary_usd_per_sample(cost, each.group, _ALL_EGRESS) * each.num_samples for each in sets
    )
    return max(0.0, estimate.egress_usd_per_s * estimate.step_s - boundaries_usd)


def row_use(cost: CostModel, row: Row, sets: Sequence[AlikeSet], step_usd: float) -> RowUse:
    """How a plan's use of a row depends on its step time and on the samples of its groups.

    Egress of gradient sums counts half for either end, as every ring runs both ways.

    Args:
        cost: The slot's.
        row: The limit.
        sets: The plan's groups.
        step_usd: ``sums_usd`` of the plan.

    Source: docs/model.md, section 5.2.
    """
    if row.kind == "share":
        reads = tuple(_reads(cost, each, row.where) for each in sets)
        return RowUse(0.0, (0.0,) * len(sets), 0.0, reads)
    per_sample_A = tuple(_boundary_usd_per_sample(cost, each.group, row) for each in sets)
    nobody = (False,) * len(sets)
    if row.kind == "egress":
        return RowUse(0.0, per_sample_A, step_usd, nobody)
    zones = {cost.device(stage.team).zone for each in sets for stage in each.group.stages}
    part_usd = step_usd / len(zones) if row.where in zones else 0.0
    return RowUse(_zone_usd_per_s(cost, row.where, sets), per_sample_A, part_usd, nobody)


def _reads(cost: CostModel, each: AlikeSet, pool: str) -> bool:
    first = each.group.stages[0].team.device_ids
    return any(cost.problem.cluster.device(device_id).pool == pool for device_id in first)


def _zone_usd_per_s(cost: CostModel, zone: str, sets: Sequence[AlikeSet]) -> float:
    """Price of a zone's devices: those of the plan, and those billed while present."""
    cluster = cost.problem.cluster
    standing = {offer.pool for offer in cluster.offers if offer.billed == "while_present"}
    used = sum(
        each.count * cluster.price_usd_per_s(device_id)
        for each in sets
        for device_id in each.group.device_ids
        if cluster.device(device_id).zone == zone and cluster.device(device_id).pool not in standing
    )
    if not standing:
        return used
    return used + sum(
        cluster.price_usd_per_s(device.device_id)
        for device in cluster.devices
        if device.zone == zone and device.pool in standing
    )


def _boundary_usd_per_sample(cost: CostModel, group: Group, row: Row) -> float:
    """Egress of one sample's boundaries that counts in a row."""
    sizes = cost.problem.model.sizes[0].boundary_bytes_per_sample
    cluster, total = cost.problem.cluster, 0.0
    for upper, lower in pairwise(group.stages):
        for source, target in ((upper, lower), (lower, upper)):
            zone = cluster.device(source.team.device_ids[0]).zone
            if row.kind == "egress" or zone == row.where:
                per_byte = cost.link(source.team, target.team).egress_usd_per_byte
                total += per_byte * sizes[upper.end_layer - 1]
    return total


@dataclass(frozen=True, slots=True)
class Breach:
    """A row that a plan breaks. ``used``: in the row's unit, $/s or a share."""

    row: Row
    used: float

    @property
    def text(self) -> str:
        """Which limit, and by how much."""
        if self.row.kind == "share":
            return (
                f"{self.row.name}: {self.used:.1%} of the batch enter on its devices instead of "
                f"{self.row.limit:.1%}"
            )
        if not self.row.limit:
            return f"{self.row.name}: something is spent where nothing may be"
        return f"{self.row.name}: {self.used / self.row.limit:.4g} times its limit"


def breaches(cost: CostModel, rows: Sequence[Row], candidate: Candidate) -> tuple[Breach, ...]:
    """The rows that a plan breaks; idle has no share to keep."""
    groups, estimate = candidate.plan.groups, candidate.estimate
    sets = alike_sets(cost, groups) if rows else ()
    step_usd = sums_usd(cost, sets, estimate)
    found = []
    for row in rows:
        if row.kind == "share" and not groups:
            continue
        use = row_use(cost, row, sets, step_usd)
        if row.kind == "share":
            counted = sum(s.num_samples for s, reads in zip(sets, use.reads, strict=True) if reads)
            used = counted / cost.problem.batch_samples
            if used < row.limit * (1 - TOLERANCE):
                found.append(Breach(row, used))
            continue
        usd = use.step_usd + sum(
            per_sample * each.num_samples
            for per_sample, each in zip(use.usd_per_sample, sets, strict=True)
        )
        used = use.usd_per_s + (usd / estimate.step_s if groups else 0.0)
        if used > row.limit * (1 + TOLERANCE):
            found.append(Breach(row, used))
    return tuple(found)


def broken(cost: CostModel, rows: Sequence[Row], candidate: Candidate) -> Row | None:
    """The first row that a plan breaks, None when it obeys all; idle has no share to keep."""
    return next((breach.row for breach in breaches(cost, rows, candidate)), None)
