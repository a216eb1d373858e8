"""Exact whole-number shares of the batch for given groups: the inner kernel of the search.

Shape letters: G groups.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchestrator.planning.bisection import bracket

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SLACK = 1e-9
"""Of a period: what ends with the level, but for rounding errors, is in it or not, as asked."""

ROUNDING = 1e-12
"""Relative; what a time of very many periods may lack."""


def water_fill(
    fill_drain_s_G: ArrayLike,
    period_s_G: ArrayLike,
    num_microbatches: int,
    cap_G: ArrayLike | None = None,
) -> IntArray:
    """Counts that end the slowest group soonest: min over n of max alpha + (n - 1) tau.

    Every group gets at least one microbatch and at most its cap. Microbatches go one by one
    to where they would end first, which is optimal since a group's end grows with its count;
    all but the last few are placed at once, below the level of the continuous solution.

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
    continuous = _Fill(alpha_G, tau_G, most_G)
    below_s = continuous.level_s(num_microbatches)
    count_G = _whole_by(below_s, alpha_G, tau_G, most_G, -SLACK)
    missing = num_microbatches - int(count_G.sum())
    if missing:
        above_s = continuous.level_s(num_microbatches + len(alpha_G))
        end_G = _whole_by(above_s, alpha_G, tau_G, most_G, SLACK)
        count_G += _first_ends(alpha_G, tau_G, count_G, end_G, missing)
    return count_G


class Ladder(NamedTuple):
    """When alike groups are done with their units: microbatches, or equal parts of one."""

    num_groups: int
    unit: int  # samples
    first_s: float
    further_s: float
    most: int  # units of a group

    def units_by(self, time_s: float) -> int:
        """Whole units of a group that are done by a time, at least one."""
        whole = int((time_s - self.first_s) / self.further_s * (1 + ROUNDING) + SLACK)
        return min(self.most, max(0, whole) + 1)

    def end_s(self, units: int) -> float:
        """When a group is done with that many."""
        return self.first_s + (units - 1) * self.further_s


def level_s(
    ladders: Sequence[Ladder],
    num_samples: int,
    within_s: tuple[float, float],
    *,
    tolerance: float,
) -> tuple[float, float] | None:
    """The time by which whole units hold the samples, bracketed; None when never within.

    Args:
        ladders: One for every set of alike groups; each group does one unit at least.
        num_samples: X.
        within_s: Where the level is sought.
        tolerance: Relative; how close the bracket is.
    """

    def holds(time_s: float) -> bool:
        return sum(k.num_groups * k.unit * k.units_by(time_s) for k in ladders) >= num_samples

    low_s, high_s = within_s
    if holds(low_s):
        return low_s, low_s
    if not holds(high_s):
        return None
    return bracket(holds, low_s, high_s, tolerance=tolerance)


def fill(ladders: Sequence[Ladder], num_samples: int) -> tuple[list[int], int, int] | None:
    """Units of every set that end the slowest group soonest.

    Units go one by one to the set where they end first, to all of its groups at once; all but
    the last few are placed together, below the level of the continuous solution. For a set of one
    group each that is ``water_fill``, which takes arrays: there a thousand unlike groups take a
    sixth of the time; here the few sets of a search do, with a third of it.

    Returns:
        Units of a group of each set, the set served last, and by how many samples that is more
        than wanted; None when caps allow fewer, or one unit a group is too many already.
    """
    amounts = [k.num_groups * k.unit for k in ladders]
    most = sum([a * k.most for a, k in zip(amounts, ladders, strict=True)])
    if not sum(amounts) <= num_samples <= most:
        return None
    level = (1 - SLACK) * _fill_level_s(ladders, num_samples)
    units = [k.units_by(level) for k in ladders]
    missing = num_samples - sum([a * n for a, n in zip(amounts, units, strict=True)])
    ends_s = [(k.end_s(n + 1), i) for i, (k, n) in enumerate(zip(ladders, units, strict=True))]
    heapify(ends_s)
    last = 0
    while missing > 0:
        _, i = ends_s[0]
        if units[i] == ladders[i].most:
            heappop(ends_s)
            continue
        units[i] += 1
        missing -= amounts[i]
        last = i
        heapreplace(ends_s, (ladders[i].end_s(units[i] + 1), i))
    return units, last, -missing


def _fill_level_s(ladders: Sequence[Ladder], num_samples: int) -> float:
    """When sets that go on continuously after one unit hold the samples; whole units are fewer."""
    rising, left, level = sorted(ladders, key=lambda k: k.first_s), num_samples, 0.0
    while rising:
        filled, rate, level = float(sum([k.num_groups * k.unit for k in rising])), 0.0, 0.0
        for k in rising:
            if rate and filled + (k.first_s - level) * rate >= left:
                break
            filled += (k.first_s - level) * rate
            level = k.first_s
            rate += k.num_groups * k.unit / k.further_s
        level += (left - filled) / rate
        capped = [k for k in rising if k.end_s(k.most) < level]
        if not capped:
            break
        left -= sum([k.num_groups * k.unit * k.most for k in capped])
        rising = [k for k in rising if k.end_s(k.most) >= level]
    return level


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


class _Fill:
    """The continuous fill sum(clip((T - alpha)/tau + 1, 1, most)), piecewise linear in T.

    It exceeds the whole microbatches that end by T by less than one a group.
    """

    def __init__(self, alpha_G: FloatArray, tau_G: FloatArray, most_G: IntArray) -> None:
        corner_s = np.concatenate([alpha_G, alpha_G + (most_G - 1) * tau_G])
        order = np.argsort(corner_s, kind="stable")
        self._corner_s = corner_s[order]
        slope = 1.0 / tau_G
        self._rate = np.cumsum(np.concatenate([slope, -slope])[order])
        grown = np.cumsum(self._rate[:-1] * np.diff(self._corner_s))
        self._filled = len(alpha_G) + np.concatenate([[0.0], grown])

    def level_s(self, num_microbatches: int) -> float:
        """The T at which that many are reached; the last corner when they never are."""
        last = int(np.searchsorted(self._filled, num_microbatches, side="right")) - 1
        if last + 1 == len(self._corner_s):
            return float(self._corner_s[-1])
        time_s = self._corner_s[last]
        if self._rate[last] > 0:
            time_s += (num_microbatches - self._filled[last]) / self._rate[last]
        return float(min(time_s, self._corner_s[last + 1]))


def _whole_by(
    time_s: float, alpha_G: FloatArray, tau_G: FloatArray, most_G: IntArray, slack: float
) -> IntArray:
    """Microbatches that end by a time; ``slack`` says how a tie with rounding errors counts."""
    whole_G = np.floor((time_s - alpha_G) / tau_G + slack)
    count_G: IntArray = np.minimum(np.maximum(whole_G, 0).astype(np.int64) + 1, most_G)
    return count_G


def _first_ends(
    alpha_G: FloatArray, tau_G: FloatArray, count_G: IntArray, end_G: IntArray, missing: int
) -> IntArray:
    """Where the ``missing`` microbatches after ``count_G``, before ``end_G``, would end first."""
    room_G = end_G - count_G
    group = np.repeat(np.arange(len(room_G)), room_G)
    place = np.arange(len(group)) - np.repeat(np.cumsum(room_G) - room_G, room_G)
    end_s = alpha_G[group] + (count_G[group] + place) * tau_G[group]
    chosen = np.argsort(end_s, kind="stable")[:missing]
    return np.bincount(group[chosen], minlength=len(room_G))
