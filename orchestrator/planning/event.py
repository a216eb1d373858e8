"""Exact times of a group's step on idle links: what the closed form of the cost model approximates.

A stage runs one instruction at a time, in the order of its schedule, once its input is there. A
message occupies its directed link for its bytes over the bandwidth, then its latency passes;
nobody else uses the link. Source: docs/model.md, section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from orchestrator.core.cluster import Link
from orchestrator.core.plan import Group
from orchestrator.core.schedule import FORWARD, SCHEDULES
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.sums import Alike

SETTLED = (3, 8)
"""Microbatches, over stages and what may be in flight, after which a pipeline may run steadily."""

ROUNDING = 1e-9
"""Relative; what sums of seconds may differ by."""


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on the time line of its group, from the start of the step."""

    stage: int
    op: str
    microbatch: int
    start_s: float
    end_s: float


class _Lane(NamedTuple):
    """What a stage runs, and per microbatch how long it and its messages take."""

    order: Sequence[tuple[str, int]]  # (op, microbatch)
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    output_s: Sequence[float]  # for how long the message to the next stage keeps the link busy
    gradient_s: Sequence[float]  # likewise, to the stage before
    latency_s: tuple[float, float]  # of outputs, of gradients


def timeline(cost: CostModel, group: Group, schedule: str) -> tuple[tuple[Span, ...], ...]:
    """When every instruction of a group runs, per stage: the Gantt chart of one step.

    Raises:
        ValueError: If stages wait for each other for ever.
    """
    return _spans(_lanes(cost, group, schedule))


def stage_ends_s(cost: CostModel, group: Group, schedule: str) -> tuple[float, ...]:
    """When the last backward of every stage ends; alike groups are run once per cost model."""
    inflight_S = tuple([stage.inflight for stage in group.stages])
    key = (cost.key(group.stages), inflight_S, group.microbatches, schedule)
    found = cost.exact_ends_s[key]
    if found is None:
        found = _by_rounds(cost, group, schedule)
        if found is None:
            _, ends_s = _run(_lanes(cost, group, schedule))
            found = tuple([stage[-1] for stage in ends_s])
        cost.exact_ends_s[key] = found
    return found


def _by_rounds(cost: CostModel, group: Group, schedule: str) -> tuple[float, ...] | None:
    """The ends of a long row of like microbatches from those of a short one.

    Returns:
        None when the row is short, or of unlike ones, or has not settled.
    """
    stages, microbatches = group.stages, group.microbatches
    count, depth = len(microbatches), len(stages)
    if count < 3 or microbatches.count(microbatches[0]) < count - (
        microbatches[-1] != microbatches[0]
    ):
        return None
    if schedule != "gpipe":
        depth += stages[0].inflight
    tau_s, moved = cost.steady(stages, microbatches[0], schedule)
    for settled in SETTLED:
        skipped = (count - settled * depth) // moved * moved
        if skipped < 2 * settled * depth or skipped <= moved:
            break
        short = Group(stages, microbatches[skipped:])
        starts_s, ends_s = _run(_lanes(cost, short, schedule))
        last_s = tuple([stage[-1] for stage in ends_s])
        if schedule == "gpipe":
            # An end is the largest of sums that grow with the row, none faster than the period:
            # once it grows as fast it goes on so.
            shorter = Group(stages, microbatches[skipped + moved :])
            before_s = stage_ends_s(cost, shorter, schedule)
            steady = _grows(before_s, last_s, moved * tau_s)
        else:
            steady = _is_steady(short, starts_s, moved, moved * tau_s)
        if steady:
            return tuple([end_s + skipped * tau_s for end_s in last_s])
    return None


def _is_steady(
    group: Group, starts_s: Sequence[Sequence[float]], moved: int, round_s: float
) -> bool:
    """Whether a 1F1B pipeline repeats itself after so many microbatches, up to its drain.

    What starts depends on nothing older than the microbatches in flight. Where as many in a row,
    at every stage, forwards and backwards, start a round after those before them, all that
    follow do. Ends alone do not show it: a slower way through the pipeline may still be longer.
    """
    held = max([stage.inflight for stage in group.stages])
    end = len(group.microbatches) - held - 1
    first = end - moved - held - 1
    if first < held:
        return False
    for stage, starts in zip(group.stages, starts_s, strict=True):
        ahead = stage.inflight - 1
        for place in (-ahead, ahead + 1):  # of forwards and backwards, in turn once all are held
            now = starts[2 * first + place : 2 * (end - moved) + place : 2]
            later = starts[2 * (first + moved) + place : 2 * end + place : 2]
            if not _grows(now, later, round_s):
                return False
    return True


def _grows(before_s: Sequence[float], after_s: Sequence[float], by_s: float) -> bool:
    return all(
        abs(after - before - by_s) <= ROUNDING * by_s
        for before, after in zip(before_s, after_s, strict=True)
    )


def _lanes(cost: CostModel, group: Group, schedule: str) -> list[_Lane]:
    """The group's Program, without a note for every instruction."""
    stages, microbatches, boundary = group.stages, group.microbatches, cost.tables.boundary_bytes
    lanes = []
    for s, stage in enumerate(stages):
        down = cost.link(stage.team, stages[s + 1].team) if s + 1 < len(stages) else None
        up = cost.link(stage.team, stages[s - 1].team) if s else None
        seconds = {m: cost.seconds_of(stage, m) for m in set(microbatches)}
        output_s = {m: _busy_s(down, boundary(stage.end_layer - 1, m)) for m in seconds}
        gradient_s = {m: _busy_s(up, boundary(stage.first_layer - 1, m)) for m in seconds}
        lanes.append(
            _Lane(
                order=SCHEDULES[schedule](stage.inflight, len(microbatches), len(stages)),
                forward_s=[seconds[m][0] for m in microbatches],
                backward_s=[seconds[m][1] for m in microbatches],
                output_s=[output_s[m] for m in microbatches],
                gradient_s=[gradient_s[m] for m in microbatches],
                latency_s=(_latency_s(down), _latency_s(up)),
            )
        )
    return lanes


def _busy_s(link: Link | None, size_bytes: int) -> float:
    """How long a message keeps its link busy; nothing is sent beyond the ends of the group."""
    return link.occupied_s(size_bytes) if link else 0.0


def _latency_s(link: Link | None) -> float:
    return link.latency_s if link else 0.0


class _Post(NamedTuple):
    """Where a stage finds its inputs and leaves its messages: when each microbatch is there."""

    outputs_s: list[float]  # of the stage before; infinite until it is sent
    gradients_s: list[float]  # of the next stage
    below_s: list[float]  # outputs_s of the next stage
    above_s: list[float]  # gradients_s of the stage before
    passed_s: list[float]  # when the last output, and the last gradient, has left its link


def _run(lanes: Sequence[_Lane]) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of what every stage runs, in its order."""
    count, last = len(lanes[0].forward_s), len(lanes) - 1
    outputs_s = [[0.0] * count, *([inf] * count for _ in range(last)), [0.0] * count]
    gradients_s = [[0.0] * count, *([inf] * count for _ in range(last)), [0.0] * count]
    posts = [
        _Post(outputs_s[s], gradients_s[s + 1], outputs_s[s + 1], gradients_s[s], [0.0, 0.0])
        for s in range(last + 1)
    ]
    starts_s: list[list[float]] = [[] for _ in lanes]
    ends_s: list[list[float]] = [[] for _ in lanes]
    left = sum(len(lane.order) for lane in lanes)
    while left:
        before = left
        for s in (*range(last), *range(last, -1, -1)):  # down and up again, as messages go
            left -= _advance(lanes[s], posts[s], starts_s[s], ends_s[s])
        if left == before:
            raise ValueError(
                f"deadlock: stages wait for each other after {[len(ends) for ends in ends_s]} "
                "instructions each"
            )
    return starts_s, ends_s


def _advance(lane: _Lane, post: _Post, starts_s: list[float], ends_s: list[float]) -> int:
    """Run a stage until it must wait; how many instructions that were. Written for speed."""
    order, forward_s, backward_s, output_s, gradient_s, latency_s = lane
    outputs_s, gradients_s, below_s, above_s, passed_s = post
    done, now_s = len(ends_s), ends_s[-1] if ends_s else 0.0
    down_s, up_s = passed_s
    for position in range(done, len(order)):
        op, k = order[position]
        ready_s = outputs_s[k] if op == FORWARD else gradients_s[k]
        if ready_s == inf:
            break
        start_s = ready_s if ready_s > now_s else now_s
        starts_s.append(start_s)
        if op == FORWARD:
            now_s = start_s + forward_s[k]
            down_s = (down_s if down_s > now_s else now_s) + output_s[k]
            below_s[k] = down_s + latency_s[0]
        else:
            now_s = start_s + backward_s[k]
            up_s = (up_s if up_s > now_s else now_s) + gradient_s[k]
            above_s[k] = up_s + latency_s[1]
        ends_s.append(now_s)
    passed_s[:] = down_s, up_s
    return len(ends_s) - done


def _spans(lanes: Sequence[_Lane]) -> tuple[tuple[Span, ...], ...]:
    starts_s, ends_s = _run(lanes)
    return tuple(
        tuple(
            Span(s, op, k, start_s, end_s)
            for (op, k), start_s, end_s in zip(lane.order, starts_s[s], ends_s[s], strict=True)
        )
        for s, lane in enumerate(lanes)
    )


def group_makespan(cost: CostModel, group: Group, schedule: str) -> float:
    """Pipeline time of a group's step, without its gradient sums and update, in seconds."""
    return max(stage_ends_s(cost, group, schedule))


def retime(
    cost: CostModel, groups: Sequence[Group], schedule: str, alike: Sequence[Alike] | None = None
) -> StepEstimate:
    """The estimate of ``CostModel.evaluate``, with exact times of the pipelines."""
    ends_s = [stage_ends_s(cost, group, schedule) for group in groups]
    return cost.evaluate(groups, schedule, alike=alike, stage_ends_s=ends_s)
