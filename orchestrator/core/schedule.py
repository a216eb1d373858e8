"""A group's Program: per stage the ordered instructions that workers and simulator execute."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from orchestrator.core.plan import Group

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True, slots=True)
class Instruction:
    """Run one microbatch through a stage in one direction, then pass the result on.

    ``source`` and ``target`` are stage indices of the same group, None at the ends of the
    pipeline; ``tag`` numbers the transfer it produces, ``source_tag`` the one it waits for.
    """

    op: str  # FORWARD or BACKWARD
    microbatch: int
    source: int | None
    target: int | None
    source_tag: int
    tag: int
    size_bytes: int = 0  # of the transfer it produces
    version: int = 0  # of the weights; asynchronous schedules only


Program = tuple[tuple[Instruction, ...], ...]  # one tuple of instructions per stage
Order = Callable[[int, int, int], Sequence[tuple[str, int]]]


def _one_f_one_b(
    inflight: int, num_microbatches: int, num_stages: int
) -> Sequence[tuple[str, int]]:
    ahead = min(num_microbatches, inflight - 1)
    order = [(FORWARD, k) for k in range(ahead)]
    for k in range(num_microbatches):
        if ahead + k < num_microbatches:
            order.append((FORWARD, ahead + k))
        order.append((BACKWARD, k))
    return order


def _gpipe(inflight: int, num_microbatches: int, num_stages: int) -> Sequence[tuple[str, int]]:
    forwards = [(FORWARD, k) for k in range(num_microbatches)]
    return [*forwards, *((BACKWARD, k) for k in range(num_microbatches))]


SCHEDULES: dict[str, Order] = {"1f1b": _one_f_one_b, "gpipe": _gpipe}
"""Name to order: (K_s, microbatches, stages) -> (op, microbatch) of one stage."""

EVALUATION = "evaluation"
"""Not a schedule of a plan: all forwards and nothing else."""


def build_program(
    group: Group, schedule: str, boundary_bytes_per_sample: Sequence[float] = ()
) -> Program:
    """Return the Program of a group.

    Args:
        group: Its stages (with K_s) and microbatches.
        schedule: A key of ``SCHEDULES``, or ``EVALUATION``.
        boundary_bytes_per_sample: Bytes leaving each layer for the next, per sample; empty:
            transfers get size 0 (the workers know the real size).

    Raises:
        ValueError: On an unknown schedule, or if the Program would deadlock.
    """
    if schedule == EVALUATION:
        program = build_program(group, "gpipe", boundary_bytes_per_sample)
        return tuple(tuple(i for i in todo if i.op == FORWARD) for todo in program)
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    order, last = SCHEDULES[schedule], len(group.stages) - 1
    found = []
    for s, stage in enumerate(group.stages):
        todo = []
        for op, k in order(stage.inflight, len(group.microbatches), len(group.stages)):
            forward = op == FORWARD
            source = (s - 1 if s > 0 else None) if forward else (s + 1 if s < last else None)
            target = (s + 1 if s < last else None) if forward else (s - 1 if s > 0 else None)
            border = stage.end_layer - 1 if forward else stage.first_layer - 1
            size = 0.0
            if target is not None and len(boundary_bytes_per_sample):
                size = boundary_bytes_per_sample[border] * group.microbatches[k]
            tag = 2 * k + (0 if forward else 1)
            todo.append(Instruction(op, k, source, target, tag, tag, round(size)))
        found.append(tuple(todo))
    check_program(tuple(found), len(group.microbatches))
    return tuple(found)


def check_program(program: Program, num_microbatches: int) -> None:
    """Refuse a Program that cannot run.

    Raises:
        ValueError: On a microbatch without exactly one forward and one backward, a backward
            before its forward, or stages that wait for each other for ever.
    """
    for s, todo in enumerate(program):
        _check_stage(s, todo, num_microbatches)
    done: set[tuple[int, str, int]] = set()
    position = [0] * len(program)
    moved = True
    while moved:
        moved = False
        for s, todo in enumerate(program):
            while position[s] < len(todo):
                i = todo[position[s]]
                if i.source is not None and (i.source, i.op, i.microbatch) not in done:
                    break
                done.add((s, i.op, i.microbatch))
                position[s] += 1
                moved = True
    stuck = [(s, todo[position[s]]) for s, todo in enumerate(program) if position[s] < len(todo)]
    if stuck:
        raise ValueError(f"deadlock: stages wait for each other at {stuck}")


def _check_stage(s: int, todo: Sequence[Instruction], num_microbatches: int) -> None:
    wanted = sorted((op, k) for op in (BACKWARD, FORWARD) for k in range(num_microbatches))
    if sorted((i.op, i.microbatch) for i in todo) != wanted:
        raise ValueError(
            f"stage {s} does not run each of {num_microbatches} microbatches once forward "
            "and once backward"
        )
    seen: set[int] = set()
    for i in todo:
        if i.op == FORWARD:
            seen.add(i.microbatch)
        elif i.microbatch not in seen:
            raise ValueError(f"stage {s} runs microbatch {i.microbatch} backward before forward")


def list_schedule(
    release_s: Sequence[float], duration_s: Sequence[float], owners: Sequence[Sequence[Hashable]]
) -> tuple[float, ...]:
    """Finish time of each gradient sum: taken by release time, each occupies all its owners.

    Args:
        release_s: Earliest start of each segment.
        duration_s: Time its sum takes.
        owners: Per segment, the workers (any hashable numbering) it occupies.

    Source: docs/model.md, section 3.6.
    """
    free_s: dict[Hashable, float] = {}
    finish_s = [0.0] * len(release_s)
    for z in sorted(range(len(release_s)), key=release_s.__getitem__):
        start = release_s[z]
        for owner in owners[z]:
            if (free := free_s.get(owner, start)) > start:
                start = free
        finish_s[z] = finish = start + duration_s[z]
        for owner in owners[z]:
            free_s[owner] = finish
    return tuple(finish_s)
