"""Stages that are cut already get their shares of the batch, and in flight what a share needs."""

from collections.abc import Sequence

from orchestrator.core.plan import Group, Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.groups import GroupCurve
from orchestrator.planning.waterfill import deal_samples


def with_share(
    cost: CostModel, stages: tuple[Stage, ...], share: tuple[int, ...], schedule: str
) -> Group:
    """The group of these stages with these microbatches and K_s anew."""
    return Group(cost.with_inflight(stages, share[0], len(share), schedule), share)


def dealt_by_speed(
    cost: CostModel,
    chains: Sequence[tuple[Stage, ...]],
    sizes: Sequence[int],
    curves: Sequence[GroupCurve],
    schedule: str,
) -> tuple[Group, ...]:
    """Groups of these chains whose shares hold the batch and end the slowest soonest.

    Args:
        cost: Of the problem.
        chains: Stages of each group.
        sizes: Samples of a full microbatch of each.
        curves: Time of each over its full microbatches, and the most that memory holds.
        schedule: Of all groups.

    Raises:
        ValueError: If there are fewer samples than groups, or more than memory allows.
    """
    shares = deal_samples(
        [curve.fill_drain_s for curve in curves],
        [curve.period_s for curve in curves],
        sizes,
        cost.problem.batch_samples,
        [curve.max_microbatches for curve in curves],
    )
    return tuple(
        with_share(cost, stages, share, schedule)
        for stages, share in zip(chains, shares, strict=True)
    )
