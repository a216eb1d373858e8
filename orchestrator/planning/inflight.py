"""How many microbatches each stage of a group keeps in flight, and which stages recompute."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING

from orchestrator.core.plan import Stage
from orchestrator.planning.pipeline import best_inflight

if TYPE_CHECKING:
    from orchestrator.planning.groups import GroupModel

SLOW_LINK_RATIO = 0.10  # of the longest stage: from here on more microbatches are kept in flight

MOST_INFLIGHT_RATIO = 4  # of plain 1F1B's: a message each way between neighbours, and one waiting


def holding(
    model: "GroupModel",
    stages: tuple[Stage, ...],
    microbatch: int,
    count: int,
    schedule: str,
    *,
    replicated: bool,
) -> tuple[Stage, ...]:
    """The stages with K_s, of ``count`` microbatches; see ``GroupModel.with_inflight``.

    Where a stage has too little room, of recomputing there and keeping less in flight what is
    faster.

    Source: docs/model.md, sections 3.2 and 3.5.
    """
    wanted_S = [count] * len(stages) if schedule == "gpipe" else range(len(stages), 0, -1)
    chosen = model.problem.activation_checkpointing
    always = chosen == "always"
    kept = tuple([s if s.recompute is always else replace(s, recompute=always) for s in stages])

    def room(stage: Stage) -> int:
        return model.memory.max_held(stage, microbatch, replicated=replicated)

    def with_k(some: tuple[Stage, ...], room_S: Sequence[int]) -> tuple[Stage, ...]:
        inflight_S: tuple[int, ...] = (count,) * len(some)
        if schedule != "gpipe":
            inflight_S = _one_f_one_b(model, some, room_S, microbatch, count, replicated=replicated)
        return tuple([_holding(s, k) for s, k in zip(some, inflight_S, strict=True)])

    room_S = [room(stage) for stage in kept]
    plain = with_k(kept, room_S)
    tight = [most < min(k, count) for most, k in zip(room_S, wanted_S, strict=True)]
    if chosen != "auto" or not any(tight):
        return plain
    others = [replace(s, recompute=True) if t else s for s, t in zip(kept, tight, strict=True)]
    more_S = [room(s) if t else most for s, t, most in zip(others, tight, room_S, strict=True)]
    if all(more <= most for more, most in zip(more_S, room_S, strict=True)):
        return plain
    again_S = [max(pair) for pair in zip(more_S, room_S, strict=True)]
    pairs = zip(others, kept, more_S, room_S, strict=True)
    again = tuple([other if more > most else s for other, s, more, most in pairs])

    def lasts_s(some: tuple[Stage, ...]) -> float:
        """A microbatch, on average over what memory holds of them."""
        curve = model.curve(some, microbatch, schedule, replicated=replicated)
        share = min(count, curve.max_microbatches)
        if not share:
            return inf
        return (curve.fill_drain_s + (share - 1) * curve.period_s) / share

    return min((plain, with_k(again, again_S)), key=lasts_s)


def _holding(stage: Stage, inflight: int) -> Stage:
    if stage.inflight == inflight:
        return stage
    return Stage(
        stage.team, stage.first_layer, stage.end_layer, inflight, stage.splits, stage.recompute
    )


def _one_f_one_b(
    model: "GroupModel",
    stages: tuple[Stage, ...],
    most_S: Sequence[int],
    microbatch: int,
    count: int,
    *,
    replicated: bool,
) -> tuple[int, ...]:
    chain, wanted_S = model.chain(stages, microbatch), range(len(stages), 0, -1)
    room_S = []
    for room, plain in zip(most_S, wanted_S, strict=True):
        most = MOST_INFLIGHT_RATIO * plain
        room_S.append(most if room >= count else min(most, room))
    if any(room < min(plain, count) for room, plain in zip(room_S, wanted_S, strict=True)):
        # Too tight for plain 1F1B: as many as fit, and never more than the stage before holds.
        return tuple(accumulate((max(1, min(k)) for k in zip(room_S, wanted_S, strict=True)), min))
    slow_s = SLOW_LINK_RATIO * max(chain.work_s)
    if max((*chain.down_s, *chain.up_s), default=0.0) > slow_s:
        wanted_S = range(2 * len(stages) - 1, 0, -2)
    found = best_inflight(chain, wanted_S, room_S)
    if all(before - held <= 1 for before, held in pairwise(found)):
        return found
    held = [replace(s, inflight=k) for s, k in zip(stages, found, strict=True)]
    if model.memory.holds(held, microbatch, count, replicated=replicated):
        return found
    return tuple(range(len(stages), 0, -1))  # no message then waits that was not counted
