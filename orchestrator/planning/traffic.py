"""What traffic will take from the promise of a tentative state, before it has cuts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from orchestrator.core.cluster import Team
from orchestrator.planning.groups import GroupModel
from orchestrator.planning.sums import Alike, GradientSums


class Traffic(NamedTuple):
    """What moving gradients and activations takes at least, about."""

    sums_s: float  # of a step, after the pipelines have ended
    usd_per_step: float  # egress of gradient sums
    usd_per_sample: float  # egress of activations and their gradients


def least_traffic(
    model: GroupModel, sums: GradientSums, chains: Sequence[tuple[tuple[Team, ...], Alike]]
) -> Traffic:
    """Traffic of chains whose cuts are even; sums of unlike stages go on side by side."""
    stages = min(len(teams) for teams, _ in chains)
    sums_s = usd_per_step = 0.0
    if sum(alike.num_groups for _, alike in chains) > 1:
        shown = dict.fromkeys((0, stages // 2, stages - 1))
        found = [sums.even(chains, stage, stages) for stage in shown]
        sums_s = max(seconds for seconds, _ in found)
        usd_per_step = stages * min(usd for _, usd in found)
    return Traffic(sums_s, usd_per_step, min(_usd_per_sample(model, teams) for teams, _ in chains))


def _usd_per_sample(model: GroupModel, teams: Sequence[Team]) -> float:
    """Both ways over every border of a chain, at the boundary of fewest bytes."""
    if len(teams) == 1:
        return 0.0
    usd_per_byte = sum(
        model.link(a, b).egress_usd_per_byte + model.link(b, a).egress_usd_per_byte
        for a, b in pairwise(teams)
    )
    return model.tables.least_boundary_bytes * usd_per_byte
