"""Where the price of money of a run would start, how fast it follows, and the slack it needs."""

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config import RunConfig
from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.frontier import budget_value
from orchestrator.reports import figures


def pace_notes(
    config: RunConfig, problem: PlanningProblem, candidates: Sequence[Candidate]
) -> list[str]:
    """What a reader must know of a budget that binds; nothing where it does not.

    Args:
        config: The whole file.
        problem: The first slot.
        candidates: Plans that obey the limits.

    Source: docs/model.md, section 4.4.
    """
    running = [c for c in candidates if not c.plan.is_idle]
    state = [*(c.estimate for c in running), CostModel(problem).idle]
    value = budget_value([state], problem.budget_usd_per_s)
    if not value.price_of_money_samples_per_usd:
        return []
    speedup = config.emulation.billing_speedup
    treasury = Treasury(config.budget, config.control, billing_speedup=speedup)
    treasury.learn(c.estimate for c in running)
    treasury.open(value)
    priced = CostModel(
        replace(
            problem,
            penalty_weight=treasury.penalty_weight,
            backlog_usd=treasury.queues.backlog_usd,
        )
    )
    first = max(running, key=lambda c: priced.score(c.estimate)).estimate
    dollars = figures.usd(first.cost_usd_per_s * 3600 / speedup)
    follows = figures.seconds(treasury.time_constant_s * speedup)
    price = figures.number(treasury.price_of_money_samples_per_usd)
    return [
        f"A run starts where one more dollar is worth {price} samples, as the budget has it: the "
        "best plan then makes "
        f"{figures.number(first.samples_per_s)} samples/s at {dollars}/h, and on average "
        f"{figures.number(value.samples_per_s)} samples/s can be had. That price follows within "
        f"{follows}; at most {figures.usd(treasury.line_usd)} and the bill of a slot are spent "
        "ahead of the average."
    ]
