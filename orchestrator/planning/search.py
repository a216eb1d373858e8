"""Tentative search: climb from first guesses over moves of devices, kick, remember the elite."""

from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.core.slot import StepEstimate
from orchestrator.planning.grouping import Grouping, neighbours, seeds
from orchestrator.planning.trials import Evaluate, Evaluator, Trial

NUM_RUNS = 3
NUM_KICKS = 12
KICK_MOVES = 2
NUM_STARTS = 2
"""Best first guesses from which the first run climbs."""

POLISH_RATIO = 0.03
"""Trials this close to the best one, relative to what their samples are worth, get polished."""


class Search:
    """Looks for the groupings of largest ``J = V' r - Q c``.

    Without a deadline the same problem gives the same trials, whatever devices are called.

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
        self._known: dict[Grouping, Trial | None] = {}
        self._elite: dict[Grouping, Trial] = {}
        self._best: Trial | None = None
        cost, roster = evaluator.cost, evaluator.roster
        self._idle_score = -backlog_usd * cost.standing_usd_per_s
        self._worth = [
            penalty_weight / seconds
            - backlog_usd * (cost.devices_usd_per_s([d.device_id]) - cost.standing_usd_per_s)
            for d, seconds in zip(roster.devices, evaluator.seconds_per_sample, strict=True)
        ]

    def run(self, starts: Sequence[Grouping], seed: int) -> list[Trial]:
        """Return polished trials, best score first; empty when nothing fits memory.

        Args:
            starts: Groupings to climb from beside the usual first guesses.
            seed: Of the random order of moves and of the kicks.
        """
        roster = self._evaluator.roster
        guesses = [*starts, *seeds(roster, self._evaluator.seconds_per_sample)]
        first = [trial for guess in guesses if (trial := self._look(guess))]
        first.sort(key=self.score, reverse=True)
        for run in range(NUM_RUNS):
            rng = np.random.Generator(np.random.PCG64((seed, run)))
            for trial in first[: NUM_STARTS if run == 0 else 0]:
                self._climb(trial, rng)
            for _ in range(NUM_KICKS):
                if self._best is None or self._out_of_time():
                    break
                if kicked := self._kick(self._best, rng):
                    self._climb(kicked, rng)
        return sorted(self._elite.values(), key=self.score, reverse=True)

    def score(self, trial: Trial) -> float:
        """J of a trial, $^2/s."""
        return self._score(trial.estimate)

    def polish(self, trial: Trial, evaluate: Evaluate) -> Trial:
        """Move boundaries, sizes and samples while J rises, as ``evaluate`` sees it."""
        improved = True
        while improved and not self._out_of_time():
            improved = False
            for other in self._evaluator.variations(trial, evaluate):
                if self.score(other) > self.score(trial):
                    trial, improved = other, True
                    break
        return trial

    def _score(self, estimate: StepEstimate) -> float:
        return self._weight * estimate.samples_per_s - self._backlog_usd * estimate.cost_usd_per_s

    def _bound(self, grouping: Grouping) -> float:
        """What J cannot exceed: every device busy all the time, nothing else costs."""
        return self._idle_score + sum(self._worth[d] for chain in grouping for d in chain)

    def _look(self, grouping: Grouping) -> Trial | None:
        """The best trial of a grouping, polished when it comes near the best of all."""
        if grouping in self._known:
            return self._known[grouping]
        trial = max(self._evaluator.trials(grouping), key=self.score, default=None)
        if trial:
            worth = self._weight * trial.estimate.samples_per_s
            best = self._best
            if best is None or self.score(trial) >= self.score(best) - POLISH_RATIO * worth:
                trial = self._elite[grouping] = self.polish(trial, self._evaluator.cost.evaluate)
            if best is None or self.score(trial) > self.score(best):
                self._best = trial
        self._known[grouping] = trial
        return trial

    def _climb(self, trial: Trial, rng: np.random.Generator) -> None:
        improved = True
        while improved:
            improved = False
            for grouping in self._near(trial.grouping, rng):
                if self._out_of_time():
                    return
                if self._bound(grouping) <= self.score(trial):
                    continue
                other = self._look(grouping)
                if other and self.score(other) > self.score(trial):
                    trial, improved = other, True
                    break

    def _kick(self, trial: Trial, rng: np.random.Generator) -> Trial | None:
        grouping = trial.grouping
        for _ in range(KICK_MOVES):
            grouping = next(iter(self._near(grouping, rng)), grouping)
        return self._look(grouping)

    def _near(self, grouping: Grouping, rng: np.random.Generator) -> Sequence[Grouping]:
        return neighbours(self._evaluator.roster, grouping, self._evaluator.num_layers, rng)
