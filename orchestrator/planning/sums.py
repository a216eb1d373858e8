"""Gradient sums between groups with different cuts: which there are, their time and cost."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from orchestrator.core.cluster import ClusterState, Device, Link, Team
from orchestrator.core.plan import Group, Segment, Stage, segments
from orchestrator.core.schedule import list_schedule
from orchestrator.planning.fading import Fading, Memories
from orchestrator.planning.identity import MAX_KEPT, ByIdentity
from orchestrator.planning.tables import LayerTables

Owners = tuple[tuple[int, int], ...]
"""(group, stage) of each that holds the parameters."""


class Alike(NamedTuple):
    """For how many groups one stands, and the teams of two of them, stage by stage.

    ``first`` may lie elsewhere than the group itself: several sets of groups may be shown on
    the same devices, but their gradient sums pass through devices of each. ``second`` is the
    same where there is one group only.
    """

    num_groups: int
    first: tuple[Team, ...]
    second: tuple[Team, ...]


def alone(stages: Sequence[Stage]) -> Alike:
    """A group that stands for itself."""
    teams = tuple([stage.team for stage in stages])
    return Alike(1, teams, teams)


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


class _Member(NamedTuple):
    """Alike owners of a sum, by where the ring reaches the first of them and leaves the last."""

    order: tuple[str, str, str]
    first: Device
    last: Device
    num_groups: int
    team_size: int


class _Row(NamedTuple):
    """The members of every stage of a group, and the number that such rows share."""

    members: tuple[int, ...]
    number: int
    alike: Alike  # whose it is, kept as long as it is found by which object that is


class _Ring(NamedTuple):
    """What passes around a ring of owners has to do with."""

    num_members: int
    hops: tuple[tuple[Link, int], ...]  # unlike ones, and how many such links work side by side
    latency_s: float
    egress_usd_per_byte: float  # of all hops together
    exchanges: tuple[tuple[Link, int], ...]  # inside teams, and their sizes


class _Sums(NamedTuple):
    """All sums of a set of groups; those cut alike are one pattern, as they wait for the same."""

    members: tuple[tuple[int, ...], ...]  # of each pattern
    found: tuple[GradientSum, ...]  # owners are (pattern, stage)
    together_s: float  # until the last one ends when all may start at once
    egress_usd: float
    balanced_s: float  # about together_s if cuts gave every stage as much to sum


class GradientSums:
    """The sums a set of groups needs; kept once computed.

    Source: docs/model.md, section 3.6.
    """

    def __init__(self, tables: LayerTables, cluster: ClusterState) -> None:
        self._tables, self._cluster = tables, cluster
        self._members: list[_Member] = []
        self._numbers: dict[tuple[object, ...], int] = {}  # of members
        self._row_numbers: dict[tuple[int, ...], int] = {}
        self._cut_numbers: dict[tuple[int, ...], int] = {}
        self._memories = Memories()
        self._rings: Fading[tuple[int, ...], _Ring] = self._memories.new()
        self._costs: Fading[tuple[tuple[int, ...], float], tuple[float, float]]
        self._costs = self._memories.new()
        self._known: Fading[tuple[int, ...], _Sums] = self._memories.new()
        self._meet_anew()

    def _meet_anew(self) -> None:
        """Know no groups and teams as the objects that they are."""
        self._rows: dict[tuple[int, int, int], _Row] = {}  # by ids
        self._cuts: ByIdentity[tuple[Stage, ...], int] = ByIdentity()  # numbers of stages
        self._alone = ByIdentity[tuple[Stage, ...], Alike]()

    def following(self) -> "GradientSums":
        """The sums of a problem with the same devices and links, whose groups are other objects."""
        self._memories.follow()
        other = copy(self)
        other._meet_anew()
        return other

    def together(
        self, groups: Sequence[Group], alike: Sequence[Alike] | None = None
    ) -> tuple[float, float]:
        """Seconds until the last sum ends when all may start at once, and egress in dollars.

        ``alike``: for how many groups each stands; None: for itself.
        """
        sums = self._of(groups, alike)
        return sums.together_s, sums.egress_usd

    def balanced_s(self, groups: Sequence[Group], alike: Sequence[Alike] | None = None) -> float:
        """About how soon the last sum would end if cuts gave every stage as much to sum."""
        return self._of(groups, alike).balanced_s

    def even(
        self, chains: Sequence[tuple[object, Alike]], stage: int, stages: int
    ) -> tuple[float, float]:
        """Seconds and dollars of one of so many equal sums, of chains that have no cuts yet."""
        rows = self._rows_of([alike for _, alike in chains])
        members = tuple([m[stage * len(m) // stages] for m, _, _ in rows])
        sizes = self._tables.sizes(self._tables.smallest_team)
        whole = sizes.param_bytes[-1] - sizes.frozen_bytes[-1]
        return self._ring(members, whole / stages)

    def finish(
        self,
        groups: Sequence[Group],
        alike: Sequence[Alike] | None,
        ends_s: Sequence[Sequence[float]],
    ) -> tuple[float, float]:
        """When the last sum ends, 0 without sums, and egress in dollars.

        ``ends_s``: per group and stage, when its last backward ends; a sum starts when its
        owners' are done.
        """
        sums = self._of(groups, alike)
        ends_P = [
            ends_s[members[0]]
            if len(members) == 1
            else [max(ends) for ends in zip(*[ends_s[g] for g in members], strict=True)]
            for members in sums.members
        ]
        release_s = [max([ends_P[p][s] for p, s in z.owners]) for z in sums.found]
        return _last_finish_s(sums.found, release_s), sums.egress_usd

    def _of(self, groups: Sequence[Group], alike: Sequence[Alike] | None) -> _Sums:
        if alike is None:
            alike = [self._alone.of(group.stages, alone) for group in groups]
        cuts_G = [self._cuts.of(group.stages, self._cut_number) for group in groups]
        rows_G = self._rows_of(alike)
        key = (*cuts_G, *[row.number for row in rows_G])
        found = self._known[key]
        if found is None:
            found = self._known[key] = self._build(groups, cuts_G, rows_G, alike)
        return found

    def _cut_number(self, stages: tuple[Stage, ...]) -> int:
        """A number that groups share when they are cut alike."""
        cuts = tuple([stage.end_layer for stage in stages])
        return self._cut_numbers.setdefault(cuts, len(self._cut_numbers))

    def _build(
        self,
        groups: Sequence[Group],
        cuts_G: Sequence[int],
        rows_G: Sequence[_Row],
        alike: Sequence[Alike],
    ) -> _Sums:
        patterns: dict[int, list[int]] = {}
        for g, number in enumerate(cuts_G):
            patterns.setdefault(number, []).append(g)
        groups_P = tuple(map(tuple, patterns.values()))
        replicated = len(groups) > 1 or alike[0].num_groups > 1
        listed = list_sums([groups[p[0]] for p in groups_P], self._tables, replicated=replicated)
        found = []
        for owners, size_bytes in listed:
            members = tuple([rows_G[g].members[s] for p, s in owners for g in groups_P[p]])
            found.append(GradientSum(*self._ring(members, size_bytes), owners))
        return _Sums(
            groups_P,
            tuple(found),
            _last_finish_s(found, [0.0] * len(found)),
            sum([z.egress_usd for z in found]),
            sum([z.duration_s for z in found]) / min([len(group.stages) for group in groups]),
        )

    def _rows_of(self, alike: Iterable[Alike]) -> list[_Row]:
        """Of each a number for the members of every stage."""
        if len(self._rows) >= MAX_KEPT:
            self._rows.clear()
        return [self._row(one) for one in alike]

    def _row(self, alike: Alike) -> _Row:
        key = (id(alike.first), id(alike.second), alike.num_groups)
        known = self._rows.get(key)
        if known is None:
            row: list[int] = []
            for first, second in zip(alike.first, alike.second, strict=True):
                ends = (first.device_ids[0], second.device_ids[0] if alike.num_groups > 1 else "")
                figures = (*ends, alike.num_groups, first.size)
                number = self._numbers.setdefault(figures, len(self._members))
                if number == len(self._members):
                    one = self._cluster.device(ends[0])
                    last = self._cluster.device(ends[1]) if ends[1] else one
                    self._members.append(
                        _Member(_ring_order(one), one, last, alike.num_groups, first.size)
                    )
                row.append(number)
            members = tuple(row)
            number = self._row_numbers.setdefault(members, len(self._row_numbers))
            known = self._rows[key] = _Row(members, number, alike)
        return known

    def _ring(self, members: tuple[int, ...], size_bytes: float) -> tuple[float, float]:
        """Duration and dollars of one sum: every hop carries each chunk twice but for one round."""
        key = (members, size_bytes)
        found = self._costs[key]
        if found is None:
            found = self._costs[key] = self._ring_costs(members, size_bytes)
        return found

    def _ring_costs(self, members: tuple[int, ...], size_bytes: float) -> tuple[float, float]:
        ring = self._rings[members]
        if ring is None:
            ring = self._rings[members] = self._make_ring([self._members[m] for m in members])
        rounds, chunk = 2 * (ring.num_members - 1), size_bytes / ring.num_members
        slowest_s = max([link.occupied_s(chunk / ways) for link, ways in ring.hops])
        duration_s = rounds * (slowest_s + ring.latency_s)
        if ring.exchanges:
            duration_s += max(
                link.occupied_s((size - 1) / size * size_bytes) for link, size in ring.exchanges
            )
        return duration_s, rounds * chunk * ring.egress_usd_per_byte

    def _make_ring(self, members: Iterable[_Member]) -> _Ring:
        """Inside a node each member of a team has a link of its own; between nodes all share one.

        Teams of unlike sizes exchange their parts first.
        """
        cluster = self._cluster
        ends = sorted(members, key=lambda one: one.order)
        hops: dict[tuple[int, int], Link] = {}
        egress_usd_per_byte = 0.0
        for (_, device, last, count, size), (_, following, _, _, next_size) in zip(
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
        unlike = len({one.team_size for one in ends}) > 1
        return _Ring(
            num_members=sum([one.num_groups for one in ends]),
            hops=tuple((link, ways) for (_, ways), link in hops.items()),
            latency_s=max([link.latency_s for link in hops.values()]),
            egress_usd_per_byte=egress_usd_per_byte,
            exchanges=tuple(
                dict.fromkeys(
                    (cluster.link(one.first, one.first), one.team_size)
                    for one in ends
                    if unlike and one.team_size > 1
                )
            ),
        )


def _last_finish_s(sums: Sequence[GradientSum], release_s: Sequence[float]) -> float:
    """When the last sum ends; each starts at its release or later, one at a time per owner."""
    finish_s = list_schedule(release_s, [z.duration_s for z in sums], [z.owners for z in sums])
    return max(finish_s, default=0.0)


def _ring_order(device: Device) -> tuple[str, str, str]:
    return device.zone, device.node_id, device.device_id


def _segment_bytes(tables: LayerTables, segment: Segment) -> float:
    first, end = segment.first_layer, segment.end_layer
    prefix = tables.sizes(tables.smallest_team).param_bytes
    total = prefix[end] - prefix[first] - tables.frozen_bytes(tables.smallest_team, first, end)
    for layers, size_bytes in tables.ties:
        total -= size_bytes * sum(first <= layer < end for layer in layers)
    return total
