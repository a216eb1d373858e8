from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile, make_stages
from orchestrator.core.cluster import Link
from orchestrator.core.plan import Group
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from orchestrator.planning.pipeline import (
    PERIOD_TOLERANCE,
    best_inflight,
    count_sizes,
    make_chain,
    period_s,
    pipeline_s,
)

ROUNDING = 1e-9  # relative; sums of some hundred floats
THREE = make_chain(
    [(1.0, 2.0), (2.0, 4.0), (1.0, 1.0)], [(0.5, 0.25), (0.1, 0.2)], [(0.3, 0.2), (0.1, 0.1)]
)


def test_round_trips_run_from_a_forward_until_its_backward_may_end():
    assert THREE.round_trip_s == pytest.approx((3 + 6 + 2 + 0.75 + 0.3, 6 + 2 + 0.3, 2.0))


def test_period_is_the_busiest_stage_the_busiest_link_or_the_longest_round_trip():
    assert period_s(THREE, (9, 5, 1), "1f1b") == 6.0
    assert period_s(THREE, (2, 1, 1), "1f1b") == pytest.approx(6 + 2 + 0.3)
    linked = make_chain([(1.0, 1.0), (1.0, 1.0)], [(9.0, 9.0)], [(7.0, 6.0)])
    assert period_s(linked, (9, 1), "1f1b") == 7.0
    assert period_s(linked, (2, 1), "1f1b") == pytest.approx((2 + 2 + 18) / 2)


def test_neighbours_that_hold_as_many_take_turns():
    # The second stage's next forward waits for the first one's, which waits for its backward.
    assert period_s(THREE, (3, 3, 1), "1f1b") == pytest.approx(3 + 6 + 0.75)
    cost, group = uneven_case([1.0, 1.0], [4] * 64, [0.0], 0.0, inflight=(3, 3))
    longer, long = group, Group(group.stages, group.microbatches[:32])
    added_s = group_makespan(cost, longer, "1f1b") - group_makespan(cost, long, "1f1b")
    assert added_s / 32 == pytest.approx(2 * 3.0)


def test_a_stage_that_holds_more_than_the_one_before_it_would_wait_for_ever():
    assert period_s(THREE, (1, 2, 1), "1f1b") == inf


def test_gpipe_period_adds_the_longest_forward_and_the_longest_backward():
    assert period_s(THREE, (1, 1, 1), "gpipe") == 2.0 + 4.0
    assert pipeline_s({1: THREE}, (1,) * 5, (5, 5, 5), "gpipe")[0] == pytest.approx(12.05 + 4 * 6)


def test_one_microbatch_takes_the_first_round_trip():
    found_s, links_s = pipeline_s({1: THREE}, (1,), (3, 2, 1), "1f1b")
    assert found_s == pytest.approx(12.05)
    assert links_s == pytest.approx(1.05)


def test_an_early_busy_stage_hides_the_others():
    # Ten times 10 s on the first stage; the rest fits between, but for the last way down and up.
    chain = make_chain([(5.0, 5.0), (0.1, 0.1)], [(0.0, 0.0)], [(0.0, 0.0)])
    found_s, _ = pipeline_s({1: chain}, (1,) * 10, (2, 1), "1f1b")
    assert found_s == pytest.approx(100.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_number_in_flight_within_memory_has_a_shorter_period(seed):
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(2, 5))
    border_s = rng.uniform(0, rng.choice([0.3, 2.0]), (num_stages - 1, 2))
    chain = make_chain(rng.uniform(0.2, 1.0, (num_stages, 2)), border_s, border_s / 2)
    plain = list(range(num_stages, 0, -1))
    room = [int(rng.integers(k, 2 * k + 1)) for k in plain]
    least_s = min(
        period_s(chain, held, "1f1b")
        for held in product(*(range(1, most + 1) for most in room[:-1]), [1])
    )
    found = best_inflight(chain, [2 * k - 1 for k in plain], room)
    assert found[-1] == 1
    assert all(held <= most for held, most in zip(found, room, strict=True))
    assert period_s(chain, found, "1f1b") <= least_s * (1 + PERIOD_TOLERANCE)


def test_what_is_wanted_in_flight_is_kept_where_the_period_allows():
    chain = make_chain([(1.0, 2.0)] * 3, [(0.0, 0.0)] * 2, [(0.0, 0.0)] * 2)
    assert best_inflight(chain, (3, 2, 1), (9, 9, 9)) == (3, 2, 1)
    assert best_inflight(chain, (5, 3, 1), (9, 9, 9)) == (5, 3, 1)
    assert best_inflight(chain, (5, 3, 1), (3, 9, 9)) == (3, 2, 1)
    idle = make_chain([(0.0, 0.0)] * 2, [(1.0, 1.0)], [(0.0, 0.0)])
    assert best_inflight(idle, (3, 1), (2, 1)) == (2, 1)


def test_sizes_are_counted():
    assert count_sizes((4, 4, 4, 3)) == {4: 3, 3: 1}
    assert count_sizes(()) == {}


def test_a_short_last_microbatch_queues_behind_the_one_before_it_or_goes_ahead_alone():
    chains = {m: make_chain([(m, m), (m, m)], [(0.0, 0.0)], [(0.0, 0.0)]) for m in (4, 1)}
    # The full one is back at 8 + 4 + 4, while the short one has been ready since 13 + 1.
    assert pipeline_s(chains, (4, 1), (2, 1), "1f1b")[0] == pytest.approx(4 * 4 + 1)
    assert pipeline_s(chains, (4, 1), (2, 1), "gpipe")[0] == pytest.approx(9 + 4 + 4 + 1)


def test_sizes_in_between_count_with_their_work_at_the_busiest_stage():
    chains = {m: make_chain([(m, m), (3 * m, m)], [(0.0, 0.0)], [(0.0, 0.0)]) for m in (4, 2, 1)}
    alike_s, _ = pipeline_s(chains, (4, 4, 4, 1), (2, 1), "1f1b")
    assert pipeline_s(chains, (4, 2, 4, 1), (2, 1), "1f1b")[0] == pytest.approx(alike_s - 8)


def uneven_case(forward_s, microbatches, border_s, latency_ratio, *, inflight):
    """A stage a layer; ``forward_s`` of a sample, ``border_s`` of a microbatch of four."""
    count = len(forward_s)
    links = []
    for i, seconds in enumerate(border_s):
        latency_s = seconds * latency_ratio
        rate = 4.0 / max(1e-12, seconds - latency_s)
        links += [Link(f"z{a}", f"z{b}", latency_s, rate) for a, b in ((i, i + 1), (i + 1, i))]
    devices = [make_device(f"d-{i}", zone=f"z{i}") for i in range(count)]
    profile = make_profile(
        {"gpu": [f / 4 for f in forward_s]}, microbatches=(1, 2, 3, 4), boundary_bytes=1.0
    )
    cost = CostModel(make_problem(make_cluster(devices, links=links), profile, batch_samples=1024))
    stages = make_stages(devices, range(count + 1))
    stages = tuple(replace(s, inflight=k) for s, k in zip(stages, inflight, strict=True))
    return cost, Group(stages, tuple(microbatches))


def held(rng, num_stages):
    """K_s that never grow along the chain, as memory may leave them."""
    return [int(k) for k in 1 + np.cumsum([0, *rng.integers(0, 4, num_stages - 1)])[::-1]]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_stages=st.integers(1, 7),
    count=st.integers(1, 24),
    short=st.integers(0, 3),
    p2p_ratio=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_closed_form_is_never_above_the_exact_time(
    seed, num_stages, count, short, p2p_ratio, schedule
):
    rng = np.random.default_rng(seed)
    microbatches = [4] * count + [short] * (short > 0)
    inflight = held(rng, num_stages)
    cost, group = uneven_case(
        rng.uniform(0.1, 2.0, num_stages),
        microbatches,
        3 * p2p_ratio * rng.uniform(0, 2, num_stages - 1),
        rng.uniform(0, 0.5),
        inflight=[len(microbatches)] * num_stages if schedule == "gpipe" else inflight,
    )
    closed_s = cost.evaluate([group], schedule).group_s[0]
    exact_s = group_makespan(cost, group, schedule)
    assert closed_s <= exact_s * (1 + ROUNDING)
    assert closed_s >= 0.7 * exact_s
    if schedule == "gpipe" and not short:
        assert closed_s == pytest.approx(exact_s, rel=ROUNDING)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), p2p_ratio=st.sampled_from([0.0, 0.2, 0.8, 2.0]))
def test_period_is_what_each_further_microbatch_adds_in_the_long_run(seed, p2p_ratio):
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(1, 6))
    inflight = held(rng, num_stages)
    cost, group = uneven_case(
        rng.uniform(0.2, 2.0, num_stages),
        [4] * 480,
        3 * p2p_ratio * rng.uniform(0, 2, num_stages - 1),
        rng.uniform(0, 0.3),
        inflight=inflight,
    )
    half = Group(group.stages, group.microbatches[:240])
    added_s = group_makespan(cost, group, "1f1b") - group_makespan(cost, half, "1f1b")
    # A round of the circuit moves several microbatches on, so 240 may be no whole rounds.
    assert cost.curve(group.stages, 4, "1f1b").period_s == pytest.approx(added_s / 240, rel=0.02)
