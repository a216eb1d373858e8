"""Microbatches for groups of which each may stand for several alike.

Shape letters: K sets of alike groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.planning.curves import Option
from orchestrator.planning.waterfill import Ladder, as_microbatches, deal_samples, level_s

LEVEL_TOLERANCE = 1e-9
"""Relative; how closely the common end is bracketed before shares become whole."""


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

    latest_s = max(k.end_s(min(k.most, batch_samples)) for k in ladders)
    level = level_s(ladders, batch_samples, (0.0, latest_s), tolerance=LEVEL_TOLERANCE)
    if level is None or sum(count_K) > batch_samples:
        return None
    units_K = [k.units_by(level[1]) for k in ladders]
    surplus = sum(k.num_groups * k.unit * n for k, n in zip(ladders, units_K, strict=True))
    surplus -= batch_samples
    cut = 0, 0, 0  # a set, groups that get one unit less, samples that one more group lacks
    while surplus:
        shrinkable = [k for k, n in enumerate(units_K) if n > 1]
        if not shrinkable:
            return None  # fewer samples than one microbatch a group: these are dealt singly
        k = max(shrinkable, key=lambda k: (ladders[k].end_s(units_K[k]), k))
        whole, rest = divmod(surplus, ladders[k].unit)
        if whole < ladders[k].num_groups:
            cut = k, whole, rest
            break
        units_K[k] -= 1
        surplus -= ladders[k].num_groups * ladders[k].unit
    return tuple(_shares(options_K, ladders, units_K, cut))


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
