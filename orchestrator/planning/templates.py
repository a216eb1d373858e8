"""Class by class: how many groups of each template, for clusters of many alike devices.

A *template* is a chain of (class, team size); a state says how many groups follow each. What
an evaluation costs depends on the templates, not on the number of devices.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import numpy as np

from orchestrator.core.cluster import ClusterState, Team, make_team
from orchestrator.core.plan import Group, Plan
from orchestrator.planning.packing import assign, num_nodes
from orchestrator.planning.roster import Roster
from orchestrator.planning.trials import ChainSet, Trial

Piece = tuple[int, int]
"""Class and team size of one stage."""

Template = tuple[Piece, ...]
"""Pieces of one group, in stage order."""

Mix = tuple[tuple[Template, int], ...]
"""Templates and how many groups follow each, sorted."""

MAX_NEIGHBOURS = 150
"""Moves tried from one mix; more are sampled."""

SPEED_BIN = 0.05
"""Devices whose slow-downs differ by less count as alike."""

SHARES = (1.0, 0.25, 0.0)
"""Parts of the groups of a template that a move changes; at least one group."""

MAX_DEPTH = 16
"""Longest chain among the first guesses."""


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


def binned(cluster: ClusterState) -> ClusterState:
    """The cluster with slow-downs in bins of 5 %, so that noise does not part like devices."""
    width = np.log1p(SPEED_BIN)
    devices = tuple(
        replace(d, slowdown=float(np.exp(round(np.log(d.slowdown) / width) * width)))
        for d in cluster.devices
    )
    return replace(cluster, devices=devices)


class ClassSpace:
    """Mixes of templates. Parts of a group on one class go to one node as far as they fit.

    Args:
        cluster: With slow-downs in bins.
        team_sizes: Sizes of teams that may be formed, by kind.

    Source: docs/model.md, section 5.4.
    """

    def __init__(self, cluster: ClusterState, team_sizes: Mapping[str, Sequence[int]]) -> None:
        self._roster = roster = Roster(cluster)
        members: dict[int, list[tuple[int, ...]]] = {}
        for (_, device_class), devices in sorted(roster.kin.items()):
            members.setdefault(device_class, []).append(tuple(devices))
        self.classes = tuple(
            DeviceClass(
                tuple(nodes),
                tuple(
                    size
                    for size in team_sizes.get(roster.devices[nodes[0][0]].kind, (1,))
                    if size <= len(nodes[0])
                ),
            )
            for _, nodes in sorted(members.items())
        )
        self._class_of = {
            roster.devices[d].device_id: index
            for index, one in enumerate(self.classes)
            for node in one.nodes
            for d in node
        }
        self._pieces = [(c, size) for c, one in enumerate(self.classes) for size in one.sizes]
        self._team_index = {piece: index for index, piece in enumerate(self._pieces)}
        self.teams = tuple(self._team(self.classes[c].nodes[0][:size]) for c, size in self._pieces)
        self._pair: dict[Template, tuple[tuple[Team, ...], ...]] = {}

    def _team(self, devices: Sequence[int]) -> Team:
        return make_team([self._roster.devices[d] for d in devices])

    # What a state is made of ---------------------------------------------------------

    def parts(self, template: Template) -> list[Piece]:
        """Class and devices of every part of a group that lies on one node, in order."""
        return [(c, sum(sizes)) for c, sizes in self._parts(template)]

    def _parts(self, template: Template) -> list[tuple[int, list[int]]]:
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
            for c, size in self.parts(template):
                parts.setdefault(c, Counter())[size] += count
        return all(
            num_nodes(sizes, self.classes[c].node_size) <= len(self.classes[c].nodes)
            for c, sizes in parts.items()
        )

    def chains(self, state: Mix) -> list[ChainSet]:
        """One group of each template, and the next one on another node where there is one."""
        found = []
        for template, count in state:
            first, twin = self._two(template)
            found.append(ChainSet(first, count, twin if count > 1 else first))
        return found

    def _two(self, template: Template) -> tuple[tuple[Team, ...], ...]:
        """Teams of a group, and of another one as far away as its class reaches."""
        found = self._pair.get(template)
        if found is None:
            parts = self._parts(template)
            free = {c: [len(node) for node in self.classes[c].nodes] for c, _ in parts}
            pair = [self._laid(parts, free, apart=False)]
            pair.append(self._laid(parts, free, apart=True) or pair[0])
            found = self._pair[template] = tuple(map(tuple, pair))
        return found

    def _laid(
        self, parts: Sequence[tuple[int, list[int]]], free: dict[int, list[int]], *, apart: bool
    ) -> list[Team]:
        """Teams of one group on free devices, which it takes; [] when there are too few.

        ``apart``: on nodes that nobody has touched, as far as there are any.
        """
        found: dict[int, list[Team]] = {}
        for c in dict.fromkeys(c for c, _ in parts):
            mine = [p for p, (other, _) in enumerate(parts) if other == c]
            sizes = [sum(parts[p][1]) for p in mine]
            most = self.classes[c].node_size
            fresh = [room if room == most else 0 for room in free[c]]
            where = (assign(sizes, fresh) if apart else None) or assign(sizes, free[c])
            if where is None:
                return []
            for p, size, node in zip(mine, sizes, where, strict=True):
                found[p] = self._cut(
                    self.classes[c].nodes[node][most - free[c][node] :], parts[p][1]
                )
                free[c][node] -= size
        return [team for p in range(len(parts)) for team in found[p]]

    def _cut(self, devices: Sequence[int], sizes: Sequence[int]) -> list[Team]:
        """Teams of these sizes from the first devices on."""
        ends = list(accumulate(sizes, initial=0))
        return [self._team(devices[a:b]) for a, b in pairwise(ends)]

    def used(self, state: Mix) -> list[tuple[int, int]]:
        """Teams of every piece, as many as there are."""
        return [(self._team_index[piece], count) for template, count in state for piece in template]

    def of_plan(self, plan: Plan) -> Mix | None:
        """Templates of the plan's groups, in the classes that the devices have now."""
        counts: Counter[Template] = Counter()
        for group in plan.groups:
            pieces = []
            for stage in group.stages:
                classes = {self._class_of.get(d) for d in stage.team.device_ids}
                piece = (classes.pop() if len(classes) == 1 else None, stage.team.size)
                if piece not in self._team_index:
                    return None
                pieces.append(piece)
            counts[tuple(pieces)] += 1
        mix = tuple(sorted(counts.items()))
        return mix if self.fits(mix) else None

    def placed(self, trial: Trial, incumbent: Plan | None) -> tuple[Group, ...] | None:
        """Every group on devices of its own: where its like works already, else largest first."""
        wanted = [
            (template, group)
            for group, alike in zip(trial.groups, trial.alike, strict=True)
            for template in [self._template_of(group)]
            for _ in range(alike.num_groups)
        ]
        kept = self._kept(wanted, incumbent)
        return self._spread(wanted, kept) or (self._spread(wanted, {}) if kept else None)

    def _template_of(self, group: Group) -> Template:
        return tuple((self._class_of[s.team.device_ids[0]], s.team.size) for s in group.stages)

    def _kept(
        self, wanted: Sequence[tuple[Template, Group]], incumbent: Plan | None
    ) -> dict[int, tuple[Team, ...]]:
        """Teams of the incumbent's groups that have the same template and, if possible, cuts."""
        free: dict[Template, list[Group]] = {}
        for group in incumbent.groups if incumbent else ():
            if all(d in self._class_of for d in group.device_ids):
                free.setdefault(self._template_of(group), []).append(group)
        found = {}
        for index, (template, group) in enumerate(wanted):
            if groups := free.get(template):
                cuts = [s.end_layer for s in group.stages]
                same = next(
                    (g for g in groups if [s.end_layer for s in g.stages] == cuts), groups[0]
                )
                groups.remove(same)
                found[index] = tuple(s.team for s in same.stages)
        return found

    def _spread(
        self, wanted: Sequence[tuple[Template, Group]], kept: Mapping[int, tuple[Team, ...]]
    ) -> tuple[Group, ...] | None:
        taken = {d for teams in kept.values() for team in teams for d in team.device_ids}
        free = [
            [
                [d for d in node if self._roster.devices[d].device_id not in taken]
                for node in one.nodes
            ]
            for one in self.classes
        ]
        parts = [
            (index, c, sizes)
            for index, (template, _) in enumerate(wanted)
            if index not in kept
            for c, sizes in self._parts(template)
        ]
        teams: dict[int, list[Team]] = {index: list(team) for index, team in kept.items()}
        nodes: dict[int, int] = {}
        for c in range(len(self.classes)):
            mine = [p for p, part in enumerate(parts) if part[1] == c]
            where = assign([sum(parts[p][2]) for p in mine], [len(node) for node in free[c]])
            if where is None:
                return None
            nodes |= dict(zip(mine, where, strict=True))
        for p, (index, c, sizes) in enumerate(parts):
            node = free[c][nodes[p]]
            teams.setdefault(index, []).extend(self._cut(node, sizes))
            del node[: sum(sizes)]
        return tuple(
            replace(
                group,
                stages=tuple(
                    replace(s, team=team) for s, team in zip(group.stages, teams[i], strict=True)
                ),
            )
            for i, (_, group) in enumerate(wanted)
        )

    # First guesses -------------------------------------------------------------------

    def seeds(self, seconds_per_sample: Sequence[float]) -> list[Mix]:
        """All devices of one shape each: replicas, chains inside nodes, teams; fastest first.

        Args:
            seconds_per_sample: Of the whole model on each of ``teams``.
        """
        speed = [
            min(
                (seconds_per_sample[self._team_index[c, size]] * size for size in one.sizes),
                default=np.inf,
            )
            for c, one in enumerate(self.classes)
        ]
        fastest = sorted(range(len(self.classes)), key=lambda c: (speed[c], c))
        found: list[Mix] = []
        depths = [d for d in (1, 2, 4, 8, MAX_DEPTH, 3, 6, 12) if d <= MAX_DEPTH]
        for size, depth in product((1, 2, 4, 8), depths):
            chosen = [
                (((c, size),) * depth, count)
                for c in fastest
                if size in self.classes[c].sizes and (count := self._most(((c, size),) * depth))
            ]
            found += [tuple(sorted(chosen[:k])) for k in range(len(chosen), 0, -1)]
        found += [tuple(sorted(mix)) for mix in self._across(fastest)]
        order = dict.fromkeys(mix for mix in found if mix)
        return [mix for mix in order if self.fits(mix)]

    def _across(self, fastest: Sequence[int]) -> Iterator[list[tuple[Template, int]]]:
        """Chains over all classes, one device of each or one node's."""
        for whole in (False, True):
            template = tuple(
                (c, 1) for c in fastest for _ in range(self.classes[c].node_size if whole else 1)
            )
            if template and (count := self._most(template)):
                yield [(template, count)]

    def _most(self, template: Template) -> int:
        """Most groups of one template alone."""
        high = sum(one.num_devices for one in self.classes)
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(((template, middle),)) else (low, middle - 1)
        return low

    # Moves ---------------------------------------------------------------------------

    def near(self, state: Mix, longest: int, rng: np.random.Generator) -> Iterator[Mix]:
        """Mixes one move away in random order, at most ``MAX_NEIGHBOURS``; no doubles.

        Moves change the pieces of one group, a quarter or all of a template: add, drop,
        replace, swap, reverse, join and part teams; whole groups come, go, merge and split.
        """
        moves = [*self._changed(state), *self._fewer(state), *self._more(state), *_merged(state)]
        seen = {state}
        for index in rng.permutation(len(moves))[:MAX_NEIGHBOURS]:
            near = _sorted(moves[index])
            if near in seen or any(len(template) > longest for template, _ in near):
                continue
            seen.add(near)
            if self.fits(near):
                yield near

    def _changed(self, state: Mix) -> Iterator[dict[Template, int]]:
        """Some groups of a template follow another one."""
        for template, count in state:
            for other in self._variants(template):
                for share in _shares(count):
                    changed = dict(state)
                    changed[template] -= share
                    changed[other] = changed.get(other, 0) + share
                    yield changed
            for p in range(1, len(template)):
                for share in _shares(count):
                    changed = dict(state)
                    changed[template] -= share
                    for other in (template[:p], template[p:]):
                        changed[other] = changed.get(other, 0) + share
                    yield changed

    def _variants(self, template: Template) -> Iterator[Template]:
        """Templates that differ in one or two pieces."""
        for p, (c, size) in enumerate(template):
            head, tail = template[:p], template[p + 1 :]
            if len(template) > 1:
                yield (*head, *tail)
            for piece in self._pieces:
                if piece != (c, size):
                    yield (*head, piece, *tail)
                yield (*head, piece, *template[p:])
            if (c, 2 * size) in self._team_index:
                if tail and tail[0] == (c, size):
                    yield (*head, (c, 2 * size), *tail[1:])
            if size > 1 and (c, size // 2) in self._team_index:
                yield (*head, (c, size // 2), (c, size // 2), *tail)
            for q in range(p + 1, len(template)):
                if template[q] != template[p]:
                    swapped = list(template)
                    swapped[p], swapped[q] = swapped[q], swapped[p]
                    yield tuple(swapped)
        for piece in self._pieces:
            yield (*template, piece)
        if len(template) > 1:
            yield template[::-1]

    def _fewer(self, state: Mix) -> Iterator[dict[Template, int]]:
        if len(state) == 1 and state[0][1] == 1:
            return
        for template, count in state:
            for share in _shares(count):
                yield {**dict(state), template: count - share}

    def _more(self, state: Mix) -> Iterator[dict[Template, int]]:
        """More groups of a template, or of one device or team alone, as many as fit or one."""
        known = {template for template, _ in state}
        for template in [*known, *(((c, q),) for c, q in self._pieces if ((c, q),) not in known)]:
            base = dict(state)
            most = self._room(state, template)
            for share in _shares(most) if most else ():
                yield {**base, template: base.get(template, 0) + share}

    def _room(self, state: Mix, template: Template) -> int:
        """How many more groups of a template fit."""
        low, high = 0, self._most(template)
        base = dict(state)
        while low < high:
            middle = (low + high + 1) // 2
            mix = _sorted({**base, template: base.get(template, 0) + middle})
            low, high = (middle, high) if self.fits(mix) else (low, middle - 1)
        return low


def _merged(state: Mix) -> Iterator[dict[Template, int]]:
    """Groups of two templates, or pairs of one, become chains of both."""
    for (one, n), (two, m) in product(state, repeat=2):
        pairs = n // 2 if one == two else min(n, m)
        for share in _shares(pairs) if pairs else ():
            changed = dict(state)
            changed[one] -= share
            changed[two] -= share
            changed[one + two] = changed.get(one + two, 0) + share
            yield changed


def _shares(count: int) -> list[int]:
    """All of them, a quarter, one."""
    return list(dict.fromkeys(max(1, int(share * count)) for share in SHARES))


def _sorted(counts: Mapping[Template, int]) -> Mix:
    return tuple(sorted((template, n) for template, n in counts.items() if n > 0))
