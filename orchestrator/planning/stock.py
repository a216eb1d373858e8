"""What classes of devices hold: templates of groups, and how many of them fit the nodes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.packing import num_nodes

Piece = tuple[int, int]
"""Class and team size of one stage."""

Template = tuple[Piece, ...]
"""Pieces of one group, in stage order."""

Mix = tuple[tuple[Template, int], ...]
"""Templates and how many groups follow each, sorted."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that may stand in for each other, node by node."""

    nodes: tuple[tuple[int, ...], ...]  # indices into the roster
    sizes: tuple[int, ...]  # of teams

    @property
    def node_size(self) -> int:
        """Devices of the class on a node."""
        return len(self.nodes[0])

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.node_size * len(self.nodes)


class Stock:
    """The classes of a cluster. Parts of a group on one class share a node as far as they fit."""

    def __init__(self, classes: Sequence[DeviceClass]) -> None:
        self.classes = tuple(classes)
        self.pieces = [(c, size) for c, one in enumerate(classes) for size in one.sizes]
        self.index_of = {piece: index for index, piece in enumerate(self.pieces)}
        self._most: dict[Template, int] = {}

    def parts(self, template: Template) -> list[tuple[int, list[int]]]:
        """Class and team sizes of every part of a group that lies on one node, in order."""
        found: list[tuple[int, list[int]]] = []
        for c, size in template:
            open_part = found and found[-1][0] == c
            if open_part and sum(found[-1][1]) + size <= self.classes[c].node_size:
                found[-1][1].append(size)
            else:
                found.append((c, [size]))
        return found

    def fits(self, mix: Mix) -> bool:
        """Whether the nodes hold all groups."""
        parts: dict[int, Counter[int]] = {}
        for template, count in mix:
            for c, sizes in self.parts(template):
                parts.setdefault(c, Counter())[sum(sizes)] += count
        return all(
            num_nodes(sizes, self.classes[c].node_size) <= len(self.classes[c].nodes)
            for c, sizes in parts.items()
        )

    def most(self, template: Template) -> int:
        """Most groups of one template alone."""
        if template not in self._most:
            self._most[template] = self._last_that_fits(
                sum(one.num_devices for one in self.classes),
                lambda count: ((template, count),),
            )
        return self._most[template]

    def room(self, mix: Mix, template: Template) -> int:
        """How many more groups of a template fit."""
        base = dict(mix)
        return self._last_that_fits(
            self.most(template),
            lambda count: make_mix({**base, template: base.get(template, 0) + count}),
        )

    def _last_that_fits(self, most: int, mix_of: Callable[[int], Mix]) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(mix_of(middle)) else (low, middle - 1)
        return low


def make_mix(counts: Mapping[Template, int]) -> Mix:
    """The mix of these numbers of groups; templates without any are left out."""
    return tuple(sorted((template, n) for template, n in counts.items() if n > 0))
