"""What one more device, dollar or microbatch is worth before a run has started."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.constraints import Row
from orchestrator.planning.cost import CostModel
from orchestrator.planning.frontier import budget_value
from orchestrator.planning.margins import marginal_values
from orchestrator.reports import figures
from orchestrator.reports.worth import Worth

TIE_RATIO = 1e-6
"""Of a plan's rate: plans whose worth differs by less are equally good."""


def worth_beside(
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    rows: Sequence[Row],
    *,
    billing_speedup: float,
) -> Worth | None:
    """Marginal values at the price of money that the average budget leads to.

    A run that lasts lets plans take turns so that the budget holds on average; the price of
    money is what one more dollar would then bring, and the values are those of the plan that
    is best at this price. At the price that a budget between two plans leads to both are: then
    it is the chosen one.

    Args:
        problem: The first slot.
        candidates: Plans that obey the limits, the chosen one first.
        rows: The user's limits.
        billing_speedup: Billed seconds per second of the run's clock.

    Returns:
        None when nothing runs.
    """
    running = [c for c in candidates if not c.plan.is_idle]
    if not running:
        return None
    state = [*(c.estimate for c in running), CostModel(problem).idle]
    value = budget_value([state], problem.budget_usd_per_s)
    price = value.price_of_money_samples_per_usd
    cost = CostModel(replace(problem, penalty_weight=1.0, backlog_usd=price))
    top = max(cost.score(c.estimate) for c in running)
    best = next(
        c for c in running if cost.score(c.estimate) >= top - TIE_RATIO * c.estimate.samples_per_s
    )
    found = marginal_values(cost, best, rows)
    if found is None:
        return None
    per_hour = 3600.0 / billing_speedup
    used = set(best.plan.device_ids)
    beside = "the chosen plan"
    if not best.plan.same_work(running[0].plan):
        rate = figures.number(best.estimate.samples_per_s)
        dollars = figures.usd(best.estimate.cost_usd_per_s * per_hour)
        figures_text = f"{rate} samples/s at {dollars}/h"
        beside = f"the plan that is best at the budget's price of money ({figures_text})"
    return Worth(
        beside=beside,
        values=found.named(per_hour),
        prices=tuple(
            (offer.pool, offer.price_usd_per_s * per_hour) for offer in problem.cluster.offers
        ),
        idle=tuple(sorted({d.pool for d in problem.cluster.devices if d.device_id not in used})),
    )
