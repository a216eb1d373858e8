"""The user's linear limits: what of each a plan uses, and whether that is allowed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from orchestrator.core.plan import Group
from orchestrator.core.slot import Candidate, StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.queues import LimitOptions

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


@dataclass(frozen=True, slots=True)
class RowUse:
    """What a plan uses of a row: ``usd_per_s * T + sum_g usd_per_sample[g] * x_g + step_usd``.

    ``reads``: which groups' samples count for a share.
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


def row_use(cost: CostModel, row: Row, groups: Sequence[Group], estimate: StepEstimate) -> RowUse:
    """How a plan's use of a row depends on its step time and on the samples of its groups.

    Egress of gradient sums counts half for either end, as every ring runs both ways.

    Source: docs/model.md, section 5.2.
    """
    cluster = cost.problem.cluster
    per_sample_G = tuple(_boundary_usd_per_sample(cost, group, row) for group in groups)
    all_G = [_boundary_usd_per_sample(cost, group, Row("egress", "", 0.0)) for group in groups]
    sums_usd = estimate.egress_usd_per_s * estimate.step_s - sum(
        usd * group.num_samples for usd, group in zip(all_G, groups, strict=True)
    )
    used = {device_id for group in groups for device_id in group.device_ids}
    zones = {cluster.device(device_id).zone for device_id in used}
    usd_per_s = step_usd = 0.0
    if row.kind == "zone":
        usd_per_s = sum(
            cluster.price_usd_per_s(device.device_id)
            for device in cluster.devices
            if device.zone == row.where
            and (device.device_id in used or cluster.offer(device.pool).billed == "while_present")
        )
        step_usd = sums_usd / len(zones) if row.where in zones else 0.0
    elif row.kind == "egress":
        step_usd = sums_usd
    reads = tuple(
        any(
            cluster.device(device_id).pool == row.where
            for device_id in group.stages[0].team.device_ids
        )
        for group in groups
    )
    return RowUse(usd_per_s, per_sample_G, max(0.0, step_usd), reads)


def _boundary_usd_per_sample(cost: CostModel, group: Group, row: Row) -> float:
    """Egress of one sample's boundaries that counts in a row."""
    if row.kind == "share":
        return 0.0
    sizes = cost.problem.model.sizes[0].boundary_bytes_per_sample
    cluster, total = cost.problem.cluster, 0.0
    for upper, lower in pairwise(group.stages):
        for source, target in ((upper, lower), (lower, upper)):
            zone = cluster.device(source.team.device_ids[0]).zone
            if row.kind == "egress" or zone == row.where:
                per_byte = cost.link(source.team, target.team).egress_usd_per_byte
                total += per_byte * sizes[upper.end_layer - 1]
    return total


def broken(cost: CostModel, rows: Iterable[Row], candidate: Candidate) -> Row | None:
    """The first row that a plan breaks, None when it obeys all; idle has no share to keep."""
    groups, estimate = candidate.plan.groups, candidate.estimate
    for row in rows:
        if row.kind == "share" and not groups:
            continue
        use = row_use(cost, row, groups, estimate)
        if row.kind == "share":
            counted = (g.num_samples for g, reads in zip(groups, use.reads, strict=True) if reads)
            if sum(counted) < row.limit * cost.problem.batch_samples * (1 - TOLERANCE):
                return row
            continue
        usd = use.step_usd + sum(
            per_sample * group.num_samples
            for per_sample, group in zip(use.usd_per_sample, groups, strict=True)
        )
        rate = use.usd_per_s + (usd / estimate.step_s if groups else 0.0)
        if rate > row.limit * (1 + TOLERANCE):
            return row
    return None
