"""What a chain of teams can do: its cuts and microbatch sizes, as curves of time over samples.

Shape letters: G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, log
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.cluster import Team
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.plan import Stage
from orchestrator.planning.bisection import bracket
from orchestrator.planning.cost import CostModel
from orchestrator.planning.cutting import Cuts
from orchestrator.planning.groups import GroupCurve
from orchestrator.planning.inflight import MOST_INFLIGHT_RATIO
from orchestrator.planning.partition import busiest_s, cut_options

if TYPE_CHECKING:
    from orchestrator.planning.fading import Fading

SPAN = 1.25
"""Ends of a step, up to this times the least one, that the same options of a chain serve."""

BOUND_SLACK = 1.05
"""How much more a chain may do with cuts, relative to what its pace promises."""

END_TOLERANCE = 1e-3
"""Relative; how closely ``common_end`` finds the end of a step."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to cut a chain and to size its microbatches."""

    stages: tuple[Stage, ...]
    microbatch: int
    curve: GroupCurve
    fill_drain_s: float  # as in the curve, here for speed
    samples_per_s: float  # of the steady period
    most_samples: int  # as far as memory goes

    def samples_by(self, time_s: float) -> float:
        """Samples done by a time, as a continuous figure."""
        further_s = time_s - self.fill_drain_s
        if further_s < 0:
            return self.microbatch * time_s / self.fill_drain_s
        return min(self.most_samples, self.microbatch + further_s * self.samples_per_s)


class _Form(NamedTuple):
    """An option of every chain of alike teams: its stages without their teams."""

    ranges: tuple[tuple[int, int, int, bool], ...]  # first layer, end layer, K_s, recompute
    option: Option

    def on(self, teams: Sequence[Team]) -> Option:
        """The same on these teams."""
        stages = tuple(
            [
                Stage(team, first, end, inflight, recompute=recompute)
                for team, (first, end, inflight, recompute) in zip(teams, self.ranges, strict=True)
            ]
        )
        return replace(self.option, stages=stages)


class Pace(NamedTuple):
    """How fast a chain is at a microbatch size: 0 where memory does not hold one."""

    samples_per_s: float
    behind: float  # samples that it would do while it fills and drains

    def samples_by(self, time_s: float, microbatch: int) -> float:
        """About the samples done by a time."""
        full_s = (microbatch + self.behind) / self.samples_per_s if self.samples_per_s else inf
        if time_s < full_s:
            return microbatch * time_s / full_s
        return time_s * self.samples_per_s - self.behind


_Key = tuple[object, ...]


class Curves:
    """The options of chains; kept once computed, for all chains of alike teams.

    Source: docs/model.md, sections 3.2 and 5.3.
    """

    def __init__(self, cost: CostModel, before: "Curves | None" = None) -> None:
        """``before``: of an earlier cost model that ``cost`` follows."""
        self._cost, problem = cost, cost.problem
        self._batch = problem.batch_samples
        self.sizes = microbatch_sizes(problem.microbatch_samples)
        self._options: dict[_Key, tuple[Option, ...]] = {}
        new = cost.memories.new
        self._forms: Fading[_Key, tuple[_Form, ...]] = before._forms if before else new()
        self._paces: Fading[_Key, tuple[Pace, ...]] = before._paces if before else new()
        self._seconds: Fading[int, tuple[float, ...]] = before._seconds if before else new()
        self._roomy: Fading[tuple[int, int], bool] = before._roomy if before else new()

    def of(
        self, teams: tuple[Team, ...], schedule: str, end_s: float, *, replicated: bool
    ) -> tuple[Option, ...]:
        """Cuts and sizes that do most samples by about such an end; () when none fits.

        Microbatch sizes that promise less at ends within ``SPAN`` are not cut.
        """
        span = ceil(log(end_s) / log(SPAN))
        key = (teams, schedule, span, replicated)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._build(teams, schedule, span, replicated=replicated)
        return found

    def _build(
        self, teams: tuple[Team, ...], schedule: str, span: int, *, replicated: bool
    ) -> tuple[Option, ...]:
        key = (self._cost.chain_key(teams), schedule, span, replicated)
        forms = self._forms[key]
        if forms is not None:
            return tuple([form.on(teams) for form in forms])
        ends_s = (SPAN ** (span - 1), SPAN**span)
        most_cut = 1 if self._is_roomy(teams) else len(self.sizes)
        paces = self._build_paces(teams, most_cut)
        promised = [
            (tuple([BOUND_SLACK * pace.samples_by(end_s, size) for end_s in ends_s]), size)
            for pace, size in zip(paces, self.sizes, strict=False)
        ]
        options: list[Option] = []
        done = (0.0,) * len(ends_s)
        for most, size in sorted(promised, reverse=True):
            if not _exceeds(most, done):
                continue
            for cuts in _few(cut_options(self._cost, teams, size, schedule)):
                if not _exceeds([_most(cuts, size, end_s) for end_s in ends_s], done):
                    continue
                stages = _stages(teams, cuts.borders)
                option = self.sized(stages, size, schedule, replicated=replicated)
                if option:
                    options.append(option)
                    mine = map(option.samples_by, ends_s)
                    done = tuple(map(max, done, mine))
        kept = _envelope(options)
        self._forms[key] = tuple(
            _Form(tuple((s.first_layer, s.end_layer, s.inflight, s.recompute) for s in o.stages), o)
            for o in kept
        )
        return kept

    def sized(
        self, stages: tuple[Stage, ...], size: int, schedule: str, *, replicated: bool
    ) -> Option | None:
        """The option of these cuts and this microbatch; None when memory holds not even one."""
        most = -(-self._batch // size)
        stages = self._cost.with_inflight(stages, size, most, schedule, replicated=replicated)
        curve = self._cost.curve(stages, size, schedule, replicated=replicated)
        if not curve.max_microbatches:
            return None
        return Option(
            stages,
            size,
            curve,
            fill_drain_s=curve.fill_drain_s,
            samples_per_s=size / curve.period_s,
            most_samples=size * curve.max_microbatches,
        )

    def paces(self, teams: tuple[Team, ...]) -> tuple[Pace, ...]:
        """About how fast a chain is at each of ``sizes``, before it has cuts; () if none fits.

        It is cut so that the busiest stage lasts least at the largest size that fits and, where
        memory binds, at the next one; at smaller ones that stage takes as much of the whole
        model's time. All other stages are taken to last as long as if cuts were continuous.
        """
        key = self._cost.chain_key(teams)
        found = self._paces[key]
        if found is None:
            found = self._build_paces(teams, 1 if self._is_roomy(teams) else 2)
            self._paces[key] = found
        return found

    def _build_paces(self, teams: tuple[Team, ...], most_cut: int) -> tuple[Pace, ...]:
        seconds = [self.seconds_per_sample(team) for team in teams]
        slowest = max(seconds)
        found: list[Pace] = []
        num_cut, rate = 0, 0.0
        for i, size in enumerate(self.sizes):
            if num_cut < most_cut:
                rate = size / busiest_s(self._cost, teams, size)
                num_cut += rate > 0
            else:
                rate *= slowest[i - 1] / slowest[i]
            continuous = sum([1 / each[i] for each in seconds])
            found.append(Pace(rate, size * max(0.0, len(teams) * rate / continuous - 1)))
        return tuple(found) if num_cut else ()

    def seconds_per_sample(self, team: Team) -> tuple[float, ...]:
        """Of the whole model on a team, at each of ``sizes``."""
        key = self._cost.alike(team)
        found = self._seconds[key]
        if found is None:
            num_layers = self._cost.problem.model.num_layers
            found = self._seconds[key] = tuple(
                sum(self._cost.stage_seconds(team, 0, num_layers, size)) / size
                for size in self.sizes
            )
        return found

    def _is_roomy(self, teams: Sequence[Team]) -> bool:
        """Whether memory never binds."""
        return all(self._holds_all(team, len(teams)) for team in teams)

    def _holds_all(self, team: Team, num_stages: int) -> bool:
        """Whether a team could hold the whole model, and as much in flight as the first stage."""
        key = (self._cost.alike(team), num_stages)
        found = self._roomy[key]
        if found is None:
            whole = Stage(team, 0, self._cost.problem.model.num_layers)
            held = self._cost.memory.max_held(whole, self.sizes[0])
            found = self._roomy[key] = held >= MOST_INFLIGHT_RATIO * num_stages
        return found


def _few(cuts: Sequence[Cuts]) -> list[Cuts]:
    """The shortest period, the least time in all, and one between; polish finds the others."""
    return list(dict.fromkeys(cuts[i] for i in (0, len(cuts) // 2, len(cuts) - 1))) if cuts else []


def _most(cuts: Cuts, microbatch: int, time_s: float) -> float:
    """The samples that cuts allow at most by a time."""
    further_s = time_s - cuts.fill_drain_s
    if further_s < 0:
        return microbatch * time_s / cuts.fill_drain_s
    return microbatch * (1 + further_s / cuts.busiest_s)


def _exceeds(most: Sequence[float], done: Sequence[float]) -> bool:
    """Whether more may be done by some time."""
    return any(one > known for one, known in zip(most, done, strict=True))


def _stages(teams: Sequence[Team], cuts: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(
        Stage(team, first, end) for team, (first, end) in zip(teams, pairwise(cuts), strict=True)
    )


def common_end(
    options_G: Sequence[Sequence[Option]], count_G: Sequence[int], batch_samples: int
) -> tuple[float, list[Option]]:
    """When all groups have done the batch, each by the option that does most by then.

    Args:
        options_G: Of every group, or of one that stands for several alike.
        count_G: How many it stands for.
        batch_samples: X.

    Returns:
        The time, infinite when memory caps the shares below the batch, and the options.
    """
    latest_s = max(
        o.fill_drain_s + batch_samples / o.samples_per_s for options in options_G for o in options
    )
    end_s = _uncapped_end_s(options_G, count_G, batch_samples, latest_s)

    def done_by(time_s: float) -> float:
        return sum(
            [
                count * max([option.samples_by(time_s) for option in options])
                for options, count in zip(options_G, count_G, strict=True)
            ]
        )

    if done_by(end_s) < batch_samples * (1 - END_TOLERANCE):  # memory caps some shares
        if done_by(latest_s) < batch_samples:
            return inf, []
        _, end_s = bracket(
            lambda time_s: done_by(time_s) >= batch_samples,
            end_s,
            latest_s,
            tolerance=END_TOLERANCE,
        )
    return end_s, [max(options, key=lambda o: o.samples_by(end_s)) for options in options_G]


def _uncapped_end_s(
    options_G: Sequence[Sequence[Option]],
    count_G: Sequence[int],
    batch_samples: int,
    latest_s: float,
) -> float:
    """The end if memory held any share: convex, so that Newton's steps come down to it."""
    end_s, step_s = latest_s, inf
    while step_s > END_TOLERANCE * end_s:
        done = per_s = 0.0
        for options, count in zip(options_G, count_G, strict=True):
            most = grows = 0.0
            for o in options:
                further_s = end_s - o.fill_drain_s
                if further_s < 0:
                    mine, per = o.microbatch * end_s / o.fill_drain_s, o.microbatch / o.fill_drain_s
                else:
                    mine, per = o.microbatch + further_s * o.samples_per_s, o.samples_per_s
                if mine > most:
                    most, grows = mine, per
            done += count * most
            per_s += count * grows
        step_s = (done - batch_samples) / per_s
        end_s -= step_s
    return end_s


def _envelope(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options not beaten by another one in both the first sample's time and the rate."""
    kept: list[Option] = []
    order = sorted(
        options,
        key=lambda o: (o.fill_drain_s - o.curve.period_s, -o.samples_per_s, -o.microbatch),
    )
    for option in order:
        if not kept or option.samples_per_s > kept[-1].samples_per_s * (1 + 1e-12):
            kept.append(option)
    return tuple(kept)
