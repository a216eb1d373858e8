"""Device by device: which groupings of teams the search starts from, and moves to."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Plan
from orchestrator.planning.roster import Chain, Grouping, Roster, dealt_out
from orchestrator.planning.space import ChainSet, Trial
from orchestrator.planning.sums import Alike

MAX_NEIGHBOURS = 150
"""Moves tried from one grouping; more are sampled."""


class _Move(NamedTuple):
    """Chains that change, empty ones vanish, and one that is added. Few are ever carried out."""

    changes: dict[int, Chain]
    new: Chain = ()

    def of(self, grouping: Grouping) -> Grouping:
        """The grouping after the move."""
        kept = [self.changes.get(g, chain) for g, chain in enumerate(grouping)]
        return tuple([chain for chain in (*kept, self.new) if chain])


class DeviceSpace:
    """Every grouping of every device; alike devices are met once.

    Source: docs/model.md, section 5.4.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster, self.teams = roster, roster.teams
        self._chains: dict[Chain, ChainSet] = {}
        self._near: dict[Grouping, tuple[_Move, ...]] = {}

    def seeds(self, seconds_per_sample: Sequence[float], longest: int) -> list[Grouping]:
        """Data parallel on the fastest devices, chains, single devices, whole nodes as teams.

        Also several chains of about equal speed, of all devices, of some kinds, of teams.

        Args:
            seconds_per_sample: Of the whole model on each team of the roster.
            longest: Most teams of a chain: the number of layers.
        """
        roster, num_devices = self.roster, len(self.roster.devices)
        fastest = sorted(range(num_devices), key=lambda d: (seconds_per_sample[d], d))
        zones: dict[str, list[int]] = {}
        for device in fastest:
            zones.setdefault(roster.devices[device].zone, []).append(device)
        found: list[Grouping] = [(tuple(fastest),), tuple(map(tuple, zones.values()))]
        found += [(tuple(chain),) for chain in zones.values()]
        found += [tuple((d,) for d in fastest[:count]) for count in range(num_devices, 0, -1)]
        found += [((d,),) for d in fastest]
        found += [hands for some in self._of_kinds(fastest) for hands in _hands(some)]
        found += self._team_seeds(seconds_per_sample)
        short = (guess for guess in found if all(len(chain) <= longest for chain in guess))
        return list(dict.fromkeys(map(roster.canonical, short)))

    def _of_kinds(self, fastest: Sequence[int]) -> Iterator[list[int]]:
        """All devices, all but those of the slowest kinds, and those of each kind."""
        kind = [device.kind for device in self.roster.devices]
        kinds = list(dict.fromkeys(kind[d] for d in fastest))
        for k in range(len(kinds), 0, -1):
            yield [d for d in fastest if kind[d] in kinds[:k]]
        for one in kinds[1:]:
            yield [d for d in fastest if kind[d] == one]

    def _team_seeds(self, seconds_per_sample: Sequence[float]) -> Iterator[Grouping]:
        """Teams of one size, as many as there are, each a group by itself or in chains."""
        roster = self.roster
        sizes = sorted({len(members) for members in roster.members} - {1}, reverse=True)
        for size in sizes:
            taken: set[int] = set()
            teams = []
            for team, members in enumerate(roster.members):
                if len(members) == size and not taken & set(members):
                    taken |= set(members)
                    teams.append(team)
            teams.sort(key=lambda team: (seconds_per_sample[team], team))
            yield (tuple(teams),)
            yield from _hands(teams)
            rest = [d for d in range(len(roster.devices)) if d not in taken]
            yield tuple((team,) for team in (*teams, *rest))
            yield from (tuple((t,) for t in teams[:count]) for count in range(1, len(teams) + 1))

    def filled(
        self, state: Grouping, seconds_per_sample: Sequence[float], longest: int
    ) -> tuple[Grouping, ...]:
        """None: moves of single devices find what is left."""
        del state, seconds_per_sample, longest
        return ()

    def by_kind(self, state: Grouping) -> dict[str, Grouping]:
        """Chains over devices of one kind."""
        found: dict[str, list[Chain]] = {}
        for chain in state:
            kinds = {self.teams[team].kind for team in chain}
            if len(kinds) == 1:
                found.setdefault(kinds.pop(), []).append(chain)
        return {kind: self.roster.canonical(tuple(chains)) for kind, chains in found.items()}

    @property
    def layout(self) -> object:
        """See ``Roster.layout``."""
        return self.roster.layout

    def joined(self, states: Sequence[Grouping]) -> Grouping:
        """Groups of several states on unlike devices, side by side."""
        return self.roster.canonical(tuple(chain for state in states for chain in state))

    def near(self, state: Grouping, longest: int, rng: np.random.Generator) -> Iterator[Grouping]:
        """Groupings one move away, at most ``MAX_NEIGHBOURS``; canonical, no doubles.

        Moves: add, drop, replace, relocate, swap, reverse, merge, split, join and part teams.
        """
        raw = self._one_move_away(state)
        seen = {state}
        for index in rng.permutation(len(raw))[:MAX_NEIGHBOURS]:
            near = self.roster.canonical(raw[index].of(state))
            if near not in seen and max(map(len, near), default=0) <= longest:
                seen.add(near)
                yield near

    def _one_move_away(self, grouping: Grouping) -> tuple[_Move, ...]:
        found = self._near.get(grouping)
        if found is None:
            unused = self.unused(grouping)
            found = self._near[grouping] = (
                *_with_unused(grouping, unused),
                *_without(grouping),
                *_moved(grouping),
                *_reshaped(grouping),
                *self._joined(grouping),
                *self._parted(grouping),
            )
        return found

    def shown(self, state: Grouping) -> list[tuple[tuple[Team, ...], int]]:
        """Every chain, once."""
        return [(chain.teams, 1) for chain in self.chains(state)]

    def chains(self, state: Grouping) -> list[ChainSet]:
        """Every chain stands for itself."""
        return [self._chains.get(chain) or self._shown(chain) for chain in state]

    def _shown(self, chain: Chain) -> ChainSet:
        teams = tuple([self.teams[team] for team in chain])
        found = self._chains[chain] = ChainSet(teams, Alike(1, teams, teams))
        return found

    def used(self, state: Grouping) -> list[tuple[int, int]]:
        """Every team of the grouping, once."""
        return [(team, 1) for chain in state for team in chain]

    def of_plan(self, plan: Plan) -> Sequence[Grouping]:
        """The canonical grouping; none when a device has left or its team is not offered."""
        chains = []
        for group in plan.groups:
            chain = []
            for stage in group.stages:
                devices = [self.roster.index_of(d) for d in stage.team.device_ids]
                if None in devices:
                    return ()
                team = self.roster.team_of.get(tuple(sorted(d for d in devices if d is not None)))
                if team is None:
                    return ()
                chain.append(team)
            chains.append(tuple(chain))
        return (self.roster.canonical(tuple(sorted(chains))),)

    def placed(self, trial: Trial, incumbent: Plan | None) -> tuple[Group, ...]:
        """The trial's groups on those of the alike devices that hold their layers already."""
        roster = self.roster
        held = {
            device_id: (g, stage.layers)
            for g, group in enumerate(incumbent.groups if incumbent else ())
            for stage in group.stages
            for device_id in stage.team.device_ids
        }
        index = {device.device_id: d for d, device in enumerate(roster.devices)}
        members = [
            [[index[d] for d in s.team.device_ids] for s in group.stages] for group in trial.groups
        ]
        target = roster.aligned(
            [
                [(d, s.layers) for s, team in zip(group.stages, teams, strict=True) for d in team]
                for group, teams in zip(trial.groups, members, strict=True)
            ],
            held,
        )
        groups = [
            replace(
                group,
                stages=tuple(
                    replace(s, team=self.teams[roster.moved_team(team, target)])
                    for s, team in zip(group.stages, teams, strict=True)
                ),
            )
            for group, teams in zip(trial.groups, members, strict=True)
        ]
        places = {device_id: rank for rank, device_id in enumerate(held)}
        # Known devices keep their rank, so that a change of shares leaves every group in place.
        groups.sort(key=lambda g: min(places.get(d, len(places)) for d in g.device_ids))
        return tuple(groups)

    def unused(self, grouping: Grouping) -> list[int]:
        """Idle devices, one of each set that is alike for this grouping."""
        roster = self.roster
        used = set(roster.devices_of(grouping))
        touched_nodes = {roster.node_of[d] for d in used}
        seen: set[tuple[bool, int, int]] = set()
        found = []
        for device, kind in enumerate(roster.device_class):
            if device in used:
                continue
            node = roster.node_of[device]
            touched = node in touched_nodes
            key = (touched, node if touched else roster.node_class[node], kind)
            if key not in seen:
                seen.add(key)
                found.append(device)
        return found

    def _joined(self, grouping: Grouping) -> Iterator[_Move]:
        """A team twice as large: with its neighbour, another group's, or idle devices."""
        roster = self.roster
        if len(roster.members) == len(roster.devices):
            return
        used = set(roster.devices_of(grouping))
        for g, chain in enumerate(grouping):
            for p, team in enumerate(chain):
                mine = roster.members[team]
                node = roster.node_of[mine[0]]
                idle = [
                    d
                    for (n, _), kin in roster.kin.items()
                    if n == node
                    for d in kin
                    if d not in used
                ]
                if larger := self._union(mine, idle[: len(mine)]):
                    yield _Move({g: (*chain[:p], larger, *chain[p + 1 :])})
                for h, other in enumerate(grouping):
                    for q, partner in enumerate(other):
                        if (h, q) <= (g, p) and (h == g or len(other) == 1):
                            continue
                        if larger := self._union(mine, roster.members[partner]):
                            rest = other[:q] + other[q + 1 :]
                            changes = {g: (*chain[:p], larger, *chain[p + 1 :]), h: rest}
                            if h == g:
                                joined = [larger if i == p else t for i, t in enumerate(chain)]
                                changes = {g: tuple(t for i, t in enumerate(joined) if i != q)}
                            yield _Move(changes)

    def _union(self, one: Sequence[int], two: Sequence[int]) -> int | None:
        """The team of both, if they are equal in number and such a team is offered."""
        if len(one) != len(two):
            return None
        return self.roster.team_of.get(tuple(sorted((*one, *two))))

    def _parted(self, grouping: Grouping) -> Iterator[_Move]:
        """A team in halves: as neighbours, or with one half idle."""
        roster = self.roster
        for g, chain in enumerate(grouping):
            for p, team in enumerate(chain):
                members = roster.members[team]
                half = len(members) // 2
                if not half:
                    continue
                first, second = (roster.team_of.get(m) for m in (members[:half], members[half:]))
                if first is not None and second is not None:
                    yield _Move({g: (*chain[:p], first, second, *chain[p + 1 :])})
                    yield _Move({g: (*chain[:p], first, *chain[p + 1 :])})
                    if len(chain) == 1:
                        yield _Move({g: (first,)}, (second,))


def _hands(order: Sequence[int]) -> Iterator[Grouping]:
    """Two chains and more of about equal speed; alike ones have their stages on one node."""
    return (tuple(dealt_out(order, count)) for count in range(2, len(order) // 2 + 1))


def _with_unused(grouping: Grouping, unused: Sequence[int]) -> Iterator[_Move]:
    for device in unused:
        yield _Move({}, (device,))
        for g, chain in enumerate(grouping):
            for p in range(len(chain) + 1):
                yield _Move({g: (*chain[:p], device, *chain[p:])})
            for p in range(len(chain)):
                yield _Move({g: (*chain[:p], device, *chain[p + 1 :])})


def _without(grouping: Grouping) -> Iterator[_Move]:
    for g, chain in enumerate(grouping):
        if len(grouping) > 1:
            yield _Move({g: ()})
        for p in range(len(chain)):
            if len(chain) > 1:
                yield _Move({g: chain[:p] + chain[p + 1 :]})


def _moved(grouping: Grouping) -> Iterator[_Move]:
    """Relocate one device, or swap two."""
    for g, chain in enumerate(grouping):
        for p, device in enumerate(chain):
            rest = chain[:p] + chain[p + 1 :]
            if rest:
                yield _Move({g: rest}, (device,))
            for h, other in enumerate(grouping):
                target = rest if h == g else other
                for q in range(len(target) + 1):
                    joined = (*target[:q], device, *target[q:])
                    yield _Move({g: joined} if h == g else {g: rest, h: joined})
            for h in range(g, len(grouping)):
                for q in range(len(grouping[h])):
                    if (g, p) < (h, q):
                        yield _swapped(grouping, (g, p), (h, q))


def _swapped(grouping: Grouping, one: tuple[int, int], two: tuple[int, int]) -> _Move:
    (g, p), (h, q) = one, two
    chains = {g: list(grouping[g]), h: list(grouping[h])}
    chains[g][p], chains[h][q] = chains[h][q], chains[g][p]
    return _Move({i: tuple(chain) for i, chain in chains.items()})


def _reshaped(grouping: Grouping) -> Iterator[_Move]:
    """Reverse one or all, split, merge; chains that run the same way share their cuts."""
    if len(grouping) > 1:
        yield _Move({g: chain[::-1] for g, chain in enumerate(grouping)})
    for g, chain in enumerate(grouping):
        if len(chain) > 1:
            yield _Move({g: chain[::-1]})
        for p in range(1, len(chain)):
            yield _Move({g: chain[:p]}, chain[p:])
        for h in range(len(grouping)):
            if h != g:
                yield _Move({g: chain + grouping[h], h: ()})
