"""A tentative grouping gets cuts, microbatch sizes and shares, and is told what they are worth.

Shape letters: G groups.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import inf

from orchestrator.core.cluster import Team
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.cost import CostModel, GroupCurve
from orchestrator.planning.grouping import Chain, Grouping, Roster
from orchestrator.planning.partition import partition
from orchestrator.planning.waterfill import as_microbatches, deal_samples

FINE_MICROBATCHES = 16
"""Microbatches a group, on average, below which shares are also dealt sample by sample."""

Evaluate = Callable[[Sequence[Group], str], StepEstimate]
"""Groups and schedule to estimate: in closed form, or exactly."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A grouping with cuts and shares, and what the cost model says of it."""

    grouping: Grouping
    schedule: str
    groups: tuple[Group, ...]
    estimate: StepEstimate


@dataclass(frozen=True, slots=True)
class _Option:
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


class Evaluator:
    """Turns groupings into trials; what is computed once is kept.

    Knows neither V nor Q: whatever they are, a problem in the same state of the cluster can
    go on with it (``serves``).

    Source: docs/model.md, sections 5.1, 5.3 and 5.4.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._state = _without_money(problem)
        self.cost, self.roster = CostModel(problem), Roster(problem.cluster)
        self.num_layers = problem.model.num_layers
        self._batch, self._schedules = problem.batch_samples, problem.schedules
        self._sizes = microbatch_sizes(problem.microbatch_samples)
        self._cuts: dict[tuple[Chain, str], tuple[tuple[int, ...], ...]] = {}
        self._options: dict[tuple[Chain, str, bool], tuple[_Option, ...]] = {}
        self._choices: dict[tuple[Grouping, str], tuple[float, list[_Option]]] = {}
        self._trials: dict[Grouping, tuple[Trial, ...]] = {}
        self._old_prices: dict[Grouping, tuple[Trial, ...]] = {}
        self.seconds_per_sample = [
            min(
                sum(self.cost.stage_seconds(team, 0, self.num_layers, size)) / size
                for size in self._sizes
            )
            for team in self.roster.teams
        ]
        """Of the whole model on each device of the roster, at its best microbatch size."""

    def serves(self, problem: PlanningProblem) -> bool:
        """Whether the problem differs in money, incumbent and time of day at most."""
        return self._state == _without_money(problem)

    def repriced(self, problem: PlanningProblem) -> "Evaluator | None":
        """One for a problem in which nothing but prices changed: cuts and shares stay.

        None where more changed, or where the new prices number the devices differently.
        """
        if _without_prices(self._state) != _without_prices(_without_money(problem)):
            return None
        roster = Roster(problem.cluster)
        if roster.teams != self.roster.teams:
            return None
        other = copy(self)
        other._state = _without_money(problem)
        other.cost, other.roster = self.cost.repriced(problem), roster
        other._trials, other._old_prices = {}, {**self._old_prices, **self._trials}
        return other

    def trials(self, grouping: Grouping) -> tuple[Trial, ...]:
        """The grouping with its best cuts and shares, one trial a schedule; () when none fits.

        A schedule whose pipelines promise no more than those of one before it is left out.
        """
        found = self._trials.get(grouping)
        if found is None and grouping in self._old_prices:
            found = self._trials[grouping] = tuple(
                replace(trial, estimate=self.cost.evaluate(trial.groups, trial.schedule))
                for trial in self._old_prices.pop(grouping)
            )
        if found is None:
            every: list[Trial] = []
            least_s = inf
            for schedule in self._schedules:
                end_s, _ = self._choice(grouping, schedule)
                if end_s < least_s and (trial := self._assembled(grouping, schedule)):
                    every.append(trial)
                    least_s = end_s
            found = self._trials[grouping] = tuple(every)
        return found

    def seen(self) -> list[Trial]:
        """Every trial so far."""
        return [trial for trials in self._trials.values() for trial in trials]

    def recut(self, trial: Trial) -> Iterator[Trial]:
        """Trials with one cut moved by one layer, in a group or in all that share it."""
        groups, replicated = trial.groups, len(trial.groups) > 1
        cuts = sorted({stage.first_layer for group in groups for stage in group.stages[1:]})
        for cut, step in product(cuts, (-1, 1)):
            moved = [_shifted(group.stages, cut, step) for group in groups]
            movable = [g for g, stages in enumerate(moved) if stages]
            for chosen in [*([g] for g in movable), movable] if len(movable) > 1 else [movable]:
                changed = list(groups)
                for g in chosen:
                    share = groups[g].microbatches
                    stages = self.cost.with_inflight(
                        moved[g], max(share), len(share), trial.schedule, replicated=replicated
                    )
                    changed[g] = Group(stages, share)
                if chosen and (found := self._priced(trial, tuple(changed), self.cost.evaluate)):
                    yield found

    def variations(self, trial: Trial, evaluate: Evaluate) -> Iterator[Trial]:
        """Trials that differ by a boundary and a microbatch size, or by a few samples.

        Args:
            trial: Where to start.
            evaluate: Says what each is worth.
        """
        for groups in (*self._resized(trial), *self._reshared(trial)):
            if found := self._priced(trial, groups, evaluate):
                yield found

    # Cuts and shares -----------------------------------------------------------------

    def least_s(self, grouping: Grouping) -> float:
        """About the least step time: pipelines alone, shares not whole; infinite when none fits."""
        return min(
            (self._choice(grouping, schedule)[0] for schedule in self._schedules), default=inf
        )

    def _choice(self, grouping: Grouping, schedule: str) -> tuple[float, list[_Option]]:
        """The common end of all pipelines, and the cuts and sizes that reach it."""
        key = (grouping, schedule)
        found = self._choices.get(key)
        if found is None:
            replicated = len(grouping) > 1
            options_G = [self._options_of(chain, schedule, replicated) for chain in grouping]
            fits = all(options_G) and self._batch >= len(grouping)
            found = _common_end(options_G, self._batch) if fits else (inf, [])
            self._choices[key] = found
        return found

    def _assembled(self, grouping: Grouping, schedule: str) -> Trial | None:
        _, chosen_G = self._choice(grouping, schedule)
        empty = Trial(grouping, schedule, (), IDLE_ESTIMATE)
        every = (
            self._priced(empty, groups, self.cost.evaluate)
            for groups in self._deals(chosen_G, schedule)
        )
        return min((t for t in every if t), key=lambda t: t.estimate.step_s, default=None)

    def _options_of(self, chain: Chain, schedule: str, replicated: bool) -> tuple[_Option, ...]:
        """Cuts and microbatch sizes of a chain that another option does not beat at every share."""
        key = (chain, schedule, replicated)
        found = self._options.get(key)
        if found is None:
            every = []
            for cuts in self._cuts_of(chain, schedule):
                stages = tuple(
                    Stage(self.roster.teams[d], first, end)
                    for d, (first, end) in zip(chain, pairwise(cuts), strict=True)
                )
                every += [self._sized(stages, size, schedule, replicated) for size in self._sizes]
            found = self._options[key] = _envelope([option for option in every if option])
        return found

    def _cuts_of(self, chain: Chain, schedule: str) -> tuple[tuple[int, ...], ...]:
        """Cuts from dynamic programming, shared by alike devices and all microbatch sizes."""
        (alike,) = self.roster.canonical((chain,))
        key = (alike, schedule)
        found = self._cuts.get(key)
        if found is None:
            teams = tuple(self.roster.teams[d] for d in alike)
            found = self._cuts[key] = tuple(
                (0, *(stage.end_layer for stage in stages))
                for stages in self._partitions(teams, schedule)
            )
        return found

    def _partitions(self, teams: tuple[Team, ...], schedule: str) -> tuple[tuple[Stage, ...], ...]:
        """Those at the largest microbatch that fits."""
        found = (partition(self.cost, teams, size, schedule) for size in self._sizes)
        return next((cuts for cuts in found if cuts), ())

    def _sized(
        self, stages: tuple[Stage, ...], size: int, schedule: str, replicated: bool
    ) -> _Option | None:
        most = -(-self._batch // size)
        stages = self.cost.with_inflight(stages, size, most, schedule, replicated=replicated)
        curve = self.cost.curve(stages, size, schedule, replicated=replicated)
        if not curve.max_microbatches:
            return None
        return _Option(
            stages,
            size,
            curve,
            fill_drain_s=curve.fill_drain_s,
            samples_per_s=size / curve.period_s,
            most_samples=size * curve.max_microbatches,
        )

    def _deals(self, chosen_G: Sequence[_Option], schedule: str) -> Iterator[tuple[Group, ...]]:
        """Whole microbatches, and single samples where few microbatches make whole ones coarse."""
        if not chosen_G:
            return
        microbatches = min(self._batch / o.microbatch for o in chosen_G)
        coarse = len(chosen_G) > 1 and microbatches < FINE_MICROBATCHES * len(chosen_G)
        for fine in (False, True) if coarse else (False,):
            if dealt := self._dealt(chosen_G, schedule, fine=fine):
                yield dealt

    def _dealt(
        self, chosen_G: Sequence[_Option], schedule: str, *, fine: bool
    ) -> tuple[Group, ...] | None:
        shares_G: tuple[tuple[int, ...], ...]
        if len(chosen_G) == 1:
            shares_G = (as_microbatches(self._batch, chosen_G[0].microbatch),)
        else:
            try:
                shares_G = deal_samples(
                    [o.curve.fill_drain_s for o in chosen_G],
                    [o.curve.period_s for o in chosen_G],
                    [o.microbatch for o in chosen_G],
                    self._batch,
                    [o.curve.max_microbatches for o in chosen_G],
                    fine=fine,
                )
            except ValueError:  # memory caps the shares below the batch
                return None
        return tuple(
            self._group(option.stages, share, schedule)
            for option, share in zip(chosen_G, shares_G, strict=True)
        )

    def _group(self, stages: tuple[Stage, ...], share: tuple[int, ...], schedule: str) -> Group:
        if schedule == "gpipe":
            stages = self.cost.with_inflight(stages, share[0], len(share), schedule)
        return Group(stages, share)

    def _priced(self, trial: Trial, groups: tuple[Group, ...], evaluate: Evaluate) -> Trial | None:
        """The trial with other groups; None when they do not fit memory."""
        if self.cost.memory_error(groups, trial.schedule) is not None:
            return None
        return replace(trial, groups=groups, estimate=evaluate(groups, trial.schedule))

    # Small variations ----------------------------------------------------------------

    def _resized(self, trial: Trial) -> Iterator[tuple[Group, ...]]:
        """Boundaries one layer on and other microbatch sizes; shares are dealt anew."""
        schedule, replicated = trial.schedule, len(trial.groups) > 1
        options_G = [
            self._sized(group.stages, group.microbatches[0], schedule, replicated)
            for group in trial.groups
        ]
        for g, group in enumerate(trial.groups):
            here = (group.stages, group.microbatches[0])
            cuts = [stage.first_layer for stage in group.stages[1:]]
            moved = [_shifted(group.stages, cut, step) for cut, step in product(cuts, (-1, 1))]
            for stages, size in product((group.stages, *moved), self._sizes):
                if not stages or (stages, size) == here:
                    continue
                option = self._sized(stages, size, schedule, replicated)
                chosen = [o for o in (*options_G[:g], option, *options_G[g + 1 :]) if o]
                if len(chosen) == len(options_G):
                    yield from self._deals(chosen, schedule)

    def _reshared(self, trial: Trial) -> Iterator[tuple[Group, ...]]:
        """Samples from the group that ends last to each other group."""
        groups, ends_s = trial.groups, trial.estimate.group_s
        giver = ends_s.index(max(ends_s))
        size = groups[giver].microbatches[0]
        for taker in range(len(groups)):
            for count in dict.fromkeys((1, size // 2, size)):
                if taker == giver or not 0 < count < groups[giver].num_samples:
                    continue
                changed = list(groups)
                for g, more in ((giver, -count), (taker, count)):
                    samples, most = groups[g].num_samples + more, max(groups[g].microbatches)
                    share = as_microbatches(samples, most)
                    changed[g] = self._group(groups[g].stages, share, trial.schedule)
                yield tuple(changed)


def _without_money(problem: PlanningProblem) -> PlanningProblem:
    """The problem as far as times, rates and costs of plans go."""
    return replace(
        problem,
        cluster=replace(problem.cluster, now_s=0.0),
        penalty_weight=1.0,
        backlog_usd=0.0,
        budget_usd_per_s=0.0,
        incumbent=None,
        seed=0,
    )


def _without_prices(problem: PlanningProblem) -> PlanningProblem:
    """The problem as far as times and memory go."""
    offers = tuple(
        replace(offer, price_usd_per_s=1.0, valid_from_s=0.0) for offer in problem.cluster.offers
    )
    return replace(problem, cluster=replace(problem.cluster, offers=offers))


def _shifted(stages: tuple[Stage, ...], cut: int, step: int) -> tuple[Stage, ...]:
    """The stages with a cut moved; () when it is not theirs or a stage would be left empty."""
    for s, (upper, lower) in enumerate(pairwise(stages)):
        if upper.end_layer == cut and upper.first_layer < cut + step < lower.end_layer:
            return (
                *stages[:s],
                Stage(upper.team, upper.first_layer, cut + step),
                Stage(lower.team, cut + step, lower.end_layer),
                *stages[s + 2 :],
            )
    return ()


def _envelope(options: Sequence[_Option]) -> tuple[_Option, ...]:
    """Options not beaten by another one in both the first sample's time and the rate."""
    kept: list[_Option] = []
    order = sorted(
        options,
        key=lambda o: (o.curve.fill_drain_s - o.curve.period_s, -o.samples_per_s, -o.microbatch),
    )
    for option in order:
        if not kept or option.samples_per_s > kept[-1].samples_per_s * (1 + 1e-12):
            kept.append(option)
    return tuple(kept)


def _common_end(
    options_G: Sequence[Sequence[_Option]], batch_samples: int
) -> tuple[float, list[_Option]]:
    """When all groups have done the batch, each by the option that does most by then."""

    def done_by(time_s: float) -> float:
        return sum(max(o.samples_by(time_s) for o in options) for options in options_G)

    low_s = 0.0
    high_s = max(
        o.fill_drain_s + batch_samples / o.samples_per_s for options in options_G for o in options
    )
    if done_by(high_s) < batch_samples:
        return inf, []  # memory caps the shares below the batch
    while high_s - low_s > 1e-3 * high_s:
        middle_s = (low_s + high_s) / 2
        if done_by(middle_s) >= batch_samples:
            high_s = middle_s
        else:
            low_s = middle_s
    chosen = [max(options, key=lambda o: o.samples_by(high_s)) for options in options_G]
    return high_s, chosen
