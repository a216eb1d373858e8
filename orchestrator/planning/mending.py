"""A plan made earlier as mixes of the classes there are now, although devices slowed or left."""

from collections import Counter
from collections.abc import Mapping, Sequence

from orchestrator.core.cluster import Device
from orchestrator.core.plan import Group, Plan
from orchestrator.planning.stock import Mix, Piece, Stock, Template, make_mix

FULL_SPEED = 1.05
"""Slow-down, relative to the fastest of a pool, up to which a device makes up for a broken one."""

Kin = tuple[str, str, int]
"""Pool, zone and memory: what devices have in common that may take each other's place."""


class Mender:
    """Finds the mixes of plans.

    Args:
        stock: The classes there are now.
        class_of: Of every device that is there.
        node_of: Of every device, its node's number among those of its class.
        shown: A device of each class.
    """

    def __init__(
        self,
        stock: Stock,
        class_of: Mapping[str, int],
        node_of: Mapping[str, int],
        shown: Sequence[Device],
    ) -> None:
        self._stock, self._shown = stock, shown
        self._class_of, self._node_of = class_of, node_of
        order = sorted(
            range(len(shown)), key=lambda c: (shown[c].slowdown, -stock.classes[c].num_devices, c)
        )
        self._mates: dict[Kin, list[int]] = {}
        for c in order:
            mates = self._mates.setdefault(_kin(shown[c]), [])
            if not mates or shown[c].slowdown < FULL_SPEED * shown[mates[0]].slowdown:
                mates.append(c)

    def mixes_of(self, plan: Plan) -> list[Mix]:
        """The plan's groups as they are, then formed anew from what runs at full speed.

        Groups that find no such teams, or no room, are left out.
        """
        found = []
        for templates in (self._as_they_are(plan), self._formed_anew(plan)):
            mix: Mix = ()
            for template, count in sorted(templates.items(), key=lambda one: (-one[1], one[0])):
                if room := min(count, self._stock.room(mix, template)):
                    mix = make_mix({**dict(mix), template: room})
            if mix and mix not in found:
                found.append(mix)
        return found

    def _as_they_are(self, plan: Plan) -> Counter[Template]:
        """A team whose members are no longer alike counts as one of its slowest member's class."""
        found = Counter[Template]()
        for group in plan.groups:
            template = []
            for stage in group.stages:
                classes = [self._class_of.get(d, -1) for d in stage.team.device_ids]
                slowest = max(classes, key=lambda c: (self._shown[c].slowdown, c))
                template.append((slowest if min(classes) >= 0 else -1, len(classes)))
            if all(piece in self._stock.index_of for piece in template):
                nodes = [self._node_of[s.team.device_ids[0]] for s in group.stages]
                found[self._stock.laid(tuple(template), nodes)] += 1
        return found

    def _formed_anew(self, plan: Plan) -> Counter[Template]:
        """As many groups over the same pools; a chain stays on one class as far as that goes."""
        wanted = Counter(
            (kins, self._is_apart(group)) for group in plan.groups if (kins := self._kins(group))
        )
        free = {c: one.num_devices for c, one in enumerate(self._stock.classes)}
        found = Counter[Template]()
        for (kins, is_apart), count in sorted(wanted.items(), key=lambda one: (-one[1], one[0])):
            for _ in range(count):
                template = self._drawn(kins, free)
                if not template:
                    break
                found[self._stock.apart(template) if is_apart else template] += 1
        return found

    def _is_apart(self, group: Group) -> bool:
        """Whether neighbours of one class had nodes of their own."""
        pieces = [(self._class_of.get(s.team.device_ids[0], -1), s.team.size) for s in group.stages]
        nodes = [self._node_of.get(s.team.device_ids[0], -1) for s in group.stages]
        known = [piece in self._stock.index_of for piece in pieces]
        return all(known) and self._stock.laid(tuple(pieces), nodes) != tuple(pieces)

    def _kins(self, group: Group) -> tuple[tuple[Kin, int], ...]:
        """Whose devices its stages want, and how many; () when nobody of the group is left."""
        kins = [
            next((self._kin_of(d) for d in s.team.device_ids if d in self._class_of), None)
            for s in group.stages
        ]
        known = next((kin for kin in kins if kin), None)
        if known is None:
            return ()
        return tuple((kin or known, s.team.size) for kin, s in zip(kins, group.stages, strict=True))

    def _kin_of(self, device_id: str) -> Kin:
        return _kin(self._shown[self._class_of[device_id]])

    def _drawn(self, kins: Sequence[tuple[Kin, int]], free: dict[int, int]) -> Template:
        """A group from free devices, which it takes; () when there are too few."""
        template: list[Piece] = []
        taken = Counter[int]()
        for kin, size in kins:
            last = template[-1][0] if template else -1
            mates = sorted(self._mates[kin], key=lambda c: c != last)
            c = next((c for c in mates if self._holds(c, size, free[c] - taken[c])), None)
            if c is None:
                return ()
            template.append((c, size))
            # What a node cannot split into such teams is lost to them.
            node_size = self._stock.classes[c].node_size
            taken[c] += node_size // (node_size // size)
        for c, count in taken.items():
            free[c] -= count
        return tuple(template)

    def _holds(self, c: int, size: int, free: int) -> bool:
        return (c, size) in self._stock.index_of and free >= size


def _kin(device: Device) -> Kin:
    return device.pool, device.zone, device.memory_bytes
