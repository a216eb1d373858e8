import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.waterfill import (
    Ladder,
    as_microbatches,
    deal_samples,
    fill,
    level_s,
    water_fill,
)


def ends(alpha_G, tau_G, count_G):
    return [a + (n - 1) * t for a, t, n in zip(alpha_G, tau_G, count_G, strict=True)]


def best_by_force(alpha_G, tau_G, num_microbatches, cap_G):
    choices = itertools.product(*(range(1, cap + 1) for cap in cap_G))
    return min(max(ends(alpha_G, tau_G, n)) for n in choices if sum(n) == num_microbatches)


def test_group_three_times_slower_gets_a_third_of_the_data():
    """pytorch/pytorch#67253, Lightning-AI/pytorch-lightning#16914: a batch of its own each."""
    counts = water_fill([1.0, 3.0], [1.0, 3.0], 4)
    assert counts.tolist() == [3, 1]  # 3 x 1 s == 1 x 3 s


def test_every_group_keeps_one_microbatch_however_slow_it_is():
    assert water_fill([1.0, 1000.0], [1.0, 1000.0], 10).tolist() == [9, 1]


def test_cap_of_memory_sends_the_rest_elsewhere():
    """deepspeedai/DeepSpeed#4402, kohya-ss/sd-scripts#1208, determined-ai/determined#5418: the
    smallest card caps all."""
    assert water_fill([1.0, 1.0], [1.0, 1.0], 10, [3, 100]).tolist() == [3, 7]


@pytest.mark.parametrize(("num_microbatches", "cap"), [(1, [9, 9]), (5, [2, 2]), (5, [0, 9])])
def test_shares_that_cannot_exist_are_refused(num_microbatches, cap):
    with pytest.raises(ValueError, match="microbatches do not fit"):
        water_fill([1.0, 1.0], [1.0, 1.0], num_microbatches, cap)


times = st.floats(min_value=0.01, max_value=10.0)


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(times, times, st.integers(1, 6)), min_size=1, max_size=4),
    surplus=st.integers(0, 8),
)
def test_slowest_group_ends_as_early_as_in_the_best_of_all_assignments(groups, surplus):
    alpha, tau, cap = (list(column) for column in zip(*groups, strict=True))
    num_microbatches = min(len(groups) + surplus, sum(cap))
    counts = water_fill(alpha, tau, num_microbatches, cap)
    assert counts.sum() == num_microbatches
    assert all(1 <= n <= c for n, c in zip(counts, cap, strict=True))
    best = best_by_force(alpha, tau, num_microbatches, cap)
    assert max(ends(alpha, tau, counts)) == pytest.approx(best, rel=1e-9)


def test_equal_groups_share_equally_whatever_their_order():
    assert sorted(water_fill([0.3] * 6, [0.1] * 6, 16).tolist()) == [2, 2, 3, 3, 3, 3]


def test_thousand_groups_get_what_one_by_one_dealing_gives():
    rng = np.random.default_rng(0)
    alpha, tau = rng.uniform(0.1, 2, 1024), rng.uniform(0.05, 1, 1024)
    counts = water_fill(alpha, tau, 8000)
    end_s = max(ends(alpha, tau, counts))
    # No smaller T has room for the batch.
    below = np.floor((end_s * (1 - 1e-9) - alpha) / tau) + 1
    assert counts.sum() == 8000
    assert np.maximum(below, 0).sum() < 8000


def test_a_share_is_full_microbatches_and_one_shorter_last():
    assert as_microbatches(11, 4) == (4, 4, 3)
    assert as_microbatches(8, 4) == (4, 4)


def test_remainder_of_the_batch_is_one_shorter_microbatch_where_it_ends_first():
    dealt = deal_samples([1.0, 3.0], [1.0, 3.0], [4, 4], 18)
    assert dealt == ((4, 4, 4, 2), (4,))


def test_unlike_microbatch_sizes_cover_the_batch_exactly():
    dealt = deal_samples([1.0, 0.5], [1.0, 0.5], [4, 1], 21)
    assert sum(map(sum, dealt)) == 21
    assert set(dealt[0][:-1]) <= {4}
    assert set(dealt[1]) == {1}


def test_fine_deal_balances_six_groups_that_share_sixteen_microbatches():
    coarse = deal_samples([1.0] * 6, [1.0] * 6, [4] * 6, 64)
    fine = deal_samples([1.0] * 6, [1.0] * 6, [4] * 6, 64, fine=True)
    assert sorted(map(sum, coarse)) == [8, 8, 12, 12, 12, 12]
    assert sorted(map(sum, fine)) == [10, 10, 11, 11, 11, 11]


def test_fewer_full_microbatches_than_groups_still_gives_everyone_a_sample():
    dealt = deal_samples([1.0] * 3, [1.0] * 3, [4] * 3, 8)
    assert sum(map(sum, dealt)) == 8
    assert min(map(sum, dealt)) >= 1


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.tuples(times, times, st.integers(1, 8)), min_size=1, max_size=5),
    batch=st.integers(5, 200),
    fine=st.booleans(),
)
def test_every_deal_covers_the_batch_with_at_most_one_shorter_microbatch_a_group(
    groups, batch, fine
):
    alpha, tau, sizes = (list(column) for column in zip(*groups, strict=True))
    dealt = deal_samples(alpha, tau, sizes, batch, fine=fine)
    assert sum(map(sum, dealt)) == batch
    for share, size in zip(dealt, sizes, strict=True):
        assert share
        assert all(k == size for k in share[:-1])
        assert 1 <= share[-1] <= size


@settings(max_examples=100, deadline=None)
@given(
    sets=st.lists(st.tuples(times, times, st.integers(1, 5)), min_size=1, max_size=4),
    surplus=st.integers(0, 60),
)
def test_sets_of_alike_groups_end_with_the_slowest_of_their_groups(sets, surplus):
    alpha = [a for a, _, count in sets for _ in range(count)]
    tau = [t for _, t, count in sets for _ in range(count)]
    batch = len(alpha) + surplus
    last_s = max(ends(alpha, tau, water_fill(alpha, tau, batch)))
    ladders = [Ladder(count, 1, a, t, batch) for a, t, count in sets]
    within_s = max(a for a, _, _ in sets), max(k.end_s(batch) for k in ladders)
    found = level_s(ladders, batch, within_s, tolerance=1e-12)
    assert found is not None
    assert found[1] == pytest.approx(last_s, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.tuples(times, times, st.integers(1, 6)), min_size=1, max_size=6),
    surplus=st.integers(0, 30),
)
def test_sets_of_one_group_are_filled_as_single_groups_are(groups, surplus):
    alpha, tau, cap = (list(column) for column in zip(*groups, strict=True))
    batch = min(len(groups) + surplus, sum(cap))
    filled = fill([Ladder(1, 1, a, t, most) for a, t, most in groups], batch)
    assert filled is not None
    units, _, too_many = filled
    assert (units, too_many) == (water_fill(alpha, tau, batch, cap).tolist(), 0)


def test_no_level_holds_more_than_the_caps_allow():
    ladders = [Ladder(2, 4, 1.0, 1.0, 3)]
    assert level_s(ladders, 24, (1.0, 3.0), tolerance=1e-12) == pytest.approx((3.0, 3.0))
    assert level_s(ladders, 25, (1.0, 3.0), tolerance=1e-12) is None
