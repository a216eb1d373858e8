"""Gradient sums between groups with different cuts: which there are, their time and cost."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from orchestrator.core.cluster import ClusterState, Device, Link, Team
from orchestrator.core.plan import Group, Segment, segments
from orchestrator.core.schedule import list_schedule
from orchestrator.planning.tables import LayerTables

Owners = tuple[tuple[int, int], ...]
"""(group, stage) of each that holds the parameters."""


class Alike(NamedTuple):
    """For how many groups one stands, and the teams of two of them, stage by stage.

    ``first`` may lie elsewhere than the group itself: several sets of groups may be shown on
    the same devices, but their gradient sums pass through devices of each.
    """

    num_groups: int
    twin: tuple[Team, ...]
    first: tuple[Team, ...] = ()  # the group's own teams


class GradientSum(NamedTuple):
    """One ring all-reduce: of a segment's parameters, or of one tied parameter."""

    duration_s: float
    egress_usd: float
    owners: Owners


def list_sums(
    groups: Sequence[Group], tables: LayerTables, *, replicated: bool | None = None
) -> tuple[tuple[Owners, float], ...]:
    """Owners and bytes of every sum: segments without their ties in layer order, then ties.

    Bytes are those of a whole team: all that its members hold of the layers. What has a single
    owner needs no sum. ``replicated``: whether layers have several owners; None: when several
    groups are given.

    Source: docs/model.md, section 3.6.
    """
    found: list[tuple[Owners, float]] = []
    if replicated is None:
        replicated = len(groups) > 1
    if replicated:
        for segment in segments(groups):
            owners = tuple(enumerate(segment.owners))
            size_bytes = _segment_bytes(tables, segment)
            if size_bytes > 0:
                found.append((owners, size_bytes))
    for layers, size_bytes in tables.ties:
        owners = tuple(
            (g, s)
            for g, group in enumerate(groups)
            for s, stage in enumerate(group.stages)
            if any(layer in stage.layers for layer in layers)
        )
        if replicated or len(owners) > 1:
            found.append((owners, size_bytes))
    return tuple(found)


def ring_hops(devices: Iterable[Device]) -> tuple[tuple[Device, Device], ...]:
    """Who sends to whom in a ring all-reduce: ordered by zone, then by node."""
    order = sorted(devices, key=_ring_order)
    return tuple(zip(order, order[1:] + order[:1], strict=True))


_Member = tuple[str, str, int, int]
"""First and last device of a set of alike owners, how many they are, and their team size."""


class _Ring(NamedTuple):
    """What passes around a ring of owners has to do with."""

    num_members: int
    hops: tuple[tuple[Link, int], ...]  # unlike ones, and how many such links work side by side
    latency_s: float
    egress_usd_per_byte: float  # of all hops together
    exchanges: tuple[tuple[Link, int], ...]  # inside teams, and their sizes


class GradientSums:
    """The sums a set of groups needs; rings are kept once computed.

    Source: docs/model.md, section 3.6.
    """

    def __init__(self, tables: LayerTables, cluster: ClusterState) -> None:
        self._tables, self._cluster = tables, cluster
        self._rings: dict[tuple[_Member, ...], _Ring] = {}
        self._together: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def of(
        self, groups: Sequence[Group], alike: Sequence[Alike] | None = None
    ) -> tuple[GradientSum, ...]:
        """Every sum with its time and cost; see ``list_sums``.

        ``alike``: for how many groups each stands; None: for itself.
        """
        replicated = len(groups) > 1 or bool(alike and alike[0].num_groups > 1)
        return tuple(
            GradientSum(*self._ring(_links_of_ring(groups, alike, owners), size_bytes), owners)
            for owners, size_bytes in list_sums(groups, self._tables, replicated=replicated)
        )

    def together(
        self, groups: Sequence[Group], alike: Sequence[Alike] | None = None
    ) -> tuple[float, float]:
        """Seconds until the last sum ends when all may start at once, and egress in dollars."""
        return self._all_at_once(groups, alike)[:2]

    def balanced_s(self, groups: Sequence[Group], alike: Sequence[Alike] | None = None) -> float:
        """About how soon the last sum would end if cuts gave every stage as much to sum."""
        return self._all_at_once(groups, alike)[2]

    def _all_at_once(
        self, groups: Sequence[Group], alike: Sequence[Alike] | None
    ) -> tuple[float, float, float]:
        key: tuple[object, ...] = tuple(
            [(s.team.device_ids, s.first_layer) for g in groups for s in g.stages]
        )
        if alike:
            key = (key, *[(a.num_groups, *[t.device_ids[0] for t in a.first]) for a in alike])
        found = self._together.get(key)
        if found is None:
            sums = self.of(groups, alike)
            last_s = self.last_finish_s(groups, sums, [0.0] * len(sums))
            shortest = min(len(group.stages) for group in groups)
            found = self._together[key] = (
                last_s,
                sum(z.egress_usd for z in sums),
                sum(z.duration_s for z in sums) / shortest,
            )
        return found

    def even(
        self, chains: Sequence[tuple[tuple[Team, ...], Alike]], stage: int, stages: int
    ) -> tuple[float, float]:
        """Seconds and dollars of one of so many equal sums, of chains that have no cuts yet."""
        owners = [(alike.first or teams)[stage * len(teams) // stages] for teams, alike in chains]
        twins = [
            alike.twin[stage * len(teams) // stages] if alike.num_groups > 1 else owner
            for (teams, alike), owner in zip(chains, owners, strict=True)
        ]
        members = tuple(
            (owner.device_ids[0], twin.device_ids[0], alike.num_groups, owner.size)
            for owner, twin, (_, alike) in zip(owners, twins, chains, strict=True)
        )
        whole = self._tables.sizes(self._tables.smallest_team).param_bytes[-1]
        return self._ring(members, whole / stages)

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

    def _ring(self, members: tuple[_Member, ...], size_bytes: float) -> tuple[float, float]:
        """Duration and dollars of one sum: every hop carries each chunk twice but for one round."""
        ring = self._rings.get(members)
        if ring is None:
            ring = self._rings[members] = self._make_ring(members)
        rounds, chunk = 2 * (ring.num_members - 1), size_bytes / ring.num_members
        slowest_s = max([link.occupied_s(chunk / ways) for link, ways in ring.hops])
        duration_s = rounds * (slowest_s + ring.latency_s)
        if ring.exchanges:
            duration_s += max(
                link.occupied_s((size - 1) / size * size_bytes) for link, size in ring.exchanges
            )
        return duration_s, rounds * chunk * ring.egress_usd_per_byte

    def _make_ring(self, members: tuple[_Member, ...]) -> _Ring:
        """Inside a node each member of a team has a link of its own; between nodes all share one.

        Teams of unlike sizes exchange their parts first.
        """
        cluster = self._cluster
        ends = sorted(
            (
                (cluster.device(device), cluster.device(last), count, size)
                for device, last, count, size in members
            ),
            key=lambda end: _ring_order(end[0]),
        )
        hops: dict[tuple[int, int], Link] = {}
        egress_usd_per_byte = 0.0
        for (device, last, count, size), (following, _, _, next_size) in zip(
            ends, [*ends[1:], ends[0]], strict=True
        ):
            for source, target, narrow, times in (
                (device, last, size, count - 1),
                (last, following, min(size, next_size), 1),
            ):
                if times:
                    link = cluster.link(source, target)
                    hops[id(link), narrow if source.node_id == target.node_id else 1] = link
                    egress_usd_per_byte += times * link.egress_usd_per_byte
        unlike = len({size for *_, size in ends}) > 1
        return _Ring(
            num_members=sum(count for _, _, count, _ in members),
            hops=tuple((link, ways) for (_, ways), link in hops.items()),
            latency_s=max(link.latency_s for link in hops.values()),
            egress_usd_per_byte=egress_usd_per_byte,
            exchanges=tuple(
                dict.fromkeys(
                    (cluster.link(device, device), size)
                    for device, _, _, size in ends
                    if unlike and size > 1
                )
            ),
        )


def _links_of_ring(
    groups: Sequence[Group], alike: Sequence[Alike] | None, owners: Owners
) -> tuple[_Member, ...]:
    """Where the ring passes: first and last device, number and team size of alike owners."""
    found = []
    for g, s in owners:
        team = groups[g].stages[s].team
        if alike and alike[g].first:
            team = alike[g].first[s]
        first = last = team.device_ids[0]
        count = alike[g].num_groups if alike else 1
        if alike and count > 1:
            last = alike[g].twin[s].device_ids[0]
        found.append((first, last, count, team.size))
    return tuple(found)


def _ring_order(device: Device) -> tuple[str, str, str]:
    return device.zone, device.node_id, device.device_id


def _segment_bytes(tables: LayerTables, segment: Segment) -> float:
    first, end = segment.first_layer, segment.end_layer
    prefix = tables.sizes(tables.smallest_team).param_bytes
    total = prefix[end] - prefix[first]
    for layers, size_bytes in tables.ties:
        total -= size_bytes * sum(first <= layer < end for layer in layers)
    return total
