"""Where the price of money of a run would start, how fast it follows, and the slack it needs."""

from collections.abc import Sequence

from orchestrator.config import RunConfig
from orchestrator.control.alarms import low_cap_text
from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, StepEstimate
from orchestrator.reports import figures


def pace_notes(config: RunConfig, treasury: Treasury, first: StepEstimate) -> list[str]:
    """What a reader must know of a budget that binds; nothing where it does not.

    Args:
        config: The whole file.
        treasury: Of the first slot, once it is decided.
        first: What would run in it.

    Source: docs/model.md, section 4.4.
    """
    if not treasury.placeholder_usd or not first.step_s:
        return []
    speedup = config.emulation.billing_speedup
    dollars = figures.usd(first.cost_usd_per_s * 3600 / speedup)
    follows = figures.seconds(treasury.time_constant_s * speedup)
    price = figures.number(treasury.price_of_money_samples_per_usd)
    return [
        f"At this budget one more dollar is worth {price} samples; a run starts at that price of "
        f"money. The plan chosen makes {figures.number(first.samples_per_s)} samples/s at "
        f"{dollars}/h; where plans take turns, {figures.number(treasury.reference_samples_per_s)} "
        "samples/s can be had at the average budget. The price of money follows what is spent "
        f"within {follows}; at most {figures.usd(treasury.line_usd)} and the bill of a slot are "
        "spent ahead of the average."
    ]


def conflict_notes(config: RunConfig, treasury: Treasury, found: Sequence[Candidate]) -> list[str]:
    """What the section ``budget`` asks and cannot have; a run says so once it has tried.

    Args:
        config: The whole file.
        treasury: Of the first slot, once it is decided.
        found: Plans that run and keep the limits.

    Source: docs/model.md, section 4.6.
    """
    budget, speedup = config.budget, config.emulation.billing_speedup
    notes = [f"budget.{text}." for text in (low_cap_text(treasury),) if text]
    fastest = max((c.estimate.samples_per_s for c in found), default=0.0)
    reached = treasury.reference_samples_per_s or fastest
    if found and budget.min_samples_per_s > reached:
        notes.append(
            f"budget.min_samples_per_s is {budget.min_samples_per_s:g}, but "
            f"{figures.number(reached)} samples/s can be had for the average budget, and "
            f"{figures.number(fastest)} at most: both will be missed; lower it, or raise "
            "budget.average_per_hour_usd."
        )
    least = min((c.estimate.cost_usd_per_s for c in found), default=0.0)
    if not budget.allow_idle and least > treasury.budget_usd_per_s:
        notes.append(
            "budget.allow_idle is false, and the cheapest plan costs "
            f"{figures.usd(least * 3600 / speedup)}/h, more than budget.average_per_hour_usd: the "
            "average cannot be kept, only total_usd protects."
        )
    return notes
