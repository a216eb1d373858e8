"""Closed forms of a group's pipeline time, from the times of its stages and borders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Chain(NamedTuple):
    """Times of a group for one microbatch size; border s joins stage s to stage s + 1."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    work_s: tuple[float, ...]
    down_s: tuple[float, ...]  # boundary to the next stage
    up_s: tuple[float, ...]  # its gradient back
    round_trip_s: tuple[float, ...]  # RTT_s; the first is fill and drain
    occupied_s: float  # longest time a message keeps a link busy


def make_chain(
    seconds: Sequence[tuple[float, float]],
    borders_s: Sequence[tuple[float, float]],
    occupied_s: float,
) -> Chain:
    """The chain of stages with these forward and backward times, joined down and up."""
    work_s = [f + b for f, b in seconds]
    round_trip_s, total = [0.0] * len(work_s), 0.0
    for s in range(len(work_s) - 1, -1, -1):
        total += work_s[s] + (sum(borders_s[s]) if s < len(borders_s) else 0.0)
        round_trip_s[s] = total
    return Chain(
        forward_s=tuple(f for f, _ in seconds),
        backward_s=tuple(b for _, b in seconds),
        work_s=tuple(work_s),
        down_s=tuple(down for down, _ in borders_s),
        up_s=tuple(up for _, up in borders_s),
        round_trip_s=tuple(round_trip_s),
        occupied_s=occupied_s,
    )


def period_s(
    chain: Chain, inflight_S: Sequence[int], schedule: str, num_microbatches: int | None = None
) -> float:
    """tau: busiest stage, busiest link, longest round trip over what may be in flight.

    A stage that may hold all ``num_microbatches`` never waits for a round trip; None: many.

    Source: docs/model.md, sections 3.2 and 3.3.
    """
    if schedule == "gpipe":
        return max(*chain.forward_s, chain.occupied_s) + max(*chain.backward_s, chain.occupied_s)
    stalls = [
        trip / inflight
        for trip, inflight in zip(chain.round_trip_s, inflight_S, strict=True)
        if num_microbatches is None or inflight < num_microbatches
    ]
    return max(*chain.work_s, chain.occupied_s, *stalls)


def pipeline_s(
    chains: Mapping[int, Chain],
    microbatches: Sequence[int],
    inflight_S: Sequence[int],
    schedule: str,
) -> tuple[float, float]:
    """Seconds of a group's pipeline for these microbatches, and what links add to them.

    With round trips that bind, fill and drain plus a period for each further microbatch.
    Otherwise that counts too much for uneven stages, whose waiting hides behind the busiest
    one: the longest of ``_busy_s`` over the stages is then exact or a little below. Links add
    to fill and drain, and to every period that they bound; part of it may hide.

    Args:
        chains: Per number of samples.
        microbatches: Samples of each, in order.
        inflight_S: K_s of the stages.
        schedule: Of the pipeline.

    Source: docs/model.md, section 3.2.
    """
    first, count = chains[microbatches[0]], len(microbatches)
    fill_drain_s, further = first.round_trip_s[0], count_sizes(microbatches[1:])
    steady_s = unstalled_s = computing_s = message_s = 0.0
    for m, n in further.items():
        chain = chains[m]
        steady_s += n * period_s(chain, inflight_S, schedule, count)
        work_s = max(chain.work_s)
        if schedule == "gpipe":
            work_s = max(chain.forward_s) + max(chain.backward_s)
        computing_s += n * work_s
        unstalled_s += n * max(work_s, chain.occupied_s)
        message_s += n * chain.occupied_s
    links_s = fill_drain_s - sum(first.work_s) + steady_s - computing_s
    if schedule == "gpipe":
        return fill_drain_s + steady_s, links_s
    busy_s = _busy_s(chains, microbatches, inflight_S)
    if steady_s > unstalled_s:
        stalled_s = fill_drain_s + steady_s - _short_drain_s(chains, microbatches)
        return max(busy_s, stalled_s), links_s
    return max(busy_s, chains[microbatches[-1]].round_trip_s[0] + message_s), links_s


def count_sizes(microbatches: Sequence[int]) -> dict[int, int]:
    """How many microbatches there are of each number of samples."""
    if not microbatches:
        return {}
    alike = microbatches.count(microbatches[0])
    if alike == len(microbatches):
        return {microbatches[0]: alike}
    return dict(Counter(microbatches))


def _busy_s(
    chains: Mapping[int, Chain], microbatches: Sequence[int], inflight_S: Sequence[int]
) -> float:
    """A lower bound: the longest of fill, work, forced waiting and drain, over the stages.

    Stage s cannot start before the first microbatch reaches it, cannot run its first backward
    before that one has been below and back, nor its last backward before the last one has;
    between, only K_s - 1 other forwards, or backwards, can fill the time.
    """
    sizes, count = count_sizes(microbatches), len(microbatches)
    first, last = chains[microbatches[0]], chains[microbatches[-1]]
    before = chains[microbatches[-2]] if count > 1 else last
    fill_s = drain_s = before_drain_s = found_s = 0.0
    for s, inflight in enumerate(inflight_S):
        ahead = min(inflight, count) - 1
        if len(sizes) == 1:
            head_s, tail_s = ahead * first.forward_s[s], ahead * last.backward_s[s]
            work_s = count * first.work_s[s]
        else:
            head_s = sum(chains[m].forward_s[s] for m in microbatches[1 : 1 + ahead])
            tail_s = sum(chains[m].backward_s[s] for m in microbatches[count - 1 - ahead : -1])
            work_s = sum(n * chains[m].work_s[s] for m, n in sizes.items())
        start_s = max(0.0, first.round_trip_s[s] - first.work_s[s] - head_s)
        end_s = max(0.0, last.round_trip_s[s] - last.work_s[s] - tail_s)
        waiting_s = start_s + end_s if count > inflight else max(start_s, end_s)
        up_s = drain_s
        if before is not last and s:  # a short last microbatch follows the one before it
            up_s = max(up_s, before_drain_s - last.backward_s[s] + last.backward_s[0])
        found_s = max(found_s, fill_s + work_s + waiting_s + up_s)
        if s < len(first.down_s):
            fill_s += first.forward_s[s] + first.down_s[s]
            drain_s += last.backward_s[s] + last.up_s[s]
            before_drain_s += before.backward_s[s] + before.up_s[s]
    return found_s


def _short_drain_s(chains: Mapping[int, Chain], microbatches: Sequence[int]) -> float:
    """What a shorter last microbatch saves on its way back from the busiest stage."""
    first, last = chains[microbatches[0]], chains[microbatches[-1]]
    if first is last:
        return 0.0
    busiest = max(range(len(first.work_s)), key=lambda s: first.work_s[s])
    full_s = sum(first.backward_s[:busiest]) + sum(first.up_s[:busiest])
    short_s = sum(last.backward_s[:busiest]) + sum(last.up_s[:busiest])
    behind_s = full_s - last.backward_s[busiest] + last.backward_s[0] if busiest else 0.0
    return max(0.0, full_s - max(short_s, behind_s))
