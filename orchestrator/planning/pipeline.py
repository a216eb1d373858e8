"""Closed forms of a group's pipeline time, from the times of its stages and borders."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import NamedTuple

from orchestrator.planning.bisection import bracket

PERIOD_TOLERANCE = 1e-3
"""Relative; how closely ``best_inflight`` finds the shortest period that memory allows."""


class Chain(NamedTuple):
    """Times of a group for one microbatch size; border s joins stage s to stage s + 1."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    work_s: tuple[float, ...]
    down_s: tuple[float, ...]  # boundary to the next stage
    up_s: tuple[float, ...]  # its gradient back
    occupied_s: float  # longest time a message keeps a link busy
    round_trip_s: tuple[float, ...]  # RTT_s; the first is fill and drain
    below_s: tuple[float, ...]  # part of it that others take: RTT_s - w_s
    fill_s: tuple[float, ...]  # until the first microbatch reaches the stage
    drain_s: tuple[float, ...]  # from the stage's last backward to that of the first stage
    down_gap_s: tuple[float, ...]  # between microbatches that only go down, as far as the stage
    up_gap_s: tuple[float, ...]  # between those that only go up from the stage


def make_chain(
    seconds: Sequence[tuple[float, float]],
    borders_s: Sequence[tuple[float, float]],
    occupied_s: Sequence[tuple[float, float]],
) -> Chain:
    """The chain of stages with these forward and backward times, joined down and up.

    Args:
        seconds: Forward and backward time of each stage.
        borders_s: What a message takes over each border, down and up.
        occupied_s: For how much of that it keeps the link busy.
    """
    forward_s, backward_s = tuple(f for f, _ in seconds), tuple(b for _, b in seconds)
    down_s, up_s = tuple(down for down, _ in borders_s), tuple(up for _, up in borders_s)
    work_s = tuple(f + b for f, b in seconds)
    round_trip_s, total_s = [0.0] * len(work_s), 0.0
    for s in range(len(work_s) - 1, -1, -1):
        total_s += work_s[s] + (down_s[s] + up_s[s] if s < len(down_s) else 0.0)
        round_trip_s[s] = total_s
    return Chain(
        forward_s=forward_s,
        backward_s=backward_s,
        work_s=work_s,
        down_s=down_s,
        up_s=up_s,
        occupied_s=max(map(max, occupied_s), default=0.0),
        round_trip_s=tuple(round_trip_s),
        below_s=tuple(trip - work for trip, work in zip(round_trip_s, work_s, strict=True)),
        fill_s=_summed(forward_s, down_s),
        drain_s=_summed(backward_s, up_s),
        down_gap_s=_longest(forward_s, (down for down, _ in occupied_s)),
        up_gap_s=_longest(backward_s, (up for _, up in occupied_s)),
    )


def _summed(stage_s: Sequence[float], border_s: Sequence[float]) -> tuple[float, ...]:
    """Per stage, the time of all stages and borders before it."""
    return tuple(accumulate(map(sum, zip(stage_s, border_s, strict=False)), initial=0.0))


def _longest(stage_s: Sequence[float], busy_s: Iterable[float]) -> tuple[float, ...]:
    """Per stage, the longest of its own time and those of stages and links before it."""
    return tuple(accumulate(map(max, stage_s, (0.0, *busy_s)), max))


def period_s(chain: Chain, inflight_S: Sequence[int], schedule: str) -> float:
    """tau: what each further microbatch adds in the long run; exact for constant times.

    1F1B: the busiest link, or the circuit of most seconds a microbatch. Stage s runs a forward
    and the stages below pass it on as far as stage u; there a backward is due, whose gradient
    goes back up to s, which may then take its next forward: one round, K_s - K_u + 1
    microbatches. With u = s that is the stage's own work, with u the last stage the round trip
    over what may be in flight.

    Returns:
        Seconds; infinite when a stage may hold more than the one before it, since the two
        would wait for each other for ever.

    Source: docs/model.md, sections 3.2 and 3.3.
    """
    if schedule == "gpipe":
        return chain.down_gap_s[-1] + chain.up_gap_s[-1]
    if any(held > before for before, held in pairwise(inflight_S)):
        return inf
    found_s, slower_s = 0.0, max(*chain.work_s, chain.occupied_s)
    while slower_s > found_s:
        # Dinkelbach: a slower circuit has W_su - tau (K_s - K_u + 1) > 0; take the largest one.
        found_s, waiting_s, ahead_s = slower_s, 0.0, -inf
        first_s, first_held = 0.0, 0
        for trip_s, below_s, held in zip(
            chain.round_trip_s, chain.below_s, inflight_S, strict=True
        ):
            excess_s = ahead_s - below_s + found_s * (held - 1)
            if excess_s > waiting_s:
                waiting_s, slower_s = excess_s, (first_s - below_s) / (first_held - held + 1)
            if trip_s - found_s * held > ahead_s:
                ahead_s, first_s, first_held = trip_s - found_s * held, trip_s, held
    return found_s


_Circuit = tuple[float, int, int]
"""Seconds a microbatch, the stage where it turns down again, and microbatches a round."""


def _circuits(chain: Chain, inflight_S: Sequence[int], count: float) -> list[_Circuit]:
    """Per stage the slowest circuit that ends there, of those that ``count`` microbatches go."""
    found: list[_Circuit] = []
    trips: list[tuple[float, int]] = []  # of the stages before it that hold fewer than all
    skipped = 0
    for u, held in enumerate(inflight_S):
        period_s, turn, moved = chain.work_s[u], u, 1
        if trips:
            below_s, before = chain.below_s[u], held - 1
            for s, (trip_s, inflight) in enumerate(trips, skipped):
                if trip_s - below_s > period_s * (inflight - before):
                    turn, moved = s, max(1, inflight - before)
                    period_s = (trip_s - below_s) / moved if inflight > before else inf
        found.append((period_s, turn, moved))
        if held < count:
            trips.append((chain.round_trip_s[u], held))
        else:
            skipped += 1
    return found


def steady(chain: Chain, inflight_S: Sequence[int], schedule: str) -> tuple[float, int]:
    """Tau of ``period_s``, and the microbatches that one round of its slowest circuit moves on."""
    if schedule == "gpipe":
        return period_s(chain, inflight_S, schedule), 1
    tau_s, _, moved = max(_circuits(chain, inflight_S, inf))
    return (chain.occupied_s, 1) if chain.occupied_s >= tau_s else (tau_s, moved)


def best_inflight(chain: Chain, wanted_S: Sequence[int], room_S: Sequence[int]) -> tuple[int, ...]:
    """K_s of 1F1B: the shortest period that memory allows, then as many as wanted.

    More in flight at a stage relieves the circuits that start there and burdens those that
    end there, so no stage gets more than the ones before it can bear.

    Args:
        chain: Times of one microbatch.
        wanted_S: Kept where the period allows, for waits that no period shows: plain 1F1B's
            S - s, or more.
        room_S: The most each stage may hold; plain 1F1B's at least.

    Source: docs/model.md, section 3.2.
    """
    plain_S = range(len(wanted_S), 0, -1)
    tau_s = max(*chain.work_s, chain.occupied_s)
    if not tau_s:  # nothing takes any time
        return tuple(map(min, wanted_S, room_S))
    least_S = _least_inflight(chain, tau_s, room_S)
    if least_S is None:
        _, tau_s = bracket(
            lambda longer_s: _least_inflight(chain, longer_s, room_S) is not None,
            tau_s,
            period_s(chain, plain_S, "1f1b"),
            tolerance=PERIOD_TOLERANCE,
        )
        least_S = _least_inflight(chain, tau_s, room_S) or list(plain_S)
    inflight_S: list[int] = []
    used = -inf
    for least, wanted, room, trip_s, below_s in zip(
        least_S, wanted_S, room_S, chain.round_trip_s, chain.below_s, strict=True
    ):
        most = max(least, min(wanted, room))
        if inflight_S:  # K_s + 1 less the rounds from every s before it
            most = min(most, 1 - _whole(used - below_s / tau_s))
        inflight_S.append(most)
        used = max(used, trip_s / tau_s - most)
    return tuple(inflight_S)


def _least_inflight(chain: Chain, tau_s: float, room_S: Sequence[int]) -> list[int] | None:
    """The least K_s for a period, from the last stage up; None where memory holds fewer."""
    found, needed = [1], -chain.below_s[-1] / tau_s
    for s in range(len(room_S) - 2, -1, -1):
        held = _whole(chain.round_trip_s[s] / tau_s + needed)
        if held > room_S[s]:
            return None
        found.append(held)
        needed = max(needed, held - 1 - chain.below_s[s] / tau_s)
    return found[::-1]


def _whole(num_microbatches: float) -> int:
    """Rounded up, but for what rounding errors add."""
    return ceil(num_microbatches - 1e-9)


def pipeline_s(
    chains: Mapping[int, Chain],
    microbatches: Sequence[int],
    inflight_S: Sequence[int],
    schedule: str,
) -> tuple[float, float]:
    """Seconds of a group's pipeline for these microbatches, and what links add to them.

    Never above the exact time for full microbatches and at most one shorter one, last, as plans
    have them. Microbatches of other sizes count with their own work at the busiest stage. Links
    add to fill and drain, and to every period that they bound; part of it may hide.

    Args:
        chains: Per number of samples.
        microbatches: Samples of each, in order.
        inflight_S: K_s of the stages.
        schedule: Of the pipeline.

    Source: docs/model.md, section 3.2.
    """
    first, last, count = chains[microbatches[0]], chains[microbatches[-1]], len(microbatches)
    if schedule == "gpipe":
        found_s, tau_s = _gpipe_s(first, last, count), period_s(first, inflight_S, schedule)
        work_s = max(first.forward_s) + max(first.backward_s)
    else:
        circuits = _circuits(first, inflight_S, count)
        tau_s, work_s = max(first.occupied_s, max(circuits)[0]), max(first.work_s)
        found_s = _one_f_one_b_s(first, last, count, inflight_S, circuits)
        if first is not last:  # at the first stage it may queue behind the full one before it
            full_s = _one_f_one_b_s(first, first, count - 1, inflight_S, circuits)
            found_s = max(found_s, full_s + last.backward_s[0])
    links_s = first.round_trip_s[0] - sum(first.work_s) + (count - 1) * (tau_s - work_s)
    if count > 2 and microbatches.count(microbatches[0]) < count - 1:
        found_s = _mixed_s(chains, microbatches, found_s)
    return found_s, links_s


def count_sizes(microbatches: Sequence[int]) -> dict[int, int]:
    """How many microbatches there are of each number of samples."""
    if not microbatches:
        return {}
    alike = microbatches.count(microbatches[0])
    if alike == len(microbatches):
        return {microbatches[0]: alike}
    return dict(Counter(microbatches))


def _gpipe_s(first: Chain, last: Chain, count: int) -> float:
    """All forwards, then all backwards, in seconds; exact without a shorter last microbatch.

    That one follows the one before it as far as some stage; from there on it is alone.
    """
    if first is last:
        return first.round_trip_s[0] + (count - 1) * period_s(first, (), "gpipe")
    stages, before = range(len(first.work_s)), count - 2
    down_s = max(
        first.fill_s[s] + first.forward_s[s] + before * first.down_gap_s[s] - last.fill_s[s]
        for s in stages
    )
    full_s = first.drain_s[-1] + first.backward_s[-1]
    up_s = max(
        full_s - first.drain_s[s] + before * first.backward_s[s] + last.backward_s[s] + rest_s
        for s, rest_s in enumerate(last.drain_s)
    )
    return (
        down_s
        + last.fill_s[-1]
        + last.forward_s[-1]
        + max(up_s, full_s + before * first.up_gap_s[-1] + last.backward_s[0])
    )


def _one_f_one_b_s(
    first: Chain,
    last: Chain,
    count: int,
    inflight_S: Sequence[int],
    circuits_S: Sequence[_Circuit],
) -> float:
    """The longest of some paths through 1F1B, in seconds, for each stage one or two.

    The first microbatch reaches the stage; its backward waits until it has been below and
    back, or for the K_s - 1 forwards ahead of it; then backwards and forwards alternate; after
    the last forward, that one must go below and back, or K_s - 1 backwards are left; it drains.
    """
    occupied_s = first.occupied_s
    found_s = max(
        first.round_trip_s[0] + (count - 1 if first is last else count - 2) * occupied_s,
        last.round_trip_s[0] + (count - 1) * occupied_s,
    )
    short = first is not last
    for u, inflight in enumerate(inflight_S):
        below_s, last_below_s, ahead = first.below_s[u], last.below_s[u], inflight - 1
        down_s, up_s = first.down_gap_s[u], first.up_gap_s[u]
        if count > inflight:
            rounds = count - inflight
            path_s = rounds * first.work_s[u]
            path_s += max(below_s, ahead * down_s) + max(last_below_s, ahead * up_s)
            if short:
                path_s -= first.forward_s[u] - last.forward_s[u]
            if circuits_S[u][1] < u:
                path_s += _waiting_s(first, last, u, circuits_S[u], rounds)
        else:  # every forward comes before the first backward
            queue_s, ahead_s = (count - 1) * up_s, (count - 1) * down_s
            if short:
                ahead_s = (count - 2) * down_s + last.forward_s[u]
            path_s = max(below_s + queue_s, ahead_s + last_below_s, ahead_s + queue_s)
        path_s += first.fill_s[u] + first.forward_s[u] + last.backward_s[u] + last.drain_s[u]
        found_s = max(found_s, path_s)
    return found_s


def _waiting_s(first: Chain, last: Chain, u: int, circuit: _Circuit, num_rounds: int) -> float:
    """What rounds of a backward and a forward of stage u wait for, beyond its own work.

    The circuit is gone round as often as fits; for the rest the stage is taken to be busy.
    """
    period_s, s, moved = circuit
    round_s = moved * (period_s - first.work_s[u])
    waiting_s = num_rounds // moved * round_s
    if first is not last and waiting_s > 0:  # the last round may be that of the short one
        waiting_s -= first.fill_s[u] - first.fill_s[s] - last.fill_s[u] + last.fill_s[s]
        waiting_s = max(waiting_s, (num_rounds - 1) // moved * round_s)
    return waiting_s


def _mixed_s(chains: Mapping[int, Chain], microbatches: Sequence[int], alike_s: float) -> float:
    """Seconds when those between the first and the last are not as the first."""
    first, sizes = chains[microbatches[0]], count_sizes(microbatches[1:-1])
    more_s = [
        sum(n * (chains[m].work_s[s] - work_s) for m, n in sizes.items())
        for s, work_s in enumerate(first.work_s)
    ]
    busy_s = [
        more + work_s * (len(microbatches) - 1) + chains[microbatches[-1]].work_s[s]
        for s, (more, work_s) in enumerate(zip(more_s, first.work_s, strict=True))
    ]
    busiest = busy_s.index(max(busy_s))
    return max(alike_s + more_s[busiest], busy_s[busiest])
