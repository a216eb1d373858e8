"""Tentative search: climb from first guesses over moves of devices, kick, remember the elite."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from math import inf

import numpy as np

from orchestrator.core.slot import StepEstimate
from orchestrator.planning.promise import Promise
from orchestrator.planning.space import State, Trial
from orchestrator.planning.trials import Evaluate, Evaluator
from orchestrator.planning.variations import Variation

NUM_AT_ONCE = (12, 68, None)
NUM_TRIED, FEW_DEVICES = (2, 5, 12), 32
"""First guesses that are ranked together, and how many of them are tried, most promising first:
a plan is there early, and there may be time for no more. None: all that are left. Of the first
ones a single one is tried where there are more devices than few: a try takes longer there.

Before those that are left the best ones are filled, and kinds joined: a re-plan ends there.
"""

NUM_FILLED, NUM_FILLS = 2, 3
"""First guesses whose idle devices get groups of their own, and how many ways are tried."""

NUM_POLISHED = 8
"""First guesses, best first, that are polished to find where to climb from."""

NUM_KICKS = 8
NUM_COARSE_KICKS = 3
NUM_WARM_KICKS = 6
NUM_REPEATED_KICKS = 3
"""Kicks of a climb: from first guesses, the same where a finer search goes on, and from a plan
that another search found, of a new state and of one searched before (where a finer one goes on:
none)."""

KICK_MOVES = 2

DETOUR_RATIO = 0.15
"""States that promise less than the best score by more than this, relative to what the best
one's samples are worth, are not climbed through."""

NUM_FITTING, NUM_JOINED = 8, 3
"""Most promising shapes of a kind that are looked at, and those joined with another kind's."""

GUESS_RATIO, JOIN_RATIO = 0.05, 0.25
"""First guesses that promise less than the best one by more than this are passed over, and kinds
are not joined, where what they promise before they have cuts is less by more than this."""

NUM_NEAR = 8
"""States near one another that are ranked together in a climb."""

HOPE_SLACK = 0.08
SLACK_GRAIN = 0.75
"""How much less than the one climbed from, relative to what its samples are worth, a state may
promise before it has cuts, and this over the number of microbatches in the batch on top."""


class Search:
    """Looks for the states of largest ``J = V' r - Q c``.

    Without a deadline the same problem gives the same trials after the same searches of the
    evaluator, whatever devices are called.

    Args:
        evaluator: Of the cluster's state; may come from an earlier slot.
        penalty_weight: V', $^2/sample.
        backlog_usd: Q.
        out_of_time: Says when to stop.

    Source: docs/model.md, sections 5.4 and 5.5.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        penalty_weight: float,
        backlog_usd: float,
        out_of_time: Callable[[], bool],
    ) -> None:
        self._evaluator, self._out_of_time = evaluator, out_of_time
        self._weight, self._backlog_usd = penalty_weight, backlog_usd
        self._known: dict[State, Trial | None] = {}
        self._elite: dict[State, Trial] = {}
        self._best: Trial | None = None
        problem = evaluator.cost.problem
        self._batch = problem.batch_samples
        microbatches = self._batch / problem.microbatch_samples
        self._slack = HOPE_SLACK + SLACK_GRAIN / microbatches
        self._promise = Promise(evaluator, penalty_weight, backlog_usd)

    def finalists(
        self, starts: Sequence[State], seed: int, count: int, *, coarse: bool = False
    ) -> list[Trial]:
        """The ``count`` best trials of ``run`` in exact time, the first one polished in it."""
        found = [self._exact(trial) for trial in self.run(starts, seed, coarse=coarse)[:count]]
        found.sort(key=self.score, reverse=True)
        return [self.polish(t, self._evaluator.exact) if not i else t for i, t in enumerate(found)]

    def run(self, starts: Sequence[State], seed: int, *, coarse: bool = False) -> list[Trial]:
        """Return polished trials, best score first; empty when nothing fits memory.

        Args:
            starts: States to climb from beside the usual first guesses.
            seed: Of the random order of moves and of the kicks.
            coarse: A finer search goes on from what this one finds, and needs the time more.
        """
        known: list[Trial] = []
        # Whatever the price of money then, the search goes on where earlier ones of this state
        # ended.
        seen = max(self._evaluator.polished.values(), key=self.score, default=None)
        num_kicks = NUM_REPEATED_KICKS if seen else NUM_WARM_KICKS
        if seen and (trial := self._look(seen.state)):
            known.append(trial)
        for start in sorted(starts, key=self._promise.most, reverse=True):
            if not known or self._promise.exceeds(start, max(map(self.score, known))):
                known += [trial] if (trial := self._look(start)) else []
        if known:
            rng = np.random.Generator(np.random.PCG64((seed, 0)))
            best = max([*known, *self._looked(self._first_guesses())], key=self.score)
            self._kick_on(self._climb(best, rng), rng, 0 if coarse else num_kicks)
        else:
            guesses = self._first_guesses()
            # From the best one at once: to look at the others takes as long as some climbing.
            for run, some in enumerate((guesses[:1], guesses[1:])):
                if first := max(self._looked(some), key=self.score, default=None):
                    rng = np.random.Generator(np.random.PCG64((seed, run)))
                    num_kicks = NUM_COARSE_KICKS if coarse else NUM_KICKS
                    self._kick_on(self._climb(first, rng), rng, num_kicks)
        return sorted(self._elite.values(), key=self.score, reverse=True)

    def _kick_on(self, best: Trial, rng: np.random.Generator, num_kicks: int) -> None:
        for _ in range(num_kicks):
            if self._out_of_time():
                break
            if kicked := self._kick(best, rng):
                best = max(best, self._climb(kicked, rng), key=self.score)

    def _first_guesses(self) -> list[State]:
        """The best first guesses, best first."""
        space, seconds = self._evaluator.space, self._evaluator.seconds_per_sample
        seeds = self._while_in_time(space.seeds(seconds, self._evaluator.num_layers))
        num_devices = len(self._evaluator.cost.problem.cluster.devices)
        raw: dict[State, Trial] = {}
        guesses: list[State] = []
        joined: dict[State, Trial] = {}
        joins = self._best is None or not self._evaluator.has_joined
        for at_once, most in zip(NUM_AT_ONCE, NUM_TRIED, strict=True):
            if at_once is None:
                self._add_filled(raw)
                if joins and not self._out_of_time():
                    least = max((self._below(t, JOIN_RATIO) for t in raw.values()), default=-inf)
                    kinds = self._kind_by_kind(guesses, least)
                    self._add_promising(kinds, joined, most)
                    self._evaluator.has_joined = bool(kinds)
            tried = most if guesses or num_devices <= FEW_DEVICES else 1
            some = list(islice(seeds, at_once))
            guesses += some
            self._add_promising(some, raw, tried)
        # One of the joined ones, so that they do not crowd out unlike guesses.
        ranked = [*self._ranked(joined)[:1], *self._ranked(raw)[:NUM_POLISHED]]
        ranked.sort(key=lambda guess: self.score({**raw, **joined}[guess]), reverse=True)
        return ranked

    def _looked(self, states: Sequence[State]) -> list[Trial]:
        return [trial for trial in map(self._look, states) if trial]

    def _add_filled(self, raw: dict[State, Trial]) -> None:
        """Add trials of the best ones with more groups over what they leave idle."""
        for guess in self._ranked(raw)[:NUM_FILLED]:
            if self._out_of_time():
                return
            evaluator = self._evaluator
            some = evaluator.space.filled(guess, evaluator.seconds_per_sample, evaluator.num_layers)
            self._add_promising(list(some), raw, NUM_FILLS)

    def _ranked(self, raw: Mapping[State, Trial]) -> list[State]:
        return sorted(raw, key=lambda guess: self.score(raw[guess]), reverse=True)

    def _kind_by_kind(self, guesses: Sequence[State], least: float) -> list[State]:
        """The most promising guesses of every kind by itself, joined: each kind in its own shape.

        Of the two best kinds several shapes in every way, of the next ones the best one each.
        None where what every kind hopes for most, joined, promises less than ``least``: kinds
        side by side sum their gradients over the slowest links.
        """
        space = self._evaluator.space
        of_kind: dict[str, dict[State, None]] = {}
        for guess in self._while_in_time(guesses):
            for kind, part in space.by_kind(guess).items():
                of_kind.setdefault(kind, {})[part] = None
        hoped = (next(self._promise.by_hope(list(shapes)), None) for shapes in of_kind.values())
        most_hoped = [shape for _, shape in sorted(filter(None, hoped), reverse=True)]
        joins = [space.joined(most_hoped[:n]) for n in range(2, len(most_hoped) + 1)]
        if max(map(self._promise.hope, joins), default=-inf) < least:
            return []
        tops = sorted(filter(None, map(self._fitting, of_kind.values())), reverse=True)
        found: list[State] = []
        for most in range(2, len(tops) + 1):
            shapes = tops[:most] if most == 2 else [some[:1] for some in tops[:most]]
            found += [space.joined([guess for _, guess in chosen]) for chosen in product(*shapes)]
        return found

    def _fitting(self, shapes: Iterable[State]) -> list[tuple[float, State]]:
        """The best of the most promising ones that fit, by whole pipelines and sums."""
        found: list[tuple[float, State]] = []
        for hope, shape in self._promise.by_hope(list(shapes)):
            if len(found) >= NUM_JOINED and hope < sorted(found, reverse=True)[NUM_JOINED - 1][0]:
                break
            least_s = self._evaluator.least_s(shape)
            if least_s < inf:
                found.append((self._promise.with_traffic(shape, self._batch / least_s), shape))
            if len(found) == NUM_FITTING or self._out_of_time():
                break
        return sorted(found, reverse=True)[:NUM_JOINED]

    def _while_in_time(self, guesses: Iterable[State]) -> Iterator[State]:
        """One, and as many more as there is time for."""
        for guess in guesses:
            yield guess
            if self._out_of_time():
                return

    def _add_promising(self, guesses: Sequence[State], raw: dict[State, Trial], most: int) -> None:
        """Add trials of the most promising ones, and of single teams, while there is time."""
        known = [*raw.values(), *([self._best] if self._best else [])]
        best = max(map(self._tolerable, known), default=-inf)
        some = self._promise.by_hope(guesses, best, self._out_of_time if known else _never)
        promising = (guess for _, guess in islice(some, most))
        for guess in chain(promising, filter(self._is_alone, guesses)):
            if (raw or self._best) and self._out_of_time():
                break
            if not (self._promise.exceeds(guess, best) or self._is_alone(guess)):
                continue
            if trial := max(self._evaluator.trials(guess), key=self.score, default=None):
                raw[guess] = trial
                best = max(best, self._tolerable(trial))

    def _tolerable(self, trial: Trial) -> float:
        """What another guess must score, before polish, to be worth a look."""
        return self._below(trial, GUESS_RATIO)

    def _below(self, trial: Trial, ratio: float) -> float:
        """Less than a trial scores, by a ratio of what its samples are worth."""
        return self.score(trial) - ratio * self._weight * trial.estimate.samples_per_s

    def _is_alone(self, state: State) -> bool:
        """Whether one device or team works; V needs the most samples per dollar, theirs."""
        return sum(n for _, n in self._evaluator.space.used(state)) == 1

    def score(self, trial: Trial) -> float:
        """J of a trial, $^2/s."""
        return self._score(trial.estimate)

    def polish(self, trial: Trial, evaluate: Evaluate) -> Trial:
        """Move boundaries, sizes and samples while J rises, as ``evaluate`` sees it."""
        return self._ascend(trial, self._evaluator.variations.all, evaluate)

    def _ascend(
        self,
        trial: Trial,
        variations: Callable[[Trial, float], list[Variation]],
        evaluate: Evaluate,
        wanted: float = -inf,
    ) -> Trial:
        """First improvements until there is none, each looked for from where the last one was.

        Given up where another round of all variations, bringing as much as the last one, would
        not reach the score that is wanted.
        """
        at, score, tried = 0, self.score(trial), 0
        before = score
        while not self._out_of_time():
            longest_s = self._promise.longest_s(trial.state, score)
            longest_s -= self._evaluator.cost.balanced_sync_s(trial.groups, trial.alike)
            moves = variations(trial, longest_s)
            if tried >= len(moves):
                if 2 * score - before < wanted:
                    break
                before, tried = score, 0
            for i in (*range(at, len(moves)), *range(min(at, len(moves)))):
                if self._out_of_time():
                    return trial
                tried += 1
                found = (
                    self._evaluator.priced(trial, assembled, evaluate, longest_s)
                    for assembled in moves[i]()
                )
                better = next((t for t in found if t and self.score(t) > score), None)
                if better:
                    trial, at, score = better, i, self.score(better)
                    break
            else:
                break
        return trial

    def _margin(self, trial: Trial) -> float:
        """How much polish brings at most."""
        return self._evaluator.polish_gain.ratio * self._weight * trial.estimate.samples_per_s

    def _score(self, estimate: StepEstimate) -> float:
        cost = estimate.counted_usd_per_s
        return self._weight * estimate.samples_per_s - self._backlog_usd * cost

    def _look(self, state: State) -> Trial | None:
        """The best trial of a state, polished when it comes near the best of all.

        What seems to be the best so far is timed exactly, so that no optimism of the closed
        form sits in its place.
        """
        if state in self._known:
            return self._known[state]
        polished = self._evaluator.polished
        best, trial = self._best, polished.get(state)
        if trial is None:
            trial = max(self._evaluator.trials(state), key=self.score, default=None)
            if trial and (best is None or self._may_beat(trial, best)):
                raw, of_cuts = trial, self._evaluator.variations.of_cuts
                wanted = self.score(best) - self._margin(raw) if best else -inf
                trial = self._ascend(raw, of_cuts, self._evaluator.estimate, wanted)
                if self.score(trial) >= wanted:
                    trial = polished[state] = self.polish(trial, self._evaluator.estimate)
                worth = self._weight * raw.estimate.samples_per_s
                self._evaluator.polish_gain.learn((self.score(trial) - self.score(raw)) / worth)
                self._elite[state] = trial
        if trial and (best is None or self.score(trial) > self.score(best)):
            trial = self._exact(trial)
        if trial and (best is None or self.score(trial) > self.score(best)):
            self._best = trial
        if trial and (state in polished or state in self._elite):
            self._elite[state] = trial
        self._known[state] = trial
        return trial

    def _exact(self, trial: Trial) -> Trial:
        exact = self._evaluator.exact
        return replace(trial, estimate=exact(trial.groups, trial.alike, trial.schedule))

    def _may_beat(self, trial: Trial, best: Trial) -> bool:
        """Whether polishing may bring a trial to the best: a little, and most of its sums."""
        estimate = trial.estimate
        saved_s = 0.0
        if any(len(group.stages) > 1 for group in trial.groups):
            balanced_s = self._evaluator.cost.balanced_sync_s(trial.groups, trial.alike)
            saved_s = max(0.0, estimate.sync_s - balanced_s)
        least_s = estimate.step_s - saved_s
        gain = self._weight * self._batch * (1 / least_s - 1 / estimate.step_s)
        return self.score(trial) + gain + self._margin(trial) >= self.score(best)

    def _climb(self, trial: Trial, rng: np.random.Generator) -> Trial:
        improved = True
        while improved:
            improved = False
            for state in self._hopeful(trial, self._near(trial.state, rng)):
                if self._out_of_time():
                    return trial
                if not self._promise.exceeds(state, max(self.score(trial), self._floor())):
                    continue
                other = self._look(state)
                if other and self.score(other) > self.score(trial):
                    trial, improved = other, True
                    break
        return trial

    def _hopeful(self, trial: Trial, states: Iterator[State]) -> Iterator[State]:
        """Some at once, most promising first, but for those that promise far less than a trial."""
        least = self._promise.hope(trial.state)
        least -= self._slack * self._weight * trial.estimate.samples_per_s
        while some := list(islice(states, NUM_NEAR)):
            yield from (state for _, state in self._promise.by_hope(some, least))

    def _floor(self) -> float:
        """Below this a state is not even worth passing through."""
        if self._best is None:
            return -inf
        worth = self._weight * self._best.estimate.samples_per_s
        return self.score(self._best) - DETOUR_RATIO * worth

    def _kick(self, trial: Trial, rng: np.random.Generator) -> Trial | None:
        state = trial.state
        for _ in range(KICK_MOVES):
            state = next(self._near(state, rng), state)
        return self._look(state)

    def _near(self, state: State, rng: np.random.Generator) -> Iterator[State]:
        return self._evaluator.space.near(state, self._evaluator.num_layers, rng)


def _never() -> bool:
    return False
