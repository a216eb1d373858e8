"""Class by class: how many groups of each template, for clusters of many alike devices.

A *template* is a chain of (class, team size), on shared nodes or with a node for every stage
(``stock.Piece``); a state says how many groups follow each. What an evaluation costs depends
on the templates, not on the number of devices.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from orchestrator.core.cluster import ClusterState, Team, make_team
from orchestrator.core.plan import Group, Plan
from orchestrator.planning.guesses import filled, seeds
from orchestrator.planning.mending import Mender
from orchestrator.planning.mixes import near
from orchestrator.planning.packing import assign, spread
from orchestrator.planning.roster import Roster
from orchestrator.planning.space import ChainSet, Trial
from orchestrator.planning.stock import DeviceClass, Mix, Stock, Template, is_apart, make_mix
from orchestrator.planning.sums import Alike

SPEED_BIN = 0.05
"""Devices whose slow-downs differ by less count as alike."""

NUM_SHOWN = 24
"""Nodes of a class on which the groups of a mix are laid out to see how far sums reach."""


def binned(cluster: ClusterState) -> ClusterState:
    """The cluster with slow-downs in bins of 5 %, so that noise does not part like devices."""
    width = np.log1p(SPEED_BIN)
    devices = tuple(
        replace(d, slowdown=float(np.exp(round(np.log(d.slowdown) / width) * width)))
        for d in cluster.devices
    )
    return replace(cluster, devices=devices)


class ClassSpace:
    """Mixes of templates. Neighbours of one class go to one node as far as they fit and may.

    Args:
        cluster: With slow-downs in bins.
        team_sizes: Sizes of teams that may be formed, by kind.
        most_groups: Samples of the batch.

    Source: docs/model.md, section 5.4.
    """

    def __init__(
        self, cluster: ClusterState, team_sizes: Mapping[str, Sequence[int]], most_groups: int
    ) -> None:
        self._roster, self._most_groups = Roster(cluster), most_groups
        roster = self._roster
        members: dict[int, list[tuple[int, ...]]] = {}
        for (_, device_class), devices in sorted(roster.kin.items()):
            members.setdefault(device_class, []).append(tuple(devices))
        self.stock = Stock(
            [
                DeviceClass(
                    tuple(nodes),
                    tuple(
                        size
                        for size in team_sizes.get(roster.devices[nodes[0][0]].kind, (1,))
                        if size <= len(nodes[0])
                    ),
                    roster.devices[nodes[0][0]].memory_bytes,
                )
                for _, nodes in sorted(members.items())
            ]
        )
        self._class_of = {
            roster.devices[d].device_id: index
            for index, one in enumerate(self.stock.classes)
            for node in one.nodes
            for d in node
        }
        self._node_of = {
            roster.devices[d].device_id: node
            for one in self.stock.classes
            for node, devices in enumerate(one.nodes)
            for d in devices
        }
        """Number of a device's node among those of its class."""
        self._device_of = {device.device_id: device for device in roster.devices}
        shown = [roster.devices[one.nodes[0][0]] for one in self.stock.classes]
        self._kinds = [device.kind for device in shown]
        self._mender = Mender(self.stock, self._class_of, self._node_of, shown)
        self._formed: dict[tuple[int, ...], Team] = {}
        self.teams = tuple(
            self._team(self.stock.classes[c].nodes[0][:size]) for c, size in self.stock.pieces
        )
        self._teams: dict[Template, tuple[Team, ...]] = {}
        self._chains: dict[Mix, list[ChainSet]] = {}

    def _team(self, devices: Sequence[int]) -> Team:
        key = tuple(devices)
        found = self._formed.get(key)
        if found is None:
            found = self._formed[key] = make_team([self._roster.devices[d] for d in key])
        return found

    # What a state is made of ---------------------------------------------------------

    def shown(self, state: Mix) -> list[tuple[tuple[Team, ...], int]]:
        """A group of each template by itself."""
        return [(self._shown(template), count) for template, count in state]

    def chains(self, state: Mix) -> list[ChainSet]:
        """A group of each template, shown where its like is always shown.

        Gradient sums pass through two groups of each template, on nodes of their own as far
        as there are any; more of them may share a node in the end, and then sum faster.
        """
        known = self._chains.get(state)
        if known is None:
            known = self._chains[state] = self._laid_out(state)
        return known

    def _laid_out(self, state: Mix) -> list[ChainSet]:
        parts = [self.stock.parts(template) for template, _ in state]
        free = {
            c: self.stock.classes[c].rooms(NUM_SHOWN)
            for c in dict.fromkeys(c for one in parts for c, _ in one)
        }
        found: dict[int, ChainSet] = {}
        largest_first = sorted(range(len(parts)), key=lambda i: -max(sum(p[1]) for p in parts[i]))
        for i in largest_first:
            template, count = state[i]
            teams = self._shown(template)
            single = is_apart(template)
            first = tuple(self._laid(parts[i], free, apart=True, single=single)) or teams
            second: tuple[Team, ...] = ()
            if count > 1:
                second = self._beside(template, count, first, free)
                second = second or tuple(self._laid(parts[i], free, apart=True, single=single))
            found[i] = ChainSet(teams, Alike(count, first, second or first))
        return [found[i] for i in range(len(state))]

    def _shown(self, template: Template) -> tuple[Team, ...]:
        """Teams of one group by itself."""
        found = self._teams.get(template)
        if found is None:
            parts = self.stock.parts(template)
            num_parts = Counter(c for c, _ in parts)  # all that need a node, and all are alike
            free = {c: self.stock.classes[c].rooms(most) for c, most in num_parts.items()}
            single = is_apart(template)
            laid = self._laid(parts, free, apart=False, single=single)
            found = self._teams[template] = tuple(laid)
        return found

    def _beside(
        self, template: Template, count: int, first: Sequence[Team], free: dict[int, list[int]]
    ) -> tuple[Team, ...]:
        """Teams beside those of the first of so many groups, if there is room for all of them."""
        found, taken = [], Counter[tuple[int, int]]()
        for (c, size), team in zip(template, first, strict=True):
            one, node = self.stock.classes[c], self._node_of[team.device_ids[0]]
            if size > 0 or node >= len(free[c]) or count * -size > one.node_size:
                return ()
            at = one.node_size - free[c][node] + taken[c, node]
            if at - size > one.node_size:
                return ()
            taken[c, node] -= size
            found.append(self._team(one.nodes[node][at : at - size]))
        for (c, node), devices in taken.items():
            free[c][node] -= devices
        return tuple(found)

    def _laid(
        self,
        parts: Sequence[tuple[int, list[int]]],
        free: dict[int, list[int]],
        *,
        apart: bool,
        single: bool,
    ) -> list[Team]:
        """Teams of one group on free devices, which it takes; [] when there are too few.

        Args:
            parts: Class and team sizes of each, in order.
            free: Free devices of every node, by class.
            apart: On nodes that nobody has touched, as far as there are any.
            single: Every part on a node of its own, as far as there are any.
        """
        found: dict[int, list[Team]] = {}
        for c in dict.fromkeys(c for c, _ in parts):
            mine = [p for p, (other, _) in enumerate(parts) if other == c]
            sizes = [sum(parts[p][1]) for p in mine]
            most = self.stock.classes[c].node_size
            fresh = [room if room == most else 0 for room in free[c]]
            where = spread(sizes, fresh) or spread(sizes, free[c]) if single else None
            where = where or (assign(sizes, fresh) if apart else None) or assign(sizes, free[c])
            if where is None:
                return []
            for p, size, node in zip(mine, sizes, where, strict=True):
                devices = self.stock.classes[c].nodes[node][most - free[c][node] :]
                found[p] = self._cut(devices, parts[p][1])
                free[c][node] -= size
        return [team for p in range(len(parts)) for team in found[p]]

    def _cut(self, devices: Sequence[int], sizes: Sequence[int]) -> list[Team]:
        """Teams of these sizes from the first devices on."""
        ends = list(accumulate(sizes, initial=0))
        return [self._team(devices[a:b]) for a, b in pairwise(ends)]

    def used(self, state: Mix) -> list[tuple[int, int]]:
        """Teams of every piece, as many as there are."""
        return [
            (self.stock.index_of[piece], count) for template, count in state for piece in template
        ]

    @property
    def layout(self) -> object:
        """See ``Roster.layout``."""
        return self._roster.layout

    def of_plan(self, plan: Plan) -> list[Mix]:
        """See ``Mender.mixes_of``."""
        return self._mender.mixes_of(plan)

    def placed(self, trial: Trial, incumbent: Plan | None) -> tuple[Group, ...] | None:
        """Every group on devices of its own: where its like works already, else largest first."""
        templates = {
            (chain.teams, chain.alike.first): template
            for chain, (template, _) in zip(self.chains(trial.state), trial.state, strict=True)
        }
        wanted = [
            (templates[tuple([s.team for s in group.stages]), alike.first], group)
            for group, alike in zip(trial.groups, trial.alike, strict=True)
            for _ in range(alike.num_groups)
        ]
        kept = self._kept(wanted, incumbent)
        return self._spread(wanted, kept) or (self._spread(wanted, {}) if kept else None)

    def _is_whole(self, team: Team) -> bool:
        """Whether its members are there, where and what they were."""
        devices = [self._device_of.get(d) for d in team.device_ids]
        return all(d and (d.node_id, d.kind) == (team.node_id, team.kind) for d in devices)

    def _template_of(self, group: Group) -> Template:
        """Class -1 where members are not alike any more."""
        classes = [{self._class_of[d] for d in s.team.device_ids} for s in group.stages]
        pieces = tuple(
            (min(mine) if len(mine) == 1 else -1, s.team.size)
            for mine, s in zip(classes, group.stages, strict=True)
        )
        return self.stock.laid(pieces, [self._node_of[s.team.device_ids[0]] for s in group.stages])

    def _kept(
        self, wanted: Sequence[tuple[Template, Group]], incumbent: Plan | None
    ) -> dict[int, tuple[Team, ...]]:
        """Teams of the incumbent's groups that have the same template and, if possible, cuts.

        Neighbours that may share a node may also have nodes of their own.
        """
        free: dict[Template, list[tuple[Template, Group]]] = {}
        for group in incumbent.groups if incumbent else ():
            if all(self._is_whole(stage.team) for stage in group.stages):
                template = self._template_of(group)
                free.setdefault(self.stock.together(template), []).append((template, group))
        found = {}
        for index, (template, group) in enumerate(wanted):
            cuts = [s.end_layer for s in group.stages]
            known = free.get(self.stock.together(template), [])
            fitting = [one for one in known if one[0] == template or not is_apart(template)]
            if fitting:
                same = min(
                    fitting,
                    key=lambda one: (
                        one[0] != template,
                        [s.end_layer for s in one[1].stages] != cuts,
                    ),
                )
                known.remove(same)
                found[index] = tuple(s.team for s in same[1].stages)
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
            for one in self.stock.classes
        ]
        parts = [
            (index, c, sizes, place if is_apart(template) else -1)
            for index, (template, _) in enumerate(wanted)
            if index not in kept
            for place, (c, sizes) in enumerate(self.stock.parts(template))
        ]
        teams: dict[int, list[Team]] = {index: list(team) for index, team in kept.items()}
        nodes: dict[int, int] = {}
        for c in range(len(self.stock.classes)):
            # Where stages have nodes of their own, the same ones of several groups come together.
            mine = sorted(
                (p for p, part in enumerate(parts) if part[1] == c), key=lambda p: parts[p][3]
            )
            where = assign([sum(parts[p][2]) for p in mine], [len(node) for node in free[c]])
            if where is None:
                return None
            nodes |= dict(zip(mine, where, strict=True))
        for p, (index, c, sizes, _) in enumerate(parts):
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

    def seeds(self, seconds_per_sample: Sequence[float], longest: int) -> Iterator[Mix]:
        """First guesses; see ``guesses.seeds``."""
        return seeds(self.stock, seconds_per_sample, self._most_groups, longest)

    def filled(
        self, state: Mix, seconds_per_sample: Sequence[float], longest: int
    ) -> Iterator[Mix]:
        """More groups over idle devices; see ``guesses.filled``."""
        return filled(self.stock, state, seconds_per_sample, self._most_groups, longest)

    def by_kind(self, state: Mix) -> dict[str, Mix]:
        """Templates over classes of one kind."""
        found: dict[str, dict[Template, int]] = {}
        for template, count in state:
            kinds = {self._kinds[c] for c, _ in template}
            if len(kinds) == 1:
                found.setdefault(kinds.pop(), {})[template] = count
        return {kind: make_mix(counts) for kind, counts in found.items()}

    def joined(self, states: Sequence[Mix]) -> Mix:
        """Groups of several states on unlike classes, side by side."""
        return make_mix({template: count for state in states for template, count in state})

    def near(self, state: Mix, longest: int, rng: np.random.Generator) -> Iterator[Mix]:
        """Mixes one move away; see ``mixes.near``."""
        return near(self.stock, state, longest, rng)
