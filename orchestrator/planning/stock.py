"""What classes of devices hold: templates of groups, and how many of them fit the nodes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.packing import num_nodes

Piece = tuple[int, int]
"""Class and team size of one stage; the size is negative where the stage has a node of its own.

Else neighbours of one class share a node as far as they fit. On nodes of their own, stages leave
room for the same stages of other groups, whose gradients are then summed inside the node.
"""

Template = tuple[Piece, ...]
"""Pieces of one group, in stage order."""

Mix = tuple[tuple[Template, int], ...]
"""Templates and how many groups follow each, sorted."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that may stand in for each other, node by node."""

    nodes: tuple[tuple[int, ...], ...]  # indices into the roster
    sizes: tuple[int, ...]  # of teams
    memory_bytes: int = 0  # of a device

    @property
    def node_size(self) -> int:
        """Devices of the class on a node."""
        return len(self.nodes[0])

    def rooms(self, most: int) -> list[int]:
        """Devices of its first nodes."""
        return [self.node_size] * min(most, len(self.nodes))

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.node_size * len(self.nodes)


class Stock:
    """The classes of a cluster, and how many groups of which templates their nodes hold."""

    def __init__(self, classes: Sequence[DeviceClass]) -> None:
        self.classes = tuple(classes)
        self.pieces = [(c, size) for c, one in enumerate(classes) for size in one.sizes]
        self.index_of = {piece: index for index, piece in enumerate(self.pieces)}
        """Of pieces, on nodes of their own too."""
        for index, (c, size) in enumerate(self.pieces):
            if self._has_room_beside(c, size):
                self.index_of[c, -size] = index
        self._most: dict[Template, int] = {}
        self._devices: dict[Template, tuple[tuple[int, int], ...]] = {}

    def parts(self, template: Template) -> list[tuple[int, list[int]]]:
        """Class and team sizes of every part of a group that lies on one node, in order."""
        found: list[tuple[int, list[int]]] = []
        is_open = False
        for c, size in template:
            mates = found[-1][1] if is_open and found[-1][0] == c else []
            if mates and 0 < size <= self.classes[c].node_size - sum(mates):
                mates.append(size)
            else:
                found.append((c, [abs(size)]))
            is_open = size > 0
        return found

    def _has_room_beside(self, c: int, size: int) -> bool:
        return 2 * size <= self.classes[c].node_size

    def apart(self, template: Template) -> Template:
        """The template with every stage on a node of its own where others find room beside it."""
        return tuple(
            [(c, -abs(s) if self._has_room_beside(c, abs(s)) else abs(s)) for c, s in template]
        )

    def together(self, template: Template) -> Template:
        """The template with neighbours on shared nodes."""
        return tuple([(c, abs(size)) for c, size in template])

    def laid(self, pieces: Template, nodes: Sequence[object]) -> Template:
        """The template of these pieces on these nodes."""
        at, seen = 0, set[tuple[int, object]]()
        shared = several = False
        for c, sizes in self.parts(pieces):
            mine = set(nodes[at : at + len(sizes)])
            if len(mine) > 1:
                return self.apart(pieces)
            shared |= len(sizes) > 1 or (c, nodes[at]) in seen
            several |= any(other == c for other, _ in seen)
            seen.add((c, nodes[at]))
            at += len(sizes)
        return self.apart(pieces) if several and not shared else pieces

    def num_nodes(self, mix: Mix) -> dict[int, int]:
        """Nodes of every class that the groups of a mix need."""
        parts: dict[int, dict[int, int]] = {}
        for template, count in mix:
            for c, devices in self._sums(template):
                sizes = parts.setdefault(c, {})
                sizes[devices] = sizes.get(devices, 0) + count
        return {c: num_nodes(sizes, self.classes[c].node_size) for c, sizes in parts.items()}

    def _sums(self, template: Template) -> tuple[tuple[int, int], ...]:
        """Class and devices of every part."""
        found = self._devices.get(template)
        if found is None:
            found = tuple((c, sum(sizes)) for c, sizes in self.parts(template))
            self._devices[template] = found
        return found

    def fits(self, mix: Mix) -> bool:
        """Whether the nodes hold all groups."""
        return all(n <= len(self.classes[c].nodes) for c, n in self.num_nodes(mix).items())

    def most(self, template: Template) -> int:
        """Most groups of one template alone."""
        if template not in self._most:
            self._most[template] = self._last_that_fits(
                self._most_by_number(template), lambda count: ((template, count),)
            )
        return self._most[template]

    def _most_by_number(self, template: Template) -> int:
        """What the numbers of devices allow, whatever the nodes."""
        needed = Counter[int]()
        for c, devices in self._sums(template):
            needed[c] += devices
        return min(self.classes[c].num_devices // n for c, n in needed.items())

    def room(self, mix: Mix, template: Template) -> int:
        """How many more groups of a template fit."""
        base = dict(mix)
        return self._last_that_fits(
            self.most(template),
            lambda count: make_mix({**base, template: base.get(template, 0) + count}),
        )

    def _last_that_fits(self, most: int, mix_of: Callable[[int], Mix]) -> int:
        low, high = 0, most
        middle = most  # as a rule all of them fit, or none
        while low < high:
            low, high = (middle, high) if self.fits(mix_of(middle)) else (low, middle - 1)
            middle = (low + high + 1) // 2
        return low


def is_apart(template: Template) -> bool:
    """Whether some of its stages have nodes of their own."""
    return any(size < 0 for _, size in template)


def is_short(mix: Mix, longest: int) -> bool:
    """Whether no chain has more stages."""
    return all(len(template) <= longest for template, _ in mix)


def make_mix(counts: Mapping[Template, int]) -> Mix:
    """The mix of these numbers of groups; templates without any are left out."""
    return tuple(sorted((template, n) for template, n in counts.items() if n > 0))
