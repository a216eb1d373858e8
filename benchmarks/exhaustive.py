"""The best plan of all, by branch and bound: the reference that the search is held to.

Every grouping of devices into chains of teams, every cut, every microbatch size; shares by
exact water-filling. What cannot beat the best so far is left out by bounds that hold for the
exact time of 1F1B: no stage ends before the first microbatch has reached it, all its work is
done, and the last gradient has gone back.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from orchestrator.core.cluster import Team
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option
from orchestrator.planning.dealing import deal
from orchestrator.planning.event import retime
from orchestrator.planning.roster import Grouping
from orchestrator.strategies.explorer import device_space

MAX_COMBINATIONS = 100_000
"""Of cuts and sizes that a grouping may leave after the bounds."""

LIMIT_S = 30.0
"""CPU time after which a problem counts as too large."""


class TooLargeError(Exception):
    """The bounds leave too much to try."""


class _Way(NamedTuple):
    """A chain with cuts and size, and the lines below which none of its stages can end."""

    option: Option
    lines: tuple[tuple[float, float], ...]  # start and drain, seconds per sample
    update_s: float

    def samples_by(self, time_s: float) -> float:
        most = min((time_s - first) / each for first, each in self.lines)
        return min(self.option.most_samples, most)


class Exhaustive:
    """Looks for a plan better than a given score."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem, self._cost = problem, CostModel(problem)
        self._space, self._curves = device_space(problem), Curves(self._cost)
        self._sizes = microbatch_sizes(problem.microbatch_samples)
        self._ways: dict[tuple[object, ...], list[_Way]] = {}
        self._rates: dict[tuple[Team, ...], float] = {}
        self.num_groupings = self.num_evaluated = 0

    def best(self, floor: float) -> float:
        """The largest J of any plan, or ``floor`` when there is none above it.

        Raises:
            TooLargeError: If the bounds leave too much to try.
        """
        end_s = time.process_time() + LIMIT_S
        for grouping in self._groupings():
            if time.process_time() > end_s:
                raise TooLargeError
            self.num_groupings += 1
            floor = max(floor, self._best_of(grouping, floor))
        return floor

    def _groupings(self) -> Iterator[Grouping]:
        """All canonical ones: from nothing, one team more at a time."""
        roster = self._space.roster  # type: ignore[attr-defined]  # of the device level
        todo: list[Grouping] = [()]
        seen: set[Grouping] = {()}
        while todo:
            grouping = todo.pop()
            used = set(roster.devices_of(grouping))
            for team, members in enumerate(roster.members):
                if used & set(members):
                    continue
                for wider in _with(grouping, team, self._problem.model.num_layers):
                    near = roster.canonical(wider)
                    if near not in seen:
                        seen.add(near)
                        todo.append(near)
                        yield near

    def _best_of(self, grouping: Grouping, floor: float) -> float:
        problem, cost = self._problem, self._cost
        chains = [tuple(self._space.teams[t] for t in chain) for chain in grouping]
        price = cost.devices_usd_per_s([d for c in chains for t in c for d in t.device_ids])
        needed = floor + problem.backlog_usd * price
        limit_s = inf if needed <= 0 else problem.penalty_weight * problem.batch_samples / needed
        free_s = limit_s - problem.model.step_overhead_s
        most_G = [free_s * self._rate(teams) for teams in chains]
        if sum(most_G) < problem.batch_samples:
            return floor
        ways_G = []
        for g, teams in enumerate(chains):
            least = problem.batch_samples - sum(most for h, most in enumerate(most_G) if h != g)
            ways = [
                way
                for way in self._ways_of(teams, free_s, max(1.0, least), len(chains) > 1)
                if way.samples_by(free_s - way.update_s) >= max(1.0, least)
            ]
            if not ways:
                return floor
            ways_G.append(ways)
            most_G[g] = min(most_G[g], max(way.samples_by(free_s - way.update_s) for way in ways))
        if np.prod([float(len(ways)) for ways in ways_G]) > MAX_COMBINATIONS:
            raise TooLargeError
        for chosen in product(*ways_G):
            floor = max(floor, self._best_with(chosen, free_s, floor))
        return floor

    def _best_with(self, ways: Sequence[_Way], free_s: float, floor: float) -> float:
        """The best score with these cuts and sizes."""
        batch, cost = self._problem.batch_samples, self._cost
        left_s = free_s - max(way.update_s for way in ways)
        if sum(way.samples_by(left_s) for way in ways) < batch:
            return floor
        stand_ins = [Group(way.option.stages, (1,)) for way in ways]
        left_s -= cost.evaluate(stand_ins, "1f1b").sync_s
        if sum(max(0.0, way.samples_by(left_s)) for way in ways) < batch:
            return floor
        self.num_evaluated += 1
        for fine in (False, True):
            dealt = deal([w.option for w in ways], [1] * len(ways), batch, fine=fine)
            if dealt is None:
                continue
            groups = [Group(ways[d.set_index].option.stages, d.microbatches) for d in dealt]
            if cost.memory_error(groups, "1f1b") is None:
                floor = max(floor, cost.score(retime(cost, groups, "1f1b")))
        return floor

    def _rate(self, teams: tuple[Team, ...]) -> float:
        """Samples a second that a chain cannot exceed: each layer where it is fastest."""
        found = self._rates.get(teams)
        if found is None:
            found = self._rates[teams] = max(
                size / _least_bottleneck_s(self._cost, teams, size) for size in self._sizes
            )
        return found

    def _ways_of(
        self, teams: tuple[Team, ...], limit_s: float, least: float, replicated: bool
    ) -> list[_Way]:
        """Cuts and sizes whose busiest stage does at least ``least`` samples by ``limit_s``."""
        found = []
        for size in self._sizes:
            most_s = limit_s * size / least
            for cuts in _cuts(self._cost, teams, size, most_s):
                key = (teams, cuts, size, replicated)
                if key not in self._ways:
                    self._ways[key] = self._way(teams, cuts, size, replicated)
                found += self._ways[key]
        return found

    def _way(
        self, teams: tuple[Team, ...], cuts: tuple[int, ...], size: int, replicated: bool
    ) -> list[_Way]:
        cost = self._cost
        ends = (*cuts[1:], self._problem.model.num_layers)
        stages = tuple(
            Stage(t, first, end) for t, first, end in zip(teams, cuts, ends, strict=True)
        )
        option = self._curves.sized(stages, size, "1f1b", replicated=replicated)
        if option is None:
            return []
        lines, ahead_s = [], 0.0
        for s, stage in enumerate(stages):
            work_s = sum(cost.stage_seconds(stage.team, stage.first_layer, stage.end_layer, size))
            lines.append((ahead_s, work_s / size))
            ahead_s += sum(cost.stage_seconds(stage.team, stage.first_layer, stage.end_layer, 1))
            if s + 1 < len(stages):
                boundary = cost.tables.boundary_bytes(stage.end_layer - 1, 1)
                below = stages[s + 1].team
                ahead_s += cost.link(stage.team, below).transfer_s(boundary)
                ahead_s += cost.link(below, stage.team).transfer_s(boundary)
        update_s = cost.figures(Group(option.stages, (1,)), "1f1b").update_s
        return [_Way(option, tuple(lines), update_s)]


def _with(grouping: Grouping, team: int, longest: int) -> Iterator[Grouping]:
    """One team more: as a group, or anywhere in a chain."""
    yield (*grouping, (team,))
    for g, chain in enumerate(grouping):
        if len(chain) < longest:
            for p in range(len(chain) + 1):
                yield (*grouping[:g], (*chain[:p], team, *chain[p:]), *grouping[g + 1 :])


def _work_s(
    cost: CostModel, team: Team, size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Forward plus backward of all layers before each border."""
    times = cost.tables.times(team.kind, team.size, size)
    return cost.slowdown(team) * (np.asarray(times.forward_s) + np.asarray(times.backward_s))


def _least_bottleneck_s(cost: CostModel, teams: Sequence[Team], size: int) -> float:
    """Least time of the busiest stage over all cuts, links and memory aside."""
    least_J = _work_s(cost, teams[0], size)
    least_J = np.where(np.arange(len(least_J)) > 0, least_J, inf)
    for team in teams[1:]:
        prefix = _work_s(cost, team, size)
        stage_IJ = prefix[None, :] - prefix[:, None]
        stage_IJ = np.where(stage_IJ > 0, stage_IJ, inf)
        least_J = np.maximum(least_J[:, None], stage_IJ).min(axis=0)
    return float(least_J[-1])


def _cuts(
    cost: CostModel, teams: Sequence[Team], size: int, most_s: float
) -> Iterator[tuple[int, ...]]:
    """First layers of the stages of every cut whose busiest stage takes at most ``most_s``."""
    work = [_work_s(cost, team, size) for team in teams]
    num_layers = len(work[0]) - 1

    def rest(stage: int, first: int) -> Iterator[tuple[int, ...]]:
        if stage == len(teams) - 1:
            if work[stage][num_layers] - work[stage][first] <= most_s:
                yield (first,)
            return
        for end in range(first + 1, num_layers - (len(teams) - stage - 2)):
            if work[stage][end] - work[stage][first] > most_s:
                return
            for tail in rest(stage + 1, end):
                yield (first, *tail)

    return rest(0, 0)
