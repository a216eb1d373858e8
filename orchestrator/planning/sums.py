"""Gradient sums between groups with different cuts: which there are, their time and cost."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from orchestrator.core.cluster import Device, Link, Team
from orchestrator.core.plan import Group, segments
from orchestrator.core.schedule import list_schedule
from orchestrator.planning.tables import LayerTables


class GradientSum(NamedTuple):
    """One ring all-reduce: of a segment's parameters, or of one tied parameter."""

    duration_s: float
    egress_usd: float
    owners: tuple[tuple[int, int], ...]  # (group, stage) of each owner


class GradientSums:
    """The sums a set of groups needs; rings are kept once computed.

    Source: docs/model.md, section 3.6.
    """

    def __init__(
        self,
        tables: LayerTables,
        link: Callable[[Team, Team], Link],
        device: Callable[[Team], Device],
    ) -> None:
        self._tables, self._link, self._device = tables, link, device
        self._rings: dict[tuple[tuple[str, ...], float], tuple[float, float]] = {}
        self._together: dict[tuple[tuple[tuple[str, ...], int], ...], tuple[float, float]] = {}

    def of(self, groups: Sequence[Group]) -> tuple[GradientSum, ...]:
        """Segments in layer order, then ties; what has a single owner needs no sum."""
        found: list[GradientSum] = []
        if len(groups) > 1:
            for segment in segments(groups):
                owners = tuple(enumerate(segment.owners))
                size_bytes = self._segment_bytes(
                    groups, segment.first_layer, segment.end_layer, owners
                )
                if size_bytes > 0:
                    found.append(self._sum(groups, owners, size_bytes))
        for layers, size_bytes in self._tables.ties:
            owners = tuple(
                (g, s)
                for g, group in enumerate(groups)
                for s, stage in enumerate(group.stages)
                if any(stage.first_layer <= layer < stage.end_layer for layer in layers)
            )
            if len(owners) > 1:
                found.append(self._sum(groups, owners, size_bytes))
        return tuple(found)

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

    def _segment_bytes(
        self,
        groups: Sequence[Group],
        first: int,
        end: int,
        owners: tuple[tuple[int, int], ...],
    ) -> float:
        teams = {groups[g].stages[s].team.size for g, s in owners}
        prefixes = [self._tables.sizes(size).param_bytes for size in teams]
        total = max(prefix[end] - prefix[first] for prefix in prefixes)
        for layers, size_bytes in self._tables.ties:
            total -= size_bytes * sum(first <= layer < end for layer in layers)
        return total

    def _sum(
        self, groups: Sequence[Group], owners: tuple[tuple[int, int], ...], size_bytes: float
    ) -> GradientSum:
        teams = [groups[g].stages[s].team for g, s in owners]
        key = (tuple(team.device_ids[0] for team in teams), size_bytes)
        if key not in self._rings:
            self._rings[key] = self._ring(teams, size_bytes)
        return GradientSum(*self._rings[key], owners)

    def _ring(self, teams: Sequence[Team], size_bytes: float) -> tuple[float, float]:
        order = sorted(teams, key=self._place)
        hops = [self._link(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True)]
        rounds, chunk = 2 * (len(order) - 1), size_bytes / len(order)
        slowest = min(hop.rate_bytes_per_s(chunk) for hop in hops)
        duration_s = rounds * (chunk / slowest + max(hop.latency_s for hop in hops))
        return duration_s, rounds * chunk * sum(hop.egress_usd_per_byte for hop in hops)

    def _place(self, team: Team) -> tuple[str, str, str]:
        device = self._device(team)
        return device.zone, device.node_id, device.device_id
