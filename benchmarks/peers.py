"""Published planners as this project reads them: their batch time picks the plan, ours judges it.

Every form sees the same plans, profile, memory and links. None knows a long-term budget; Sailor
knows a cap per iteration, which is tuned in hindsight.

Source: docs/model.md, section 3.8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.reference_world import World, all_states
from orchestrator.core.plan import Group, Plan
from orchestrator.planning.cost import CostModel
from orchestrator.simulation.environments import FloatArray


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One group in the terms that the forms use; seconds of one microbatch."""

    num_microbatches: int
    work_s: tuple[float, ...]  # w_s
    link_s: tuple[float, ...]  # c_s
    ring_s: float  # the group's sums over the slowest pair


Form = Callable[[Pipeline], float]


def sailor(p: Pipeline) -> float:
    """``(n-1) max(w + 2c) + sum w + 2 sum c`` and the ring."""
    links = (*p.link_s, 0.0)
    period_s = max(w + 2 * c for w, c in zip(p.work_s, links, strict=True))
    return (p.num_microbatches - 1) * period_s + sum(p.work_s) + 2 * sum(p.link_s) + p.ring_s


def metis(p: Pipeline) -> float:
    """``(n-1) max w + sum w``, activations once, and the ring."""
    return (p.num_microbatches - 1) * max(p.work_s) + sum(p.work_s) + sum(p.link_s) + p.ring_s


def amp(p: Pipeline) -> float:
    """As Metis, with the mean of the stages for the slowest one."""
    mean_s = sum(p.work_s) / len(p.work_s)
    return (p.num_microbatches - 1) * mean_s + sum(p.work_s) + sum(p.link_s) + p.ring_s


def harp(p: Pipeline) -> float:
    """``sum (w + 2c) + (n-1) max w``; gradients are summed for free."""
    return sum(p.work_s) + 2 * sum(p.link_s) + (p.num_microbatches - 1) * max(p.work_s)


def piper(p: Pipeline) -> float:
    """The steady state alone: no fill, no drain, no links."""
    return p.num_microbatches * max(p.work_s)


def jabas(p: Pipeline) -> float:
    """Data parallel only: accumulated steps, or the sum behind them if it lasts longer."""
    if len(p.work_s) > 1:
        return float("inf")
    return max(p.num_microbatches * p.work_s[0], p.ring_s)


FORMS: dict[str, Form] = {
    "sailor": sailor, "metis": metis, "amp": amp, "harp": harp, "piper": piper, "jabas": jabas,
}  # fmt: skip


def predicted_s(world: World, plans: Sequence[Plan], form: Form) -> FloatArray:
    """A form's batch time of every plan (column, idle first) in every state (row)."""
    found = np.full((world.environment.num_states, len(plans) + 1), np.inf)
    for s, cluster in enumerate(all_states(world)):
        cost = CostModel(world.problem(cluster))
        for k, plan in enumerate(plans, start=1):
            if all(map(cluster.has, plan.device_ids)):
                found[s, k] = max(form(_pipeline(cost, group, plan)) for group in plan.groups)
    return found


def _pipeline(cost: CostModel, group: Group, plan: Plan) -> Pipeline:
    model, size = cost.problem.model, group.microbatches[0]
    boundary = model.sizes[0].boundary_bytes_per_sample
    heads = [other.stages[0].team for other in plan.groups]
    rings = [(a, b) for a in heads for b in heads if a is not b]
    narrowest = min((cost.link(a, b).bandwidth_bytes_per_s for a, b in rings), default=1.0)
    share = 2 * (len(heads) - 1) / len(heads)
    return Pipeline(
        len(group.microbatches),
        tuple(
            sum(cost.stage_seconds(s.team, s.first_layer, s.end_layer, size)) for s in group.stages
        ),
        tuple(
            cost.link(upper.team, lower.team).transfer_s(boundary[upper.end_layer - 1] * size)
            for upper, lower in pairwise(group.stages)
        ),
        share * sum(model.sizes[0].param_bytes) / narrowest,
    )
