"""Exact whole-number shares of the batch for given groups: the inner kernel of the search.

Shape letters: G groups.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def water_fill(
    fill_drain_s_G: ArrayLike,
    period_s_G: ArrayLike,
    num_microbatches: int,
    cap_G: ArrayLike | None = None,
) -> IntArray:
    """Counts that end the slowest group soonest: min over n of max alpha + (n - 1) tau.

    Every group gets at least one microbatch and at most its cap. Microbatches go one by one
    to where they would end first, which is optimal since a group's end grows with its count;
    all but the last few are placed at once, by the continuous solution.

    Args:
        fill_drain_s_G: alpha, time of one microbatch through the group.
        period_s_G: tau > 0, time of each further one.
        num_microbatches: The sum of the counts.
        cap_G: Largest counts, such as memory allows; None: no limit.

    Raises:
        ValueError: If there are fewer microbatches than groups, or more than the caps allow.

    Source: docs/model.md, section 5.1.
    """
    alpha_G = np.asarray(fill_drain_s_G, dtype=np.float64)
    tau_G = np.asarray(period_s_G, dtype=np.float64)
    most_G = np.full(len(alpha_G), num_microbatches, dtype=np.int64)
    if cap_G is not None:
        most_G = np.minimum(most_G, np.asarray(cap_G, dtype=np.int64))
    if num_microbatches < len(alpha_G) or most_G.min() < 1 or most_G.sum() < num_microbatches:
        raise ValueError(
            f"{num_microbatches} microbatches do not fit {len(alpha_G)} groups of at least "
            f"one and at most {int(most_G.sum())} in all; use fewer groups or smaller microbatches"
        )
    count_G = _below_optimum(alpha_G, tau_G, num_microbatches, most_G)
    missing = num_microbatches - int(count_G.sum())
    if missing:
        count_G += _next_to_end(alpha_G, tau_G, count_G, most_G, missing)
    return count_G


def as_microbatches(num_samples: int, microbatch: int) -> tuple[int, ...]:
    """Full microbatches of ``microbatch`` samples and at most one shorter one, last."""
    full, rest = divmod(num_samples, microbatch)
    return (microbatch,) * full + ((rest,) if rest else ())


def deal_samples(
    fill_drain_s_G: ArrayLike,
    period_s_G: ArrayLike,
    microbatch_G: Sequence[int],
    batch_samples: int,
    cap_G: Sequence[int] | None = None,
    *,
    fine: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Microbatches of every group that together hold exactly the batch.

    Coarse (default): full microbatches, and what is left as one shorter microbatch where it
    ends first. Fine: samples are dealt one by one, so every group may end with a shorter
    microbatch; better where few microbatches meet many groups and a short microbatch takes
    time in proportion to its samples.

    Args:
        fill_drain_s_G: alpha, time of one full microbatch through the group.
        period_s_G: tau, time of each further one.
        microbatch_G: Samples of a full microbatch; may differ between groups.
        batch_samples: X.
        cap_G: Most microbatches of each group.
        fine: See above.

    Raises:
        ValueError: If there are fewer samples than groups, or more than the caps allow.

    Source: docs/model.md, section 5.1.
    """
    size_G = np.asarray(microbatch_G, dtype=np.int64)
    alpha_G = np.asarray(fill_drain_s_G, dtype=np.float64)
    tau_G = np.asarray(period_s_G, dtype=np.float64)
    most_G = None if cap_G is None else np.asarray(cap_G, dtype=np.int64) * size_G
    if not fine and len(set(microbatch_G)) == 1 and batch_samples % microbatch_G[0] == 0:
        num_microbatches = batch_samples // microbatch_G[0]
        if num_microbatches >= len(size_G):
            counts = water_fill(alpha_G, tau_G, num_microbatches, cap_G)
            return tuple((microbatch_G[0],) * int(n) for n in counts)
    per_sample_s_G = tau_G / size_G  # one sample more is a share of one period
    samples_G = water_fill(
        alpha_G - (size_G - 1) * per_sample_s_G, per_sample_s_G, batch_samples, most_G
    )
    if not fine:
        samples_G = _whole(alpha_G, tau_G, size_G, samples_G, most_G)
    return tuple(as_microbatches(int(k), m) for k, m in zip(samples_G, microbatch_G, strict=True))


def _whole(
    alpha_G: FloatArray,
    tau_G: FloatArray,
    size_G: IntArray,
    samples_G: IntArray,
    most_G: IntArray | None,
) -> IntArray:
    """Gather the shorter microbatches of a fine deal into full ones and a single shorter one."""
    found_G: IntArray = np.maximum(samples_G // size_G * size_G, np.minimum(samples_G, 1))
    short_G = found_G % size_G  # groups too small for one full microbatch start with one sample
    left = int(samples_G.sum() - found_G.sum())
    while left:
        wanted_G = np.minimum(size_G - short_G, left)
        end_s_G = alpha_G + (np.ceil((found_G + wanted_G) / size_G) - 1) * tau_G
        end_s_G -= (1 - (found_G + wanted_G) % size_G / size_G) % 1 * tau_G
        if most_G is not None:
            end_s_G = np.where(found_G + wanted_G > most_G, np.inf, end_s_G)
        taker = int(np.argmin(end_s_G))
        found_G[taker] += wanted_G[taker]
        short_G[taker] = found_G[taker] % size_G[taker]
        left -= int(wanted_G[taker])
    return found_G


def _below_optimum(
    alpha_G: FloatArray, tau_G: FloatArray, num_microbatches: int, most_G: IntArray
) -> IntArray:
    """Counts at or below an optimal solution: rounded down from the continuous one.

    The continuous fill sum(clip((T - alpha)/tau + 1, 1, most)) is piecewise linear in T; it is
    followed over its sorted corners to the T where it reaches the batch.
    """
    corner_s = np.concatenate([alpha_G, alpha_G + (most_G - 1) * tau_G])
    slope = np.concatenate([1.0 / tau_G, -1.0 / tau_G])
    order = np.argsort(corner_s, kind="stable")
    corner_s = corner_s[order]
    rate = np.cumsum(slope[order])
    filled = len(alpha_G) + np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(corner_s))])
    last = int(np.searchsorted(filled, num_microbatches, side="right")) - 1
    level_s = corner_s[last]
    if last + 1 < len(corner_s) and rate[last] > 0:
        level_s += (num_microbatches - filled[last]) / rate[last]
        level_s = min(level_s, corner_s[last + 1])
    # A hair less than the quotient: a count too high could not be taken back.
    whole_G = np.floor((level_s - alpha_G) / tau_G * (1 - 1e-12) - 1e-9)
    count_G: IntArray = np.minimum(np.maximum(whole_G, 0).astype(np.int64) + 1, most_G)
    return count_G


def _next_to_end(
    alpha_G: FloatArray, tau_G: FloatArray, count_G: IntArray, most_G: IntArray, missing: int
) -> IntArray:
    """Where the missing microbatches would end first."""
    added_G: IntArray = np.zeros_like(count_G)
    while missing:
        # A few groups may take several: their next three ends compete, the rest another round.
        step = np.arange(3)
        end_s = (
            alpha_G[:, None] + (count_G + added_G)[:, None] * tau_G[:, None] + step * tau_G[:, None]
        )
        room = (most_G - count_G - added_G)[:, None] > step
        end_s = np.where(room, end_s, np.inf)
        horizon_s = end_s[:, -1].min()  # ends up to here are complete
        flat_s = end_s.ravel()
        order = np.argsort(flat_s, kind="stable")[:missing]
        taken = order[(flat_s[order] <= horizon_s) & np.isfinite(flat_s[order])]
        added_G += np.bincount(taken // len(step), minlength=len(count_G))
        missing -= len(taken)
    return added_G
