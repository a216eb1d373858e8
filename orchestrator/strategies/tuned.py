"""Reference strategies with one number that hindsight may tune: a cap on money, a fixed price."""

from collections.abc import Sequence
from math import inf

from orchestrator.core.slot import Candidate, PlanningProblem, StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.frontier import budget_value, fastest_within
from orchestrator.planning.space import Trial
from orchestrator.strategies.explorer import Explorer, OutOfTime, candidates_of

PRICE_PARTS = (0.25, 0.5, 0.75, 1.0)
"""Prices of money, in units of the best samples per dollar, at which plans are looked for."""


def plans_of_all_prices(
    explorer: Explorer, problem: PlanningProblem, out_of_time: OutOfTime
) -> Sequence[Trial]:
    """What searches see from the fastest plan to the thriftiest."""
    trials = explorer.search(problem, out_of_time, price_of_money_samples_per_usd=0.0)
    best_ratio = max(t.estimate.samples_per_usd for t in trials)
    for part in PRICE_PARTS:
        explorer.search(problem, out_of_time, price_of_money_samples_per_usd=part * best_ratio)
    return explorer.seen(problem)


class RateCap:
    """The fastest plan that costs no more than a rate in this very slot.

    Args:
        cap_usd_per_s: The rate, in dollars per second of the run; the budget's when absent.

    Source: docs/model.md, section 7.
    """

    deals_shares = True

    def __init__(self, cap_usd_per_s: float | None = None) -> None:
        self.cap_usd_per_s, self._explorer = cap_usd_per_s, Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The fastest plan below the rate and idle; see ``Strategy``."""
        cap = self.cap_usd_per_s or problem.budget_usd_per_s
        seen = plans_of_all_prices(self._explorer, problem, out_of_time)
        best = fastest_within(seen, cap)
        return candidates_of(problem, [best] if best else [])


class PriceCap:
    """The fastest plan whose samples cost no more than so much each: strong once it is tuned.

    Args:
        cap_usd_per_sample: What a sample may cost. When absent, the first state decides: what
            one costs in its fastest plan within the budget, else in its cheapest plan.

    Source: docs/model.md, section 7.
    """

    deals_shares = True

    def __init__(self, cap_usd_per_sample: float | None = None) -> None:
        self.cap_usd_per_sample, self._explorer = cap_usd_per_sample, Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The fastest plan below the cap and idle; see ``Strategy``."""
        seen = plans_of_all_prices(self._explorer, problem, out_of_time)
        if self.cap_usd_per_sample is None:
            within = fastest_within(seen, problem.budget_usd_per_s)
            ratios = [trial.estimate.samples_per_usd for trial in ([within] if within else seen)]
            self.cap_usd_per_sample = 1.0 / max(ratios)
        # A hair more: the plan that sets the cap is within it.
        least = (1 - 1e-9) / self.cap_usd_per_sample
        thrifty = [trial for trial in seen if trial.estimate.samples_per_usd >= least]
        best = fastest_within(thrifty, inf)
        return candidates_of(problem, [best] if best else [])


class FrozenPrice:
    """The plan of most ``r - lambda c`` at a price of money that never moves.

    Args:
        price_samples_per_usd: lambda. When absent, the first state decides: the price at which
            the budget just binds there.

    Source: docs/model.md, section 7.
    """

    deals_shares = True

    def __init__(self, price_samples_per_usd: float | None = None) -> None:
        self.price_samples_per_usd, self._explorer = price_samples_per_usd, Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The plan of best worth at the price and idle; see ``Strategy``."""
        idle = CostModel(problem).idle
        if self.price_samples_per_usd is None:
            seen = plans_of_all_prices(self._explorer, problem, out_of_time)
            state = [idle, *(trial.estimate for trial in seen)]
            value = budget_value([state], problem.budget_usd_per_s)
            self.price_samples_per_usd = value.price_of_money_samples_per_usd
        price = self.price_samples_per_usd
        trials = self._explorer.search(problem, out_of_time, price_of_money_samples_per_usd=price)

        def worth(estimate: StepEstimate) -> float:
            return estimate.samples_per_s - price * estimate.cost_usd_per_s

        best = max(trials, key=lambda t: worth(t.estimate))
        # Level with idling, as a plan is that the price was taken from, it runs.
        runs = worth(best.estimate) >= worth(idle) - 1e-9 * best.estimate.samples_per_s
        return candidates_of(problem, [best] if runs else [])
