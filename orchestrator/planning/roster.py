"""The devices of a cluster, numbered by what they are, and which of them are interchangeable."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from orchestrator.core.cluster import ClusterState, Device, Team, make_team

Chain = tuple[int, ...]
"""Team indices of one group, in stage order."""

Grouping = tuple[Chain, ...]
"""Chains that share no device. Devices in none are idle; no chains: everything is idle."""

SINGLE = (1,)


class Roster:
    """Devices and teams by number; alike ones, and groupings that differ by a swap of them.

    Devices of one node with equal figures are alike. Two nodes are alike when swapping them
    leaves every link and every figure as it was. Groupings that differ only by a swap of alike
    devices have one canonical form, so that the search meets each once.

    Args:
        cluster: Whose devices.
        team_sizes: Sizes of teams that may be formed, by kind; single devices where not given.
    """

    def __init__(
        self, cluster: ClusterState, team_sizes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self._cluster = cluster
        self._special = _special_nodes(cluster)
        nodes: dict[str, list[Device]] = {}
        pools: dict[tuple[str, str], list[Device]] = {}
        for device in cluster.devices:
            nodes.setdefault(device.node_id, []).append(device)
            mates = pools.setdefault((device.pool, device.zone), [])
            if len(mates) < 2 and all(mate.node_id != device.node_id for mate in mates):
                mates.append(device)
        self._pools = list(pools.values())  # of each, devices of two nodes where it has them
        self._paths: dict[tuple[object, ...], tuple[object, ...]] = {}
        keyed = [
            (self._node_key(node), node)
            for node in (sorted(some, key=self._figures) for some in nodes.values())
        ]
        keyed.sort(key=lambda one: (*one[0], one[1][0].node_id))
        members = [node for _, node in keyed]
        self.devices: tuple[Device, ...] = tuple(device for node in members for device in node)
        self.node_of = [n for n, node in enumerate(members) for _ in node]
        self._index_of = {device.device_id: i for i, device in enumerate(self.devices)}
        self._canonical: dict[Grouping, Grouping] = {}
        self._classes(members, [key for key, _ in keyed])
        self._form_teams(members, team_sizes or {})

    def _figures(self, device: Device) -> tuple[object, ...]:
        offer = self._cluster.offer(device.pool)
        return (
            device.zone, device.kind, device.slowdown, device.memory_bytes, offer.price_usd_per_s,
            offer.billed, offer.spot, offer.minimum_s, offer.quantum_s,
            offer.max_price_usd_per_s or 0.0, device.surcharge_usd_per_s,
            device.entry_usd_per_sample, device.input_s_per_sample,
        )  # fmt: skip

    def _end(self, device: Device, *, single: bool) -> tuple[object, ...]:
        """Figures of where a path ends: of a single device, or of any of its pool."""
        if single:
            return self._figures(device)
        offer = self._cluster.offer(device.pool)
        return device.zone, device.kind, 0.0, 0, offer.price_usd_per_s, offer.billed, offer.spot

    def _path(self, source: Device, target: Device) -> tuple[object, ...]:
        """Figures of a link without the names of its ends; empty when nobody described it."""
        try:
            return self._cluster.link(source, target).figures
        except ValueError:
            return ()

    def _node_key(self, node: Sequence[Device]) -> tuple[object, ...]:
        """What a node is and how it is joined to others, without a name."""
        first = node[0]
        if first.node_id in self._special:
            paths = self._paths_to(first, self._cluster.devices, special=True)
        else:
            others = tuple(
                next((d for d in pool if d.node_id != first.node_id), pool[0])
                for pool in self._pools
            )
            # Most nodes of a pool are joined to the very same others.
            key = first.pool, first.zone, *map(id, others)
            if key not in self._paths:
                self._paths[key] = self._paths_to(first, others, special=False)
            paths = self._paths[key]
        return tuple(map(self._figures, node)), self._path(first, first), paths

    def _paths_to(
        self, first: Device, others: Sequence[Device], *, special: bool
    ) -> tuple[object, ...]:
        return tuple(
            sorted(
                (self._end(d, single=special), self._path(first, d), self._path(d, first))
                for d in others
            )
        )

    def _classes(
        self, members: Sequence[Sequence[Device]], keys: Sequence[tuple[object, ...]]
    ) -> None:
        """Number the classes of alike nodes and, inside a node, of alike devices."""
        plain: dict[tuple[object, ...], int] = {}
        self.node_class: list[int] = []
        for n, node in enumerate(members):
            if node[0].node_id in self._special:
                alike = (k for k in range(n) if self._swappable(members, k, n))
                self.node_class.append(next((self.node_class[k] for k in alike), n))
                continue
            self.node_class.append(plain.setdefault(keys[n], n))
        self.nodes_of_class: dict[int, list[int]] = {}
        for n, node_class in enumerate(self.node_class):
            self.nodes_of_class.setdefault(node_class, []).append(n)
        numbers: dict[tuple[int, tuple[object, ...]], int] = {}
        self.device_class: list[int] = []
        self.kin: dict[tuple[int, int], list[int]] = {}
        for i, device in enumerate(self.devices):
            node_index = self.node_of[i]
            key_of_device = (self.node_class[node_index], self._figures(device))
            self.device_class.append(numbers.setdefault(key_of_device, len(numbers)))
            self.kin.setdefault((node_index, self.device_class[i]), []).append(i)

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

    def _form_teams(
        self, members: Sequence[Sequence[Device]], team_sizes: Mapping[str, Sequence[int]]
    ) -> None:
        """Single devices first, then every set of like devices of a node, smallest first."""
        sets: list[tuple[int, ...]] = [(i,) for i in range(len(self.devices))]
        for node in members:
            for kind in dict.fromkeys(device.kind for device in node):
                like = [self._index_of[d.device_id] for d in node if d.kind == kind]
                for size in team_sizes.get(kind, SINGLE):
                    if size > 1:
                        sets += combinations(like, size)
        self.members: tuple[tuple[int, ...], ...] = tuple(sets)
        self.team_of = {team: index for index, team in enumerate(sets)}
        """Index of the team of these devices, which are sorted."""
        self.teams: tuple[Team, ...] = tuple(
            make_team([self.devices[d] for d in team]) for team in sets
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal where every number means the same device, and the same ones are alike."""
        ids = tuple([device.device_id for device in self.devices])
        return ids, self.node_class, self.device_class

    def devices_of(self, grouping: Grouping) -> list[int]:
        """All devices in use."""
        return [d for chain in grouping for team in chain for d in self.members[team]]

    def canonical(self, grouping: Grouping) -> Grouping:
        """The same grouping on the first of each set of alike devices, chains in order."""
        found = self._canonical.get(grouping)
        if found is None:
            found = self._canonical[grouping] = self._relabelled(grouping)
        return found

    def _relabelled(self, grouping: Grouping) -> Grouping:
        kind, members = self.device_class, self.members
        order = sorted(
            grouping, key=lambda chain: ([[kind[d] for d in members[t]] for t in chain], chain)
        )
        node_to: dict[int, int] = {}
        taken_nodes: set[int] = set()
        device_to: dict[int, int] = {}
        taken: set[int] = set()
        for device in (d for chain in order for team in chain for d in members[team]):
            node = self.node_of[device]
            if node not in node_to:
                alike = self.nodes_of_class[self.node_class[node]]
                node_to[node] = next(n for n in alike if n not in taken_nodes)
                taken_nodes.add(node_to[node])
            kin = self.kin[node_to[node], kind[device]]
            device_to[device] = next(d for d in kin if d not in taken)
            taken.add(device_to[device])
        return tuple(
            sorted(
                tuple(self.moved_team(members[team], device_to) for team in chain)
                for chain in order
            )
        )

    def moved_team(self, members: Sequence[int], device_to: Mapping[int, int]) -> int:
        """The team of other devices in the place of these."""
        if len(members) == 1:
            return device_to[members[0]]
        return self.team_of[tuple(sorted(device_to[d] for d in members))]

    def index_of(self, device_id: str) -> int | None:
        """Number of a device, None when it has left."""
        return self._index_of.get(device_id)

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
                node_to[self.node_of[device]] = self.node_of[best]
                if here := held.get(self.devices[best].device_id):
                    partners.add(here[0])
        return found

    def _stand_ins(self, device: int, node_to: Mapping[int, int], taken: set[int]) -> list[int]:
        """Free devices that may take a device's place, given where its node's others went."""
        node, kind = self.node_of[device], self.device_class[device]
        nodes = [node_to[node]] if node in node_to else []
        if not nodes:
            alike = self.nodes_of_class[self.node_class[node]]
            nodes = [n for n in alike if n not in node_to.values()]
        return [d for n in nodes for d in self.kin[n, kind] if d not in taken]

    def _stays(
        self, here: tuple[int, range] | None, layers: range, partners: set[int]
    ) -> tuple[int, bool, bool]:
        """Layers that need not move, and whether a device works on, with its partners or at all."""
        if here is None:
            return 0, False, False
        return len(set(here[1]) & set(layers)), here[0] in partners, True


def _special_nodes(cluster: ClusterState) -> set[str]:
    """Nodes with links of their own to other nodes: their zone does not say all about them."""
    nodes = {device.node_id for device in cluster.devices}
    return {
        end
        for link in cluster.links
        if link.source != link.target and {link.source, link.target} <= nodes
        for end in (link.source, link.target)
    }


def dealt_out(order: Sequence[int], num_hands: int) -> list[tuple[int, ...]]:
    """Hands of about equal worth: dealt from the best on, to and fro."""
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    for i, card in enumerate(order):
        turn, place = divmod(i, num_hands)
        hands[num_hands - 1 - place if turn % 2 else place].append(card)
    return [tuple(hand) for hand in hands]
