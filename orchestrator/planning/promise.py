"""What a tentative state promises before it has cuts: its score, at most or about."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from orchestrator.planning.space import State
from orchestrator.planning.trials import Evaluator

HOPE_FACTOR = 1.05
HOPE_GRAIN = 0.1
"""How much faster a step may turn out than the continuous shares of a state suggest, and this
over the number of microbatches in the batch on top: few leave more to polish."""


class Promise:
    """Bounds and estimates of ``J = V' r - Q c``, cheap ones first.

    Source: docs/model.md, section 5.4.
    """

    def __init__(self, evaluator: Evaluator, penalty_weight: float, backlog_usd: float) -> None:
        self._evaluator, self._cost = evaluator, evaluator.cost
        self._weight, self._backlog_usd = penalty_weight, backlog_usd
        self._batch = self._cost.problem.batch_samples
        microbatches = self._batch / self._cost.problem.microbatch_samples
        self._hope_factor = HOPE_FACTOR + HOPE_GRAIN / microbatches
        self._idle_score = -backlog_usd * self._cost.standing_usd_per_s
        teams = evaluator.space.teams
        self._price = [self._cost.devices_usd_per_s(team.device_ids) for team in teams]
        self._worth = [
            penalty_weight / seconds - backlog_usd * price
            for seconds, price in zip(evaluator.seconds_per_sample, self._price, strict=True)
        ]

    def most(self, state: State) -> float:
        """What it would score if its devices did nothing but compute."""
        used = self._evaluator.space.used(state)
        return self._idle_score + sum(n * self._worth[team] for team, n in used)

    def exceeds(self, state: State, score: float) -> bool:
        """Whether it may score more: by its devices, busiest stages, then whole pipelines."""
        if self.most(state) <= score:
            return False
        busiest = self._hope_factor * self._evaluator.most_samples_per_s(state)
        if self._at(state, busiest) <= score:
            return False
        whole = self._hope_factor * self._batch / self._evaluator.least_s(state)
        return self._at(state, whole) > score

    def longest_s(self, state: State, score: float) -> float:
        """How long a step of the state lasts at most if it scores more."""
        devices = self._at(state, 0.0)
        return self._weight * self._batch / (score - devices) if score > devices else inf

    def by_hope(
        self,
        states: Sequence[State],
        least: float = -inf,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[float, State]]:
        """States and their ``hope`` where it is ``least`` or more, and finite; largest first.

        Hopes are worked out as far as asked for: what devices alone, or pipelines without traffic
        do bounds them. Ends when out of time.
        """
        hopes = self._without_traffic, self.hope
        bounds = ((self.most(state), 0, i) for i, state in enumerate(states))
        heap = [(-most, step, i) for most, step, i in bounds if most >= least]
        heapify(heap)
        while heap and not out_of_time():
            bound, step, i = heappop(heap)
            if step == len(hopes):
                yield -bound, states[i]
            elif (hope := hopes[step](states[i])) >= least and hope > -inf:
                heappush(heap, (-hope, step + 1, i))

    def hope(self, state: State) -> float:
        """About its J, traffic and all; minus infinity when it fits nowhere."""
        samples_per_s = self._evaluator.hoped_samples_per_s(state)
        return self.with_traffic(state, samples_per_s) if samples_per_s else -inf

    def _without_traffic(self, state: State) -> float:
        samples_per_s = self._evaluator.hoped_samples_per_s(state)
        return self._at(state, samples_per_s) if samples_per_s else -inf

    def with_traffic(self, state: State, samples_per_s: float) -> float:
        """Its J if its pipelines alone would do so many samples a second."""
        traffic = self._cost.least_traffic(self._evaluator.space.chains(state))
        samples_per_s = self._batch / (self._batch / samples_per_s + traffic.sums_s)
        usd_per_sample = traffic.usd_per_sample + traffic.usd_per_step / self._batch
        egress_usd_per_s = samples_per_s * usd_per_sample
        return self._at(state, samples_per_s) - self._backlog_usd * egress_usd_per_s

    def _at(self, state: State, samples_per_s: float) -> float:
        """Its J at a rate, egress aside."""
        prices = sum(n * self._price[team] for team, n in self._evaluator.space.used(state))
        return self._idle_score + self._weight * samples_per_s - self._backlog_usd * prices
