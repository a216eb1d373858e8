"""A tentative state gets cuts, microbatch sizes and shares, and is told what they are worth.

Shape letters: G groups.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import inf

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.assembling import Assembled, Assembler, replicated
from orchestrator.planning.blocks import without_surcharges
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import SPAN, Curves, Option, common_end
from orchestrator.planning.event import retime
from orchestrator.planning.fading import Fading, Memories
from orchestrator.planning.space import Space, State, Trial
from orchestrator.planning.sums import Alike
from orchestrator.planning.variations import Variations

ALIGN_RATIO = 0.02
"""Share of a step that gradient sums take from which on chains are also cut alike."""

MOST_LOOKS = 3
"""At ends of a step for which chains get their options."""

POLISH_RATIO = 0.02
POLISH_GRAIN = 0.3
"""Trials get all of the polish when this ratio, and this over the number of microbatches in the
batch, times what their samples are worth, brings them to the best one."""

Evaluate = Callable[[Sequence[Group], Sequence[Alike], str], StepEstimate]
"""Groups, how many each stands for, and schedule to estimate: in closed form, or exactly."""


class PolishGain:
    """How much polish brings at most, relative to what samples are worth: first assumed, then seen.

    Twice the largest gain so far, and a part of what was assumed that fades with experience.
    """

    def __init__(self, assumed: float) -> None:
        self._assumed = self.ratio = assumed
        self._count, self._largest = 0, 0.0

    def forgotten(self) -> "PolishGain":
        """As it was assumed at first."""
        return PolishGain(self._assumed)

    def learn(self, gain: float) -> None:
        """From one more polished trial."""
        self._count += 1
        self._largest = max(self._largest, gain)
        self.ratio = min(self._assumed, 2 * self._largest + self._assumed / self._count)


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
        self._make_groups()
        self._memories = Memories()  # of all prices
        self._choices: Fading[tuple[State, str], tuple[float, list[Option]]] = self._memories.new()
        self._promises: Fading[State, tuple[float, float]] = self._memories.new()
        self._old_prices: Fading[State, tuple[Trial, ...]] = self._memories.new()
        self._trials: dict[State, tuple[Trial, ...]] = {}
        self.polished: dict[State, Trial] = {}
        """States with their best boundaries, sizes and shares, whatever V and Q found them:
        on the same devices the faster plan is the better one but for egress."""
        microbatches = self._batch / problem.microbatch_samples
        self.has_joined = False
        """Whether a search has joined in this state what every kind does best by itself."""
        self.polish_gain = PolishGain(POLISH_RATIO + POLISH_GRAIN / microbatches)
        self.seconds_per_sample = [
            min(self._curves.seconds_per_sample(team)) for team in self.space.teams
        ]
        """Of the whole model on each team of the space, at its best microbatch size."""

    def _make_groups(self) -> None:
        self._assembler = Assembler(self.cost, self._curves)
        self.variations = Variations(self.cost, self._curves, self._assembler)

    def serves(self, problem: PlanningProblem) -> bool:
        """Whether the problem differs in money, incumbent and time of day at most."""
        return self._problem == _without_money(problem)

    def repriced(self, problem: PlanningProblem) -> "Evaluator | None":
        """One for a problem in which nothing but prices changed: cuts and shares stay.

        None where more changed, or where other devices are alike at the new prices.
        """
        if _without_prices(self._problem) != _without_prices(_without_money(problem)):
            return None
        space = self._make_space(problem)
        if space.layout != self.space.layout:
            return None
        cost = self.cost.following(problem)
        if cost is None:
            return None
        other = copy(self)
        other._problem = _without_money(problem)
        other.cost, other.space = cost, space
        other._curves = Curves(cost, self._curves)
        other._make_groups()
        self._memories.follow()
        self._old_prices.update(self._trials)
        other._trials = {}
        other.polished, other.polish_gain = {}, self.polish_gain.forgotten()
        return other

    def trials(self, state: State) -> tuple[Trial, ...]:
        """The state with its best cuts and shares, one trial a schedule; () when none fits.

        A schedule whose pipelines promise no more than those of one before it is left out.
        """
        found = self._trials.get(state)
        if found is None and (at_old_prices := self._old_prices[state]) is not None:
            found = self._trials[state] = tuple(
                replace(trial, estimate=self.estimate(trial.groups, trial.alike, trial.schedule))
                for trial in at_old_prices
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

    # Cuts and shares -----------------------------------------------------------------

    def most_samples_per_s(self, state: State) -> float:
        """About what the busiest stages of a state allow at most."""
        rate, _ = self._promised(state)
        return rate

    def hoped_samples_per_s(self, state: State) -> float:
        """About what they leave once every pipeline has to fill and drain, too.

        A chain that keeps a pace r once it is full has done ``r t - behind`` samples at time t;
        so all chains together have done the batch at a time that needs no search.
        """
        _, hoped = self._promised(state)
        return hoped

    def _promised(self, state: State) -> tuple[float, float]:
        found = self._promises[state]
        if found is None:
            chains = self.space.shown(state)
            most = hoped = 0.0
            paces_G = [self._curves.paces(teams) for teams, _ in chains]
            for same_size in zip(*paces_G, strict=True) if all(paces_G) else ():
                rate = behind = 0.0
                for (_, count), pace in zip(chains, same_size, strict=True):
                    rate += count * pace.samples_per_s
                    behind += count * pace.behind
                most = max(most, rate)
                hoped = max(hoped, rate * self._batch / (self._batch + behind))
            found = self._promises[state] = most, hoped
        return found

    def least_s(self, state: State) -> float:
        """About the least step time: pipelines alone, shares not whole; infinite when none fits."""
        return min((self._choice(state, schedule)[0] for schedule in self._schedules), default=inf)

    def _choice(self, state: State, schedule: str) -> tuple[float, list[Option]]:
        """The common end of all pipelines, and the cuts and sizes that reach it."""
        key = (state, schedule)
        found = self._choices[key]
        if found is None:
            chains = self.space.shown(state)
            num_groups = sum(count for _, count in chains)
            found = inf, []
            if 0 < num_groups <= self._batch and (hoped := self.hoped_samples_per_s(state)):
                found = self._at_about(self._batch / hoped, chains, schedule)
            self._choices[key] = found
        return found

    def _at_about(
        self, end_s: float, chains: Sequence[tuple[tuple[Team, ...], int]], schedule: str
    ) -> tuple[float, list[Option]]:
        """The common end, and what reaches it, of options for this end, and for theirs if later."""
        counts = [count for _, count in chains]
        for _ in range(MOST_LOOKS):
            options_G = [
                self._curves.of(teams, schedule, end_s, replicated=sum(counts) > 1)
                for teams, _ in chains
            ]
            if not all(options_G):
                return inf, []
            found = common_end(options_G, counts, self._batch)
            if found[0] < SPAN * end_s or found[0] == inf:
                break
            end_s = found[0]
        return found

    def _assembled(self, state: State, schedule: str) -> Trial | None:
        _, chosen = self._choice(state, schedule)
        alike = [chain.alike for chain in self.space.chains(state)]
        empty = Trial(state, schedule, (), (), IDLE_ESTIMATE, self.space)

        def best(options: Sequence[Option]) -> Trial | None:
            every = (
                self.priced(empty, dealt, self.estimate)
                for dealt in self._assembler.deals(options, alike, schedule)
            )
            return min((t for t in every if t), key=lambda t: t.estimate.step_s, default=None)

        found = best(chosen)
        if found and found.estimate.sync_s > ALIGN_RATIO * found.estimate.step_s:
            other = best(self._assembler.aligned(chosen, alike, schedule))
            if other and other.estimate.step_s < found.estimate.step_s:
                return other
        return found

    def priced(
        self, trial: Trial, assembled: Assembled, evaluate: Evaluate, longest_s: float = inf
    ) -> Trial | None:
        """The trial with other groups; None when they do not fit memory, or take longer a step."""
        groups, alike = assembled
        many = replicated(alike)
        least_s = self.cost.least_step_s(groups, trial.schedule, replicated=many)
        if least_s == inf or least_s > longest_s:
            return None
        estimate = evaluate(groups, alike, trial.schedule)
        return Trial(trial.state, trial.schedule, groups, alike, estimate, trial.space)


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
