"""A tentative state gets cuts, microbatch sizes and shares, and is told what they are worth.

Shape letters: G groups.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.blocks import without_surcharges
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option, common_end
from orchestrator.planning.dealing import deal
from orchestrator.planning.event import retime
from orchestrator.planning.sums import Alike
from orchestrator.planning.waterfill import as_microbatches

FINE_MICROBATCHES = 16
"""Microbatches a group, on average, below which shares are also dealt sample by sample."""

State = tuple[Any, ...]
"""What a space calls one of its tentative groupings of teams; hashable."""

Evaluate = Callable[[Sequence[Group], Sequence[Alike], str], StepEstimate]
"""Groups, how many each stands for, and schedule to estimate: in closed form, or exactly."""

Assembled = tuple[tuple[Group, ...], tuple[Alike, ...]]
"""Groups, and for how many each stands."""

Variation = Callable[[], Iterator[Assembled]]
"""A small change of a trial: what may come of it, worked out when asked."""


class ChainSet(NamedTuple):
    """A chain of teams, how many groups have such a one, and where two of them may lie."""

    teams: tuple[Team, ...]
    alike: Alike


class Space(Protocol):
    """What a search may try: device by device, or classes of devices."""

    @property
    def teams(self) -> Sequence[Team]:
        """One team of every sort, by which speed and price of states are bounded."""

    def seeds(self, seconds_per_sample: Sequence[float]) -> list[State]:
        """First guesses, given the time of the whole model on each of ``teams``."""

    def near(self, state: State, longest: int, rng: np.random.Generator) -> Iterator[State]:
        """States one move away in random order; chains have at most ``longest`` teams."""

    def chains(self, state: State) -> Sequence[ChainSet]:
        """What a state is made of."""

    def used(self, state: State) -> Sequence[tuple[int, int]]:
        """Indices into ``teams``, and how many of such a team are in use."""

    def of_plan(self, plan: Plan) -> State | None:
        """The state of a plan; None when it has none, for instance since a device has left."""

    def placed(self, trial: "Trial", incumbent: Plan | None) -> tuple[Group, ...] | None:
        """The trial's groups, one by one, where the incumbent has their layers if that can be.

        None when they do not fit the nodes after all.
        """


@dataclass(frozen=True, slots=True)
class Trial:
    """A state with cuts and shares, and what the cost model says of it."""

    state: State
    schedule: str
    groups: tuple[Group, ...]
    alike: tuple[Alike, ...]  # for how many groups each stands
    estimate: StepEstimate
    space: Space = field(compare=False, repr=False)


class Evaluator:
    """Turns states into trials; what is computed once is kept.

    Knows neither V nor Q: whatever they are, a problem in the same state of the cluster can
    go on with it (``serves``).

    Source: docs/model.md, sections 5.1, 5.3 and 5.4.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        make_space: Callable[[PlanningProblem], Space],
        before: "Evaluator | None" = None,
    ) -> None:
        """``before``: of an earlier state of the cluster; what it knows of teams is kept."""
        self._problem, self._make_space = _without_money(problem), make_space
        known = before.cost.following(problem) if before else None
        self.cost: CostModel = known or CostModel(problem)
        self.space: Space = make_space(problem)
        self.num_layers = problem.model.num_layers
        self._batch, self._schedules = problem.batch_samples, problem.schedules
        self._curves: Curves = Curves(self.cost, before._curves if known and before else None)
        self._choices: dict[tuple[State, str], tuple[float, list[Option]]] = {}
        self._trials: dict[State, tuple[Trial, ...]] = {}
        self._old_prices: dict[State, tuple[Trial, ...]] = {}
        self.polished: dict[State, Trial] = {}
        """States with their best boundaries, sizes and shares, whatever V and Q found them:
        on the same devices the faster plan is the better one but for egress."""
        self.seconds_per_sample = [self._seconds_per_sample(team) for team in self.space.teams]
        """Of the whole model on each team of the space, at its best microbatch size."""

    def _seconds_per_sample(self, team: Team) -> float:
        return min(
            sum(self.cost.stage_seconds(team, 0, self.num_layers, size)) / size
            for size in self._curves.sizes
        )

    def serves(self, problem: PlanningProblem) -> bool:
        """Whether the problem differs in money, incumbent and time of day at most."""
        return self._problem == _without_money(problem)

    def repriced(self, problem: PlanningProblem) -> "Evaluator | None":
        """One for a problem in which nothing but prices changed: cuts and shares stay.

        None where more changed, or where the new prices number the devices differently.
        """
        if _without_prices(self._problem) != _without_prices(_without_money(problem)):
            return None
        space = self._make_space(problem)
        if space.teams != self.space.teams:
            return None
        cost = self.cost.following(problem)
        if cost is None:
            return None
        other = copy(self)
        other._problem = _without_money(problem)
        other.cost, other.space = cost, space
        other._curves = Curves(cost, self._curves)
        other._trials, other._old_prices = {}, {**self._old_prices, **self._trials}
        other.polished = {}
        return other

    def trials(self, state: State) -> tuple[Trial, ...]:
        """The state with its best cuts and shares, one trial a schedule; () when none fits.

        A schedule whose pipelines promise no more than those of one before it is left out.
        """
        found = self._trials.get(state)
        if found is None and state in self._old_prices:
            found = self._trials[state] = tuple(
                replace(trial, estimate=self.estimate(trial.groups, trial.alike, trial.schedule))
                for trial in self._old_prices.pop(state)
            )
        if found is None:
            every: list[Trial] = []
            least_s = inf
            for schedule in self._schedules:
                end_s, _ = self._choice(state, schedule)
                if end_s < least_s and (trial := self._assembled(state, schedule)):
                    every.append(trial)
                    least_s = end_s
            found = self._trials[state] = tuple(every)
        return found

    def seen(self) -> list[Trial]:
        """Every trial so far."""
        return [trial for trials in self._trials.values() for trial in trials]

    def estimate(
        self, groups: Sequence[Group], alike: Sequence[Alike], schedule: str
    ) -> StepEstimate:
        """What groups are worth in closed form."""
        return self.cost.evaluate(groups, schedule, alike=alike)

    def exact(self, groups: Sequence[Group], alike: Sequence[Alike], schedule: str) -> StepEstimate:
        """What groups are worth by their exact times."""
        return retime(self.cost, groups, schedule, alike)

    def recuts(self, trial: Trial) -> list[Variation]:
        """One cut moved by one layer, in a group or in all that share it."""
        groups = trial.groups
        cuts = sorted({stage.first_layer for group in groups for stage in group.stages[1:]})
        return [partial(self._recut, trial, cut, step) for cut, step in product(cuts, (-1, 1))]

    def _recut(self, trial: Trial, cut: int, step: int) -> Iterator[Assembled]:
        groups, replicated = trial.groups, _replicated(trial.alike)
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
            if chosen:
                yield tuple(changed), trial.alike

    def variations(self, trial: Trial) -> list[Variation]:
        """A boundary or a microbatch size changed, or a few samples moved."""
        sets = _sets(trial)
        alike = [alike for _, _, alike in sets]
        replicated = _replicated(alike)

        def sized(stages: tuple[Stage, ...], size: int) -> Option | None:
            return self._curves.sized(stages, size, trial.schedule, replicated=replicated)

        options = [sized(stages, size) for stages, size, _ in sets]
        found: list[Variation] = []
        for k, (here, now, _) in enumerate(sets):
            cuts = [(stage.first_layer, step) for stage in here[1:] for step in (-1, 1)]
            changes = [(_shifted(here, *cut), now) for cut in cuts]
            changes += [(here, size) for size in self._curves.sizes if size != now]
            found += [
                partial(self._resized, trial.schedule, alike, options, k, partial(sized, *change))
                for change in changes
                if change[0]
            ]
        return [*found, *self._reshares(trial)]

    # Cuts and shares -----------------------------------------------------------------

    def most_samples_per_s(self, state: State) -> float:
        """About what the busiest stages of a state allow at most."""
        return max(
            sum(
                chain.alike.num_groups * self._curves.most_samples_per_s(chain.teams, schedule)
                for chain in self.space.chains(state)
            )
            for schedule in self._schedules
        )

    def least_s(self, state: State) -> float:
        """About the least step time: pipelines alone, shares not whole; infinite when none fits."""
        return min((self._choice(state, schedule)[0] for schedule in self._schedules), default=inf)

    def _choice(self, state: State, schedule: str) -> tuple[float, list[Option]]:
        """The common end of all pipelines, and the cuts and sizes that reach it."""
        key = (state, schedule)
        found = self._choices.get(key)
        if found is None:
            chains = self.space.chains(state)
            counts = [chain.alike.num_groups for chain in chains]
            num_groups = sum(counts)
            options_G = [
                self._curves.of(chain.teams, schedule, replicated=num_groups > 1)
                for chain in chains
            ]
            fits = 0 < num_groups <= self._batch and all(options_G)
            found = common_end(options_G, counts, self._batch) if fits else (inf, [])
            self._choices[key] = found
        return found

    def _assembled(self, state: State, schedule: str) -> Trial | None:
        _, chosen = self._choice(state, schedule)
        alike = [chain.alike for chain in self.space.chains(state)]
        empty = Trial(state, schedule, (), (), IDLE_ESTIMATE, self.space)
        every = (
            self.priced(empty, dealt, self.estimate)
            for dealt in self._deals(chosen, alike, schedule)
        )
        return min((t for t in every if t), key=lambda t: t.estimate.step_s, default=None)

    def _deals(
        self, chosen: Sequence[Option], alike: Sequence[Alike], schedule: str
    ) -> Iterator[Assembled]:
        """Whole microbatches, and single samples where few microbatches make whole ones coarse."""
        if not chosen:
            return
        counts = [a.num_groups for a in alike]
        microbatches = min(self._batch / option.microbatch for option in chosen)
        coarse = sum(counts) > 1 and microbatches < FINE_MICROBATCHES * sum(counts)
        for fine in (False, True) if coarse else (False,):
            dealt = deal(chosen, counts, self._batch, fine=fine)
            if dealt is not None:
                yield (
                    tuple(
                        self._group(chosen[d.set_index].stages, d.microbatches, schedule)
                        for d in dealt
                    ),
                    tuple(alike[d.set_index]._replace(num_groups=d.num_groups) for d in dealt),
                )

    def _group(self, stages: tuple[Stage, ...], share: tuple[int, ...], schedule: str) -> Group:
        if schedule == "gpipe":
            stages = self.cost.with_inflight(stages, share[0], len(share), schedule)
        return Group(stages, share)

    def priced(self, trial: Trial, assembled: Assembled, evaluate: Evaluate) -> Trial | None:
        """The trial with other groups; None when they do not fit memory."""
        groups, alike = assembled
        if not self.cost.fits(groups, trial.schedule, replicated=_replicated(alike)):
            return None
        estimate = evaluate(groups, alike, trial.schedule)
        return Trial(trial.state, trial.schedule, groups, alike, estimate, trial.space)

    # Small variations ----------------------------------------------------------------

    def _resized(
        self,
        schedule: str,
        alike: Sequence[Alike],
        options: Sequence[Option | None],
        k: int,
        change: Callable[[], Option | None],
    ) -> Iterator[Assembled]:
        """Another option for set k; shares are dealt anew."""
        chosen = [o for o in (*options[:k], change(), *options[k + 1 :]) if o]
        if len(chosen) == len(options):
            yield from self._deals(chosen, alike, schedule)

    def _reshares(self, trial: Trial) -> list[Variation]:
        """Samples from the group that ends last to each other group of as many alike."""
        groups, ends_s = trial.groups, trial.estimate.group_s
        giver = ends_s.index(max(ends_s))
        size = groups[giver].microbatches[0]
        return [
            partial(self._reshared, trial, giver, taker, count)
            for taker in range(len(groups))
            if taker != giver and trial.alike[giver].num_groups == trial.alike[taker].num_groups
            for count in dict.fromkeys((1, size // 2, size))
            if 0 < count < groups[giver].num_samples
        ]

    def _reshared(self, trial: Trial, giver: int, taker: int, count: int) -> Iterator[Assembled]:
        changed = list(trial.groups)
        for g, more in ((giver, -count), (taker, count)):
            group = changed[g]
            share = as_microbatches(group.num_samples + more, max(group.microbatches))
            changed[g] = self._group(group.stages, share, trial.schedule)
        yield tuple(changed), trial.alike


def _sets(trial: Trial) -> list[tuple[tuple[Stage, ...], int, Alike]]:
    """Stages, microbatch and number of the trial's groups, whatever their shares."""
    found: dict[tuple[object, ...], tuple[tuple[Stage, ...], int, Alike]] = {}
    for group, one in zip(trial.groups, trial.alike, strict=True):
        key = tuple([(s.team.device_ids, s.first_layer) for s in group.stages])
        _, most, known = found.get(key, ((), 0, one._replace(num_groups=0)))
        size = max(most, *group.microbatches)
        found[key] = (
            group.stages,
            size,
            one._replace(num_groups=known.num_groups + one.num_groups),
        )
    return list(found.values())


def _replicated(alike: Sequence[Alike]) -> bool:
    return sum(a.num_groups for a in alike) > 1


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
    return replace(problem, cluster=replace(without_surcharges(problem.cluster), offers=offers))


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
