"""Exact times of a Program on idle links: what the closed form of the cost model approximates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orchestrator.core.cluster import Link
from orchestrator.core.plan import Group
from orchestrator.core.schedule import FORWARD, Program, build_program
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.sums import Alike

Seconds = Callable[[int, str, int], float]
"""(stage, op, microbatch) -> duration."""


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on the time line of its group, from the start of the step."""

    stage: int
    op: str
    microbatch: int
    start_s: float
    end_s: float


def run_program(
    program: Program, seconds: Seconds, borders: Sequence[tuple[Link, Link]]
) -> tuple[tuple[Span, ...], ...]:
    """When every instruction starts and ends, per stage in order.

    A stage runs one instruction at a time, in Program order, once its input is there. A
    message occupies its directed link for its bytes over the bandwidth, then its latency
    passes; nobody else uses the link.

    Args:
        program: Must be free of deadlock (``build_program`` checks).
        seconds: Duration of each instruction.
        borders: Links between stage s and s + 1: down, for outputs, and up, for gradients.

    Source: docs/model.md, section 3.2.
    """
    spans: list[list[Span]] = [[] for _ in program]
    arrival_s: dict[tuple[int, str, int], float] = {}
    free_s = [0.0] * len(program)
    down_free_s, up_free_s = [0.0] * len(program), [0.0] * len(program)
    left = sum(len(todo) for todo in program)
    while left:
        for s, todo in enumerate(program):
            while len(spans[s]) < len(todo):
                i = todo[len(spans[s])]
                ready_s = free_s[s]
                if i.source is not None:
                    received_s = arrival_s.get((s, i.op, i.microbatch))
                    if received_s is None:
                        break
                    ready_s = max(ready_s, received_s)
                end_s = free_s[s] = ready_s + seconds(s, i.op, i.microbatch)
                spans[s].append(Span(s, i.op, i.microbatch, ready_s, end_s))
                left -= 1
                if i.target is not None:
                    down = i.op == FORWARD
                    link = borders[s][0] if down else borders[s - 1][1]
                    busy_s = down_free_s if down else up_free_s
                    busy_s[s] = max(busy_s[s], end_s) + link.occupied_s(i.size_bytes)
                    arrival_s[i.target, i.op, i.microbatch] = busy_s[s] + link.latency_s
    return tuple(tuple(stage) for stage in spans)


def timeline(cost: CostModel, group: Group, schedule: str) -> tuple[tuple[Span, ...], ...]:
    """When every instruction of a group runs, per stage: the Gantt chart of one step."""
    sizes = cost.problem.model.sizes[0].boundary_bytes_per_sample
    seconds = {
        (s, m): cost.stage_seconds(stage.team, stage.first_layer, stage.end_layer, m)
        for s, stage in enumerate(group.stages)
        for m in set(group.microbatches)
    }
    return run_program(
        build_program(group, schedule, sizes),
        lambda s, op, k: seconds[s, group.microbatches[k]][0 if op == FORWARD else 1],
        [(cost.link(a.team, b.team), cost.link(b.team, a.team)) for a, b in pairwise(group.stages)],
    )


def stage_ends_s(cost: CostModel, group: Group, schedule: str) -> tuple[float, ...]:
    """When the last backward of every stage ends."""
    return tuple(stage[-1].end_s for stage in timeline(cost, group, schedule))


def group_makespan(cost: CostModel, group: Group, schedule: str) -> float:
    """Pipeline time of a group's step, without its gradient sums and update, in seconds."""
    return max(stage_ends_s(cost, group, schedule))


def retime(
    cost: CostModel, groups: Sequence[Group], schedule: str, alike: Sequence[Alike] | None = None
) -> StepEstimate:
    """The estimate of ``CostModel.evaluate``, with exact times of the pipelines."""
    ends_s = [stage_ends_s(cost, group, schedule) for group in groups]
    return cost.evaluate(groups, schedule, alike=alike, stage_ends_s=ends_s)
