"""Microbatches for groups of which each may stand for several alike.

Shape letters: K sets of alike groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.planning.curves import Option
from orchestrator.planning.waterfill import Ladder, as_microbatches, deal_samples, fill


class Dealt(NamedTuple):
    """A share and how many groups of a set have it."""

    set_index: int
    microbatches: tuple[int, ...]
    num_groups: int


def deal(
    options_K: Sequence[Option], count_K: Sequence[int], batch_samples: int, *, fine: bool
) -> tuple[Dealt, ...] | None:
    """Shares that end the slowest group soonest; None when none hold the batch.

    Args:
        options_K: Of every set of alike groups.
        count_K: How many groups are in it.
        batch_samples: X.
        fine: Deal single samples, so that every group may end with a shorter microbatch; else
            whole microbatches and at most one shorter one.

    Source: docs/model.md, section 5.1.
    """
    if len(options_K) == 1 and count_K[0] == 1:
        size = options_K[0].microbatch
        return (Dealt(0, as_microbatches(batch_samples, size), 1),)
    if max(count_K) == 1:
        return _deal_each(options_K, batch_samples, fine=fine)
    return _deal_sets(options_K, count_K, batch_samples, fine=fine)


def _deal_each(
    options_K: Sequence[Option], batch_samples: int, *, fine: bool
) -> tuple[Dealt, ...] | None:
    try:
        shares = deal_samples(
            [o.fill_drain_s for o in options_K],
            [o.curve.period_s for o in options_K],
            [o.microbatch for o in options_K],
            batch_samples,
            [o.curve.max_microbatches for o in options_K],
            fine=fine,
        )
    except ValueError:  # memory caps the shares below the batch, or there are too few samples
        return None
    return tuple(Dealt(k, share, 1) for k, share in enumerate(shares))


def _deal_sets(
    options_K: Sequence[Option], count_K: Sequence[int], batch_samples: int, *, fine: bool
) -> tuple[Dealt, ...] | None:
    ladders = [_ladder(o, c, fine=fine) for o, c in zip(options_K, count_K, strict=True)]
    filled = fill(ladders, batch_samples)
    if filled is None:
        return None
    units_K, last, surplus = filled
    # Groups of the last set that get one unit less, and samples that one more of them lacks.
    whole, rest = divmod(surplus, ladders[last].unit)
    return tuple(_shares(options_K, ladders, units_K, (last, whole, rest)))


def _ladder(option: Option, count: int, *, fine: bool) -> Ladder:
    size, period_s = option.microbatch, option.curve.period_s
    if not fine:
        return Ladder(count, size, option.fill_drain_s, period_s, option.curve.max_microbatches)
    per_sample_s = period_s / size
    first_s = option.fill_drain_s - (size - 1) * per_sample_s
    return Ladder(count, 1, first_s, per_sample_s, option.most_samples)


def _shares(
    options_K: Sequence[Option],
    ladders: Sequence[Ladder],
    units_K: Sequence[int],
    cut: tuple[int, int, int],
) -> list[Dealt]:
    found = []
    for k, (option, ladder, units) in enumerate(zip(options_K, ladders, units_K, strict=True)):
        samples, size = units * ladder.unit, option.microbatch
        _, whole, rest = cut if cut[0] == k else (k, 0, 0)
        parts = [(samples, ladder.num_groups - whole - bool(rest))]
        parts += [(samples - ladder.unit, whole), (samples - rest, int(bool(rest)))]
        found += [Dealt(k, as_microbatches(share, size), count) for share, count in parts if count]
    return found
