import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from orchestrator.planning.pipeline import count_sizes, make_chain, period_s, pipeline_s
from tests.unit.builders import make_cluster, make_device, make_group, make_problem, make_profile

THREE = make_chain([(1.0, 2.0), (2.0, 4.0), (1.0, 1.0)], [(0.5, 0.25), (0.1, 0.2)], 0.3)


def test_round_trips_run_from_a_forward_until_its_backward_may_end():
    assert THREE.round_trip_s == pytest.approx((3 + 6 + 2 + 0.75 + 0.3, 6 + 2 + 0.3, 2.0))


def test_period_is_the_busiest_stage_the_busiest_link_or_the_longest_round_trip():
    assert period_s(THREE, (9, 9, 9), "1f1b") == 6.0
    assert period_s(THREE, (1, 9, 9), "1f1b") == pytest.approx(12.05)
    assert period_s(THREE, (1, 9, 9), "1f1b", num_microbatches=1) == 6.0
    linked = make_chain([(1.0, 1.0), (1.0, 1.0)], [(9.0, 9.0)], 7.0)
    assert period_s(linked, (9, 9), "1f1b") == 7.0


def test_gpipe_period_adds_the_longest_forward_and_the_longest_backward():
    assert period_s(THREE, (1, 1, 1), "gpipe") == 2.0 + 4.0
    assert pipeline_s({1: THREE}, (1,) * 5, (5, 5, 5), "gpipe")[0] == pytest.approx(12.05 + 4 * 6)


def test_one_microbatch_takes_the_first_round_trip():
    found_s, links_s = pipeline_s({1: THREE}, (1,), (3, 2, 1), "1f1b")
    assert found_s == pytest.approx(12.05)
    assert links_s == pytest.approx(1.05)


def test_an_early_busy_stage_hides_the_others():
    # Ten times 10 s on the first stage; the rest fits between, but for the last way down and up.
    chain = make_chain([(5.0, 5.0), (0.1, 0.1)], [(0.0, 0.0)], 0.0)
    found_s, _ = pipeline_s({1: chain}, (1,) * 10, (2, 1), "1f1b")
    assert found_s == pytest.approx(100.0)


def test_sizes_are_counted():
    assert count_sizes((4, 4, 4, 3)) == {4: 3, 3: 1}
    assert count_sizes(()) == {}


@settings(max_examples=80, deadline=None)
@given(
    forward_s=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=7),
    count=st.integers(1, 16),
)
def test_without_links_the_closed_form_is_never_above_the_exact_time_and_close_below(
    forward_s, count
):
    devices = [make_device(f"d-{i}") for i in range(len(forward_s))]
    cost = CostModel(
        make_problem(
            make_cluster(devices, bandwidth_bytes_per_s=1e30), make_profile({"gpu": forward_s})
        )
    )
    group = make_group(devices, range(len(devices) + 1), [1] * count)
    closed_s = cost.evaluate([group], "1f1b").group_s[0]
    exact_s = group_makespan(cost, group, "1f1b")
    stalled = period_s(
        make_chain([(f, 2 * f) for f in forward_s], [(0.0, 0.0)] * (len(forward_s) - 1), 0.0),
        [s.inflight for s in group.stages],
        "1f1b",
    ) > 3 * max(forward_s) * (1 + 1e-9)
    if not stalled:
        assert closed_s <= exact_s * (1 + 1e-9)
    assert closed_s >= 0.75 * exact_s
