"""Two plans to layer moves and the pause they cost."""

from collections import defaultdict

from orchestrator.core.plan import Migration, Move, Plan
from orchestrator.core.slot import PlanningProblem

GROUP_SETUP_S = 0.1
"""Building the process groups of a new plan; measured at 2 to 8 workers."""


def plan_migration(problem: PlanningProblem, old: Plan | None, new: Plan) -> Migration:
    """What must move from the old plan's owners to the new one's, and how long that takes.

    A layer is sent to each new owner that did not hold it, by its present old owners in turn:
    weights, buffers and optimizer state, no gradients. A layer whose old owners have all left
    is not listed: it comes from a checkpoint. A first plan, and to or from idle, moves nothing.

    The pause: building groups, and the device that sends or receives longest, each device one
    transfer a direction at a time. The step under way is finished before it; that is work.

    Raises:
        ValueError: If a link between two owners is not described.

    Source: docs/model.md, section 4.8.
    """
    if old is None or old.is_idle or new.is_idle or old.same_work(new):
        return Migration()
    moves = _moves(problem, old, new)
    cluster = problem.cluster
    pair_bytes: dict[tuple[str, str], int] = defaultdict(int)
    for move in moves:
        pair_bytes[move.source, move.target] += move.size_bytes
    sending_s: dict[str, float] = defaultdict(float)
    receiving_s: dict[str, float] = defaultdict(float)
    for (source, target), size_bytes in pair_bytes.items():
        link = cluster.link(cluster.device(source), cluster.device(target))
        seconds = link.transfer_s(size_bytes)
        sending_s[source] += seconds
        receiving_s[target] += seconds
    transfer_s = max([*sending_s.values(), *receiving_s.values()], default=0.0)
    return Migration(moves=moves, pause_s=GROUP_SETUP_S + transfer_s)


def _owners(plan: Plan, layer: int) -> tuple[str, ...]:
    return tuple(
        device
        for group in plan.groups
        for stage in group.stages
        if layer in stage.layers
        for device in stage.team.device_ids
    )


def _moves(problem: PlanningProblem, old: Plan, new: Plan) -> tuple[Move, ...]:
    model = problem.model
    sizes, ratio = model.sizes[0], model.optimizer_bytes_per_param_byte
    moves, turn = [], 0
    for layer in range(model.num_layers):
        held = _owners(old, layer)
        sources = [device for device in held if problem.cluster.has(device)]
        trained_bytes = sizes.param_bytes[layer] - sizes.frozen_bytes[layer]
        # The ratio counts the gradient, which stays, in place of the parameters, which move.
        state_bytes = sizes.frozen_bytes[layer] + trained_bytes * ratio
        for target in _owners(new, layer):
            if target in held or not sources:
                continue
            moves.append(Move(layer, sources[turn % len(sources)], target, round(state_bytes)))
            turn += 1
    return tuple(moves)
