"""Tentative groupings of devices: an order that names cannot influence, first guesses, moves."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from orchestrator.core.cluster import ClusterState, Device, Link, Team, make_team
from orchestrator.core.plan import Plan

Chain = tuple[int, ...]
"""Device indices of one group, in stage order."""

Grouping = tuple[Chain, ...]
"""Chains that share no device. Devices in none are idle; no chains: everything is idle."""

MAX_NEIGHBOURS = 150
"""Moves tried from one grouping; more are sampled."""


class Roster:
    """The devices of a cluster, numbered by what they are, and which of them are interchangeable.

    Devices of one node with equal figures are alike. Two nodes are alike when swapping them
    leaves every link and every figure as it was. Groupings that differ only by a swap of alike
    devices have one canonical form, so that the search meets each once.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        nodes: dict[str, list[Device]] = {}
        for device in cluster.devices:
            nodes.setdefault(device.node_id, []).append(device)
        members = [sorted(node, key=self._figures) for node in nodes.values()]
        members.sort(key=self._node_key)
        self.devices: tuple[Device, ...] = tuple(device for node in members for device in node)
        self.teams: tuple[Team, ...] = tuple(make_team([device]) for device in self.devices)
        self._index_of = {device.device_id: i for i, device in enumerate(self.devices)}
        self._node_of = [n for n, node in enumerate(members) for _ in node]
        self._near: dict[Grouping, tuple[Grouping, ...]] = {}
        self._canonical: dict[Grouping, Grouping] = {}
        self._classes(members)

    def _figures(self, device: Device) -> tuple[object, ...]:
        offer = self._cluster.offer(device.pool)
        return (
            device.zone, device.kind, device.slowdown, device.memory_bytes, offer.price_usd_per_s,
            offer.billed, offer.spot, offer.minimum_s, offer.quantum_s,
            offer.max_price_usd_per_s or 0.0,
        )  # fmt: skip

    def _path(self, source: Device, target: Device) -> tuple[object, ...]:
        """Figures of a link without the names of its ends; empty when nobody described it."""
        try:
            link: Link = self._cluster.link(source, target)
        except ValueError:
            return ()
        return (
            link.latency_s, link.bandwidth_bytes_per_s, link.egress_usd_per_byte, link.points,
        )  # fmt: skip

    def _node_key(self, node: Sequence[Device]) -> tuple[object, ...]:
        paths = sorted(self._path(node[0], other) for other in self._cluster.devices)
        return [self._figures(d) for d in node], paths, node[0].node_id

    def _classes(self, members: Sequence[Sequence[Device]]) -> None:
        """Number the classes of alike nodes and, inside a node, of alike devices."""
        self._node_class: list[int] = []
        for n in range(len(members)):
            alike = (k for k in range(n) if self._swappable(members, k, n))
            self._node_class.append(next((self._node_class[k] for k in alike), n))
        self._nodes_of_class: dict[int, list[int]] = {}
        for n, node_class in enumerate(self._node_class):
            self._nodes_of_class.setdefault(node_class, []).append(n)
        numbers: dict[tuple[int, tuple[object, ...]], int] = {}
        self._device_class: list[int] = []
        self._kin: dict[tuple[int, int], list[int]] = {}
        for i, device in enumerate(self.devices):
            node = self._node_of[i]
            key = (self._node_class[node], self._figures(device))
            self._device_class.append(numbers.setdefault(key, len(numbers)))
            self._kin.setdefault((node, self._device_class[i]), []).append(i)

    def _swappable(self, members: Sequence[Sequence[Device]], k: int, n: int) -> bool:
        one, two = members[k], members[n]
        if [self._figures(d) for d in one] != [self._figures(d) for d in two]:
            return False
        a, b = one[0], two[0]
        if self._path(a, a) != self._path(b, b) or self._path(a, b) != self._path(b, a):
            return False
        others = [node[0] for m, node in enumerate(members) if m not in (k, n)]
        return all(
            self._path(a, c) == self._path(b, c) and self._path(c, a) == self._path(c, b)
            for c in others
        )

    def canonical(self, grouping: Grouping) -> Grouping:
        """The same grouping on the first of each set of alike devices, chains in order."""
        found = self._canonical.get(grouping)
        if found is None:
            found = self._canonical[grouping] = self._relabelled(grouping)
        return found

    def _relabelled(self, grouping: Grouping) -> Grouping:
        kind = self._device_class
        order = sorted(grouping, key=lambda chain: ([kind[d] for d in chain], chain))
        node_to: dict[int, int] = {}
        taken_nodes: set[int] = set()
        device_to: dict[int, int] = {}
        taken: set[int] = set()
        for device in (d for chain in order for d in chain):
            node = self._node_of[device]
            if node not in node_to:
                alike = self._nodes_of_class[self._node_class[node]]
                node_to[node] = next(n for n in alike if n not in taken_nodes)
                taken_nodes.add(node_to[node])
            kin = self._kin[node_to[node], kind[device]]
            device_to[device] = next(d for d in kin if d not in taken)
            taken.add(device_to[device])
        return tuple(sorted(tuple(device_to[d] for d in chain) for chain in order))

    def one_move_away(self, grouping: Grouping) -> tuple[Grouping, ...]:
        """Groupings that differ by one move, not canonical."""
        found = self._near.get(grouping)
        if found is None:
            found = self._near[grouping] = (
                *_with_unused(grouping, self.unused(grouping)),
                *_without(grouping),
                *_moved(grouping),
                *_reshaped(grouping),
            )
        return found

    def of_plan(self, plan: Plan) -> Grouping | None:
        """The grouping of a plan; None when a device has left or a team has several."""
        chains = []
        for group in plan.groups:
            if any(d not in self._index_of for d in group.device_ids):
                return None
            if any(stage.team.size > 1 for stage in group.stages):
                return None
            chains.append(tuple(self._index_of[d] for d in group.device_ids))
        return tuple(sorted(chains))

    def aligned(
        self, wanted: Sequence[Sequence[tuple[int, range]]], held: Mapping[str, tuple[int, range]]
    ) -> dict[int, int]:
        """Swap alike devices so that layers, and then partners, stay where they are.

        Args:
            wanted: Devices and their layers, group by group.
            held: Group and layers of each device, by id, that is in use now.

        Returns:
            For each device of ``wanted`` the one that takes its place.
        """
        found: dict[int, int] = {}
        node_to: dict[int, int] = {}
        for group in wanted:
            partners: set[int] = set()  # groups that hold the ones chosen so far
            for device, layers in group:
                best = max(
                    self._stand_ins(device, node_to, set(found.values())),
                    key=lambda other: (
                        self._stays(held.get(self.devices[other].device_id), layers, partners),
                        other == device,
                        -other,
                    ),
                )
                found[device] = best
                node_to[self._node_of[device]] = self._node_of[best]
                if here := held.get(self.devices[best].device_id):
                    partners.add(here[0])
        return found

    def _stand_ins(self, device: int, node_to: Mapping[int, int], taken: set[int]) -> list[int]:
        """Free devices that may take a device's place, given where its node's others went."""
        node, kind = self._node_of[device], self._device_class[device]
        nodes = [node_to[node]] if node in node_to else []
        if not nodes:
            alike = self._nodes_of_class[self._node_class[node]]
            nodes = [n for n in alike if n not in node_to.values()]
        return [d for n in nodes for d in self._kin[n, kind] if d not in taken]

    def _stays(
        self, here: tuple[int, range] | None, layers: range, partners: set[int]
    ) -> tuple[int, bool, bool]:
        """Layers that need not move, and whether a device works on, with its partners or at all."""
        if here is None:
            return 0, False, False
        return len(set(here[1]) & set(layers)), here[0] in partners, True

    def unused(self, grouping: Grouping) -> list[int]:
        """Idle devices, one of each set that is alike for this grouping."""
        used = {d for chain in grouping for d in chain}
        seen: set[tuple[bool, int, int]] = set()
        found = []
        for device, kind in enumerate(self._device_class):
            if device in used:
                continue
            node = self._node_of[device]
            touched = any(self._node_of[d] == node for d in used)
            key = (touched, node if touched else self._node_class[node], kind)
            if key not in seen:
                seen.add(key)
                found.append(device)
        return found


def seeds(roster: Roster, seconds_per_sample: Sequence[float]) -> list[Grouping]:
    """First guesses: data parallel on the fastest devices, chains, single devices.

    Args:
        roster: The devices.
        seconds_per_sample: Of the whole model on each device.
    """
    fastest = sorted(range(len(roster.devices)), key=lambda d: (seconds_per_sample[d], d))
    zones: dict[str, list[int]] = {}
    for device in fastest:
        zones.setdefault(roster.devices[device].zone, []).append(device)
    found: list[Grouping] = [(tuple(fastest),), tuple(tuple(chain) for chain in zones.values())]
    found += [(tuple(chain),) for chain in zones.values()]
    found += [tuple((d,) for d in fastest[:count]) for count in range(len(fastest), 0, -1)]
    found += [((d,),) for d in fastest]
    return list(dict.fromkeys(roster.canonical(guess) for guess in found))


def neighbours(
    roster: Roster, grouping: Grouping, longest: int, rng: np.random.Generator
) -> Iterator[Grouping]:
    """Groupings one move away, in random order, at most ``MAX_NEIGHBOURS``; canonical, no doubles.

    Moves: add, drop, replace, relocate, swap, reverse, merge, split (docs/model.md, section 5.4).

    Args:
        roster: The devices.
        grouping: Where to start, canonical.
        longest: Most stages of a chain: the number of layers.
        rng: Decides the order.
    """
    raw = roster.one_move_away(grouping)
    seen = {grouping}
    for index in rng.permutation(len(raw))[:MAX_NEIGHBOURS]:
        near = roster.canonical(raw[index])
        if near not in seen and max((len(chain) for chain in near), default=0) <= longest:
            seen.add(near)
            yield near


def _put(grouping: Grouping, changes: Mapping[int, Chain], *new: Chain) -> Grouping:
    """The grouping with some chains changed; an empty chain vanishes."""
    kept = [changes.get(g, chain) for g, chain in enumerate(grouping)]
    return tuple(chain for chain in (*kept, *new) if chain)


def _with_unused(grouping: Grouping, unused: Sequence[int]) -> Iterator[Grouping]:
    for device in unused:
        yield _put(grouping, {}, (device,))
        for g, chain in enumerate(grouping):
            for p in range(len(chain) + 1):
                yield _put(grouping, {g: (*chain[:p], device, *chain[p:])})
            for p in range(len(chain)):
                yield _put(grouping, {g: (*chain[:p], device, *chain[p + 1 :])})


def _without(grouping: Grouping) -> Iterator[Grouping]:
    for g, chain in enumerate(grouping):
        if len(grouping) > 1:
            yield _put(grouping, {g: ()})
        for p in range(len(chain)):
            if len(chain) > 1:
                yield _put(grouping, {g: chain[:p] + chain[p + 1 :]})


def _moved(grouping: Grouping) -> Iterator[Grouping]:
    """Relocate one device, or swap two."""
    for g, chain in enumerate(grouping):
        for p, device in enumerate(chain):
            rest = chain[:p] + chain[p + 1 :]
            if rest:
                yield _put(grouping, {g: rest}, (device,))
            for h, other in enumerate(grouping):
                target = rest if h == g else other
                for q in range(len(target) + 1):
                    joined = (*target[:q], device, *target[q:])
                    yield _put(grouping, {g: joined} if h == g else {g: rest, h: joined})
            for h in range(g, len(grouping)):
                for q in range(len(grouping[h])):
                    if (g, p) < (h, q):
                        yield _swapped(grouping, (g, p), (h, q))


def _swapped(grouping: Grouping, one: tuple[int, int], two: tuple[int, int]) -> Grouping:
    chains = [list(chain) for chain in grouping]
    (g, p), (h, q) = one, two
    chains[g][p], chains[h][q] = chains[h][q], chains[g][p]
    return tuple(tuple(chain) for chain in chains)


def _reshaped(grouping: Grouping) -> Iterator[Grouping]:
    """Reverse, split, merge."""
    for g, chain in enumerate(grouping):
        if len(chain) > 1:
            yield _put(grouping, {g: chain[::-1]})
        for p in range(1, len(chain)):
            yield _put(grouping, {g: chain[:p]}, chain[p:])
        for h in range(len(grouping)):
            if h != g:
                yield _put(grouping, {g: chain + grouping[h], h: ()})
