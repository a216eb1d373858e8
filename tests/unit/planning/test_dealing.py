from math import inf

import numpy as np
import pytest

from orchestrator.planning.curves import Option
from orchestrator.planning.dealing import deal
from orchestrator.planning.groups import GroupCurve
from orchestrator.planning.waterfill import deal_samples


def option(alpha: float, tau: float, size: int, most: int = 10_000) -> Option:
    return Option((), size, GroupCurve(alpha, tau, most), alpha, size / tau, size * most)


def end_s(one: Option, microbatches: tuple[int, ...]) -> float:
    """When a share is done; a shorter last microbatch takes its part of a period."""
    whole = len(microbatches) - 1 + microbatches[-1] / one.microbatch
    return one.fill_drain_s + (whole - 1) * one.curve.period_s


@pytest.mark.parametrize("seed", range(60))
def test_sets_of_alike_groups_get_what_the_same_groups_get_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = [
        option(float(rng.uniform(0.5, 3)), float(rng.uniform(0.05, 1)), int(rng.choice([1, 2, 4])))
        for _ in range(rng.integers(1, 5))
    ]
    counts = [int(rng.integers(1, 30)) for _ in options]
    batch = int(rng.integers(sum(counts), 40 * sum(counts)))
    fine = bool(rng.random() < 0.5)
    dealt = deal(options, counts, batch, fine=fine)
    each = [o for o, count in zip(options, counts, strict=True) for _ in range(count)]
    shares = deal_samples(
        [o.fill_drain_s for o in each],
        [o.curve.period_s for o in each],
        [o.microbatch for o in each],
        batch,
        fine=fine,
    )
    if dealt is None:  # fewer samples than a whole microbatch a group: only dealt one by one
        assert not fine
        assert batch < sum(o.microbatch for o in each)
        return
    assert sum(d.num_groups * sum(d.microbatches) for d in dealt) == batch
    assert [sum(d.num_groups for d in dealt if d.set_index == k) for k in range(len(counts))] == (
        counts
    )
    last_s = max(end_s(options[d.set_index], d.microbatches) for d in dealt)
    longest_s = max(end_s(o, share) for o, share in zip(each, shares, strict=True))
    assert last_s <= longest_s * (1 + 1e-6) + (0.0 if fine else max(o.curve.period_s for o in each))


def test_memory_caps_the_shares_and_too_little_room_is_refused() -> None:
    small = option(1.0, 0.1, 2, most=3)
    assert deal([small], [4], 24, fine=False) is not None
    assert deal([small], [4], 25, fine=False) is None
    assert deal([small], [4], 3, fine=True) is None


def test_no_period_is_infinite() -> None:
    assert option(1.0, 0.5, 1).samples_by(inf) == 10_000
