"""Where the price of money of a run would start, how fast it follows, and the slack it needs."""

from orchestrator.config import RunConfig
from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import StepEstimate
from orchestrator.reports import figures


def pace_notes(config: RunConfig, treasury: Treasury, first: StepEstimate) -> list[str]:
    """What a reader must know of a budget that binds; nothing where it does not.

    Args:
        config: The whole file.
        treasury: Of the first slot, once it is decided.
        first: What would run in it.

    Source: docs/model.md, section 4.4.
    """
    if not treasury.placeholder_usd:
        return []
    speedup = config.emulation.billing_speedup
    dollars = figures.usd(first.cost_usd_per_s * 3600 / speedup)
    follows = figures.seconds(treasury.time_constant_s * speedup)
    price = figures.number(treasury.price_of_money_samples_per_usd)
    return [
        f"A run starts where one more dollar is worth {price} samples, as the budget has it: the "
        "plan chosen then makes "
        f"{figures.number(first.samples_per_s)} samples/s at {dollars}/h, and on average "
        f"{figures.number(treasury.reference_samples_per_s)} samples/s can be had. That price "
        f"follows within {follows}; at most {figures.usd(treasury.line_usd)} and the bill of a "
        "slot are spent ahead of the average."
    ]
