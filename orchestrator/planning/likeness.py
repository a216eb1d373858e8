"""Which teams, links and chains of one problem are alike: what is computed of one serves all."""

from itertools import pairwise

from orchestrator.core.cluster import Device, Link, Team
from orchestrator.core.plan import Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.fading import Memories
from orchestrator.planning.identity import ByIdentity
from orchestrator.planning.memory import MemoryModel
from orchestrator.planning.tables import LayerTables

KEY_LENGTH = 4
"""Numbers of a stage in the key of a chain: its team, its first layer (less than 0 where it
recomputes), links to the next."""


class Likeness:
    """Numbers that alike things share, and keys made of them."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.tables = LayerTables(problem.model)
        self.memories = Memories()
        self._numbers: dict[tuple[object, ...], int] = {}  # of teams and of links
        self._look_anew(problem, MemoryModel(problem, self.tables))

    def _look_anew(self, problem: PlanningProblem, memory: MemoryModel) -> None:
        """Turn to a problem with the same model; numbers stay, but not who has them."""
        self.problem, self.memory = problem, memory
        self._alike: dict[tuple[str, ...], int] = {}
        self._chain_keys: ByIdentity[tuple[Team, ...], tuple[int, ...]] = ByIdentity()
        self._keys: ByIdentity[tuple[Stage, ...], tuple[int, ...]] = ByIdentity()
        self._borders: dict[tuple[str, str], tuple[int, int]] = {}
        self._slowdowns: dict[tuple[str, ...], float] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def device(self, team: Team) -> Device:
        """The first member of a team: the endpoint of its links."""
        return self.problem.cluster.device(team.device_ids[0])

    def link(self, source: Team, target: Team) -> Link:
        """The path between two teams. Raises ValueError when nobody described it."""
        key = (source.device_ids[0], target.device_ids[0])
        if key not in self._links:
            self._links[key] = self.problem.cluster.link(self.device(source), self.device(target))
        return self._links[key]

    def alike(self, team: Team) -> int:
        """A number that teams share when their times and memory are equal."""
        found = self._alike.get(team.device_ids)
        if found is None:
            slowness = self.slowdown(team), self.input_s(team)
            figures = (team.kind, team.size, *slowness, self.memory.usable_bytes(team))
            found = self._numbers.setdefault(figures, len(self._numbers))
            self._alike[team.device_ids] = found
        return found

    def chain_key(self, teams: tuple[Team, ...]) -> tuple[int, ...]:
        """What the cuts and curves of a chain of teams depend on."""
        return self._chain_keys.of(teams, self._chain_key)

    def _chain_key(self, teams: tuple[Team, ...]) -> tuple[int, ...]:
        found = [self.alike(team) for team in teams]
        for source, target in pairwise(teams):
            found += self._border(source, target)
        return tuple(found)

    def key(self, stages: tuple[Stage, ...]) -> tuple[int, ...]:
        """What the figures of a chain depend on: teams, links between them, cuts."""
        return self._keys.of(stages, self._key)

    def _key(self, stages: tuple[Stage, ...]) -> tuple[int, ...]:
        found: list[int] = []
        last: Team | None = None
        for stage in stages:
            if last is not None:
                found += self._border(last, stage.team)
            last = stage.team
            first = ~stage.first_layer if stage.recompute else stage.first_layer
            found += (self.alike(last), first)
        found.append(stages[-1].end_layer)
        return tuple(found)

    def shifted(self, stages: tuple[Stage, ...], s: int, border: int) -> tuple[Stage, ...]:
        """The stages when one of them ends at another border, and the next one begins there."""
        upper, lower = stages[s], stages[s + 1]
        moved = (
            *stages[:s],
            Stage(upper.team, upper.first_layer, border, recompute=upper.recompute),
            Stage(lower.team, border, lower.end_layer, recompute=lower.recompute),
            *stages[s + 2 :],
        )
        key, place = self.key(stages), KEY_LENGTH * (s + 1) + 1
        first = ~border if lower.recompute else border
        self.same_key(moved, (*key[:place], first, *key[place + 1 :]))
        return moved

    def same_key(self, stages: tuple[Stage, ...], key: tuple[int, ...]) -> None:
        """Take note of the key of stages made from others: working it out takes longer."""
        self._keys.of(stages, lambda _: key)

    def _border(self, source: Team, target: Team) -> tuple[int, int]:
        """Numbers of the links there and back: equal links share one."""
        ends = (source.device_ids[0], target.device_ids[0])
        found = self._borders.get(ends)
        if found is None:
            both = (self.link(source, target), self.link(target, source))
            down, up = (self._numbers.setdefault(link.figures, len(self._numbers)) for link in both)
            found = self._borders[ends] = (down, up)
        return found

    def slowdown(self, team: Team) -> float:
        """That of its slowest member."""
        found = self._slowdowns.get(team.device_ids)
        if found is None:
            found = max(self.problem.cluster.device(d).slowdown for d in team.device_ids)
            self._slowdowns[team.device_ids] = found
        return found

    def input_s(self, team: Team) -> float:
        """What a stage of the team takes to draw a sample, where it draws any."""
        return max(self.problem.cluster.device(d).input_s_per_sample for d in team.device_ids)
