"""Gradient sums between groups with different cuts: which there are, their time and cost."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from orchestrator.core.cluster import ClusterState, Device, Team
from orchestrator.core.plan import Group, Segment, segments
from orchestrator.core.schedule import list_schedule
from orchestrator.planning.tables import LayerTables

Owners = tuple[tuple[int, int], ...]
"""(group, stage) of each that holds the parameters."""


class GradientSum(NamedTuple):
    """One ring all-reduce: of a segment's parameters, or of one tied parameter."""

    duration_s: float
    egress_usd: float
    owners: Owners


def list_sums(groups: Sequence[Group], tables: LayerTables) -> tuple[tuple[Owners, float], ...]:
    """Owners and bytes of every sum: segments without their ties in layer order, then ties.

    What has a single owner needs no sum.

    Source: docs/model.md, section 3.6.
    """
    found: list[tuple[Owners, float]] = []
    if len(groups) > 1:
        for segment in segments(groups):
            owners = tuple(enumerate(segment.owners))
            size_bytes = _segment_bytes(groups, tables, segment, owners)
            if size_bytes > 0:
                found.append((owners, size_bytes))
    for layers, size_bytes in tables.ties:
        owners = tuple(
            (g, s)
            for g, group in enumerate(groups)
            for s, stage in enumerate(group.stages)
            if any(layer in stage.layers for layer in layers)
        )
        if len(owners) > 1:
            found.append((owners, size_bytes))
    return tuple(found)


def ring_hops(devices: Iterable[Device]) -> tuple[tuple[Device, Device], ...]:
    """Who sends to whom in a ring all-reduce: ordered by zone, then by node."""
    order = sorted(devices, key=lambda d: (d.zone, d.node_id, d.device_id))
    return tuple(zip(order, order[1:] + order[:1], strict=True))


class GradientSums:
    """The sums a set of groups needs; rings are kept once computed.

    Source: docs/model.md, section 3.6.
    """

    def __init__(self, tables: LayerTables, cluster: ClusterState) -> None:
        self._tables, self._cluster = tables, cluster
        self._rings: dict[tuple[tuple[str, ...], float], tuple[float, float]] = {}
        self._together: dict[tuple[tuple[tuple[str, ...], int], ...], tuple[float, float]] = {}

    def of(self, groups: Sequence[Group]) -> tuple[GradientSum, ...]:
        """Every sum with its time and cost; see ``list_sums``."""
        return tuple(
            self._sum(groups, owners, size_bytes)
            for owners, size_bytes in list_sums(groups, self._tables)
        )

    def together(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Seconds until the last sum ends when all may start at once, and egress in dollars."""
        key = tuple([(s.team.device_ids, s.first_layer) for g in groups for s in g.stages])
        found = self._together.get(key)
        if found is None:
            sums = self.of(groups)
            last_s = self.last_finish_s(groups, sums, [0.0] * len(sums))
            found = self._together[key] = (last_s, sum(z.egress_usd for z in sums))
        return found

    def last_finish_s(
        self,
        groups: Sequence[Group],
        sums: Sequence[GradientSum],
        release_s: Sequence[float],
    ) -> float:
        """When the last sum ends; each starts at its release or later. 0 without sums."""
        first_of = list(accumulate((len(g.stages) for g in groups), initial=0))
        finish_s = list_schedule(
            release_s,
            [z.duration_s for z in sums],
            [[first_of[g] + s for g, s in z.owners] for z in sums],
        )
        return max(finish_s, default=0.0)

    def _sum(self, groups: Sequence[Group], owners: Owners, size_bytes: float) -> GradientSum:
        teams = [groups[g].stages[s].team for g, s in owners]
        key = (tuple(team.device_ids[0] for team in teams), size_bytes)
        if key not in self._rings:
            self._rings[key] = self._ring(teams, size_bytes)
        return GradientSum(*self._rings[key], owners)

    def _ring(self, teams: Sequence[Team], size_bytes: float) -> tuple[float, float]:
        devices = [self._cluster.device(team.device_ids[0]) for team in teams]
        hops = [self._cluster.link(*ends) for ends in ring_hops(devices)]
        rounds, chunk = 2 * (len(hops) - 1), size_bytes / len(hops)
        slowest = min(hop.rate_bytes_per_s(chunk) for hop in hops)
        duration_s = rounds * (chunk / slowest + max(hop.latency_s for hop in hops))
        return duration_s, rounds * chunk * sum(hop.egress_usd_per_byte for hop in hops)


def _segment_bytes(
    groups: Sequence[Group], tables: LayerTables, segment: Segment, owners: Owners
) -> float:
    first, end = segment.first_layer, segment.end_layer
    teams = {groups[g].stages[s].team.size for g, s in owners}
    prefixes = [tables.sizes(size).param_bytes for size in teams]
    total = max(prefix[end] - prefix[first] for prefix in prefixes)
    for layers, size_bytes in tables.ties:
        total -= size_bytes * sum(first <= layer < end for layer in layers)
    return total
