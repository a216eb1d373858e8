"""Strong static rivals: uniform plans by exhaustion, and what planners choose by their own models.

They get the same tables and are timed by the same evaluator as everybody.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from orchestrator.core.cluster import Device, Team, make_team
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.roster import Roster
from orchestrator.planning.shares import dealt_by_speed
from orchestrator.strategies.explorer import OutOfTime, team_sizes

Groups = tuple[Group, ...]
Stages = tuple[tuple[tuple[Stage, ...], ...], int]
"""Replicas of one kind, and the microbatch size."""

MANY = 16
"""Microbatches of a replica, where memory is asked for before shares are known."""


def uniform_grid(problem: PlanningProblem, out_of_time: OutOfTime) -> Groups | None:
    """The best of all (dp, tp, pp, microbatch) of equal stages, kind by kind, shares by speed.

    The replicas of a kind are alike, and a kind may stay idle. The fastest kind chooses first;
    each further one joins with whichever of its grids helps most. The batch is dealt by the
    exact water-filling, which is better than what published planners do.
    """
    cost = CostModel(problem)
    kinds = dict.fromkeys(device.kind for device in Roster(problem.cluster).devices)
    chains = {kind: list(_kind_grid(cost, kind)) for kind in kinds}
    alone = {kind: _best(cost, [], options, out_of_time) for kind, options in chains.items()}
    parts: list[Stages] = []
    rate = 0.0
    for kind in sorted(kinds, key=lambda k: -alone[k][0]):
        joined, option = _best(cost, parts, chains[kind], out_of_time) if parts else alone[kind]
        if option is not None and joined > rate:
            rate = joined
            parts.append(option)
    return _dealt(cost, parts) if parts else None


def _best(
    cost: CostModel, parts: Sequence[Stages], options: Sequence[Stages], out_of_time: OutOfTime
) -> tuple[float, Stages | None]:
    """The highest rate that one of the options brings beside what is there already."""
    best: tuple[float, Stages | None] = (0.0, None)
    for option in options:
        groups = _dealt(cost, [*parts, option])
        if groups is not None:
            rate = cost.evaluate(groups, cost.problem.schedules[0]).samples_per_s
            if rate > best[0]:
                best = (rate, option)
        if out_of_time():
            break
    return best


def two_bw(problem: PlanningProblem, out_of_time: OutOfTime) -> Groups | None:
    """What the planner of PipeDream-2BW chooses by its formula, run with a flush at every step.

    All (w, d) with w d <= N, largest microbatch that fits, highest throughput by
    t = max(T_comp + T_comm, T_dp / m); without recomputation, which nothing here has.
    Source: docs/model.md, section 7.
    """
    cost, schedule = CostModel(problem), problem.schedules[0]
    devices = Roster(problem.cluster).devices
    best: tuple[float, Groups] | None = None
    for depth in range(1, min(len(devices), problem.model.num_layers) + 1):
        for width in {len(devices) // depth, max(1, len(devices) // depth // 2)}:
            chains = [
                even_chain(cost, [make_team([d]) for d in devices[w * depth : (w + 1) * depth]])
                for w in range(width)
            ]
            for size in microbatch_sizes(problem.microbatch_samples):
                groups = _dealt(cost, [(tuple(chains), size)])
                if groups is None or cost.memory_error(groups, schedule):
                    continue
                rate = 1.0 / _two_bw_s(cost, groups[0], size, width)
                if best is None or rate > best[0]:
                    best = (rate, groups)
                break  # the largest that fits
        if out_of_time():
            break
    return best[1] if best else None


def _two_bw_s(cost: CostModel, group: Group, size: int, width: int) -> float:
    """Seconds a sample by the 2BW formula."""
    per_update = ceil(cost.problem.batch_samples / (width * size))
    slowest_s = 0.0
    for index, stage in enumerate(group.stages):
        busy_s = sum(cost.stage_seconds(stage.team, stage.first_layer, stage.end_layer, size))
        for other in group.stages[index : index + 2]:
            if other is not stage:
                data = 2 * cost.tables.boundary_bytes(stage.end_layer - 1, size)
                busy_s += cost.link(stage.team, other.team).transfer_s(data)
        params = sum(cost.problem.model.sizes[0].param_bytes[i] for i in stage.layers)
        own = cost.device(stage.team)
        link = cost.problem.cluster.link(own, own)
        sum_s = 2 * (width - 1) / width * params / link.rate_bytes_per_s(params)
        slowest_s = max(slowest_s, busy_s, sum_s / per_update)
    return slowest_s / size / width


def _kind_grid(cost: CostModel, kind: str) -> Iterator[Stages]:
    """Every (tp, pp, microbatch) of one kind, as many replicas as fit."""
    problem = cost.problem
    devices = [d for d in Roster(problem.cluster).devices if d.kind == kind]
    for size in team_sizes(problem).get(kind, (1,)):
        teams = _teams(devices, size)
        for depth in range(1, min(len(teams), problem.model.num_layers) + 1):
            if depth > 1 and len(teams) // depth == len(teams) // (depth - 1) and depth > 8:
                continue  # a deeper chain with no more replicas and more borders
            chains = tuple(
                even_chain(cost, teams[r * depth : (r + 1) * depth])
                for r in range(len(teams) // depth)
            )
            if not chains:
                continue
            for samples in microbatch_sizes(problem.microbatch_samples):
                yield chains, samples


def _teams(devices: Sequence[Device], size: int) -> list[Team]:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node_id, []).append(device)
    return [
        make_team(members[i : i + size])
        for members in nodes.values()
        for i in range(0, len(members) - size + 1, size)
    ]


def even_chain(cost: CostModel, teams: Sequence[Team]) -> tuple[Stage, ...]:
    """Stages of one chain, with as many layers each as can be."""
    layers = cost.problem.model.num_layers
    cuts = [round(i * layers / len(teams)) for i in range(len(teams) + 1)]
    return tuple(
        Stage(team, first, end) for team, (first, end) in zip(teams, pairwise(cuts), strict=True)
    )


def _dealt(cost: CostModel, parts: Sequence[Stages]) -> Groups | None:
    """Groups of these replicas with shares by speed; None where some device lacks memory."""
    problem, schedule = cost.problem, cost.problem.schedules[0]
    # Replicas of one part are alike: one of them stands for all where speeds are asked.
    curves, sizes, chains = [], [], []
    for replicas, size in parts:
        stages = cost.with_inflight(replicas[0], size, MANY, schedule)
        group = Group(stages, (size,) * MANY)
        if not cost.fits([group], schedule, replicated=True):
            return None
        curve = cost.curve(stages, size, schedule)
        for chain in replicas:
            curves.append(curve)
            sizes.append(size)
            chains.append(chain)
    room = sum(curve.max_microbatches * size for curve, size in zip(curves, sizes, strict=True))
    if not len(chains) <= problem.batch_samples <= room:
        return None
    groups = dealt_by_speed(cost, chains, sizes, curves, schedule)
    return None if cost.memory_error(groups, schedule) else groups
