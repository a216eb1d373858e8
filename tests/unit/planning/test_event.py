from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import make_cluster, make_device, make_group, make_problem, make_profile
from orchestrator.core.plan import Group
from orchestrator.core.schedule import FORWARD, build_program
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import (
    group_makespan,
    retime,
    stage_ends_s,
    timeline,
)

EXACT = 1e-12  # sums of a few dozen floats


def pipeline(forward_s, microbatches, *, bandwidth_bytes_per_s=1e30, **cluster):
    """One layer and one device a stage; a microbatch takes twice as long backward."""
    devices = [make_device(f"d-{i}") for i in range(len(forward_s))]
    sizes = tuple(sorted(set(microbatches)))
    model = make_profile({"gpu": forward_s}, microbatches=sizes, boundary_bytes=1e6)
    problem = make_problem(
        make_cluster(devices, bandwidth_bytes_per_s=bandwidth_bytes_per_s, **cluster),
        model,
        microbatch_samples=sizes[-1],
    )
    group = make_group(devices, range(len(devices) + 1), microbatches)
    return CostModel(problem), group, "1f1b"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 3)])
def test_equal_stages_take_count_plus_stages_minus_one_periods(schedule, stages, count):
    cost, group, _ = pipeline([0.01] * stages, [1] * count)
    found = group_makespan(cost, group, schedule)
    assert found == pytest.approx((count + stages - 1) * 0.03, rel=EXACT)


def test_four_uneven_stages_with_eight_microbatches_take_825_ms():
    cost, group, schedule = pipeline([0.020, 0.010, 0.030, 0.015], [1] * 8)
    assert group_makespan(cost, group, schedule) == pytest.approx(0.825, rel=EXACT)


def test_a_short_last_microbatch_is_timed_by_its_own_size():
    cost, group, schedule = pipeline([0.01, 0.01], [4, 2])
    f, b, short_b = 0.04, 0.08, 0.04
    # The short one's gradient is back (0.22 s) while the first stage still runs the long one.
    ends_s = (f + f + b) + b + short_b
    assert group_makespan(cost, group, schedule) == pytest.approx(ends_s, rel=1e-9)


def test_a_transfer_delays_by_latency_and_bytes_both_ways():
    cost, group, schedule = pipeline([0.01, 0.01], [1], latency_s=0.005, bandwidth_bytes_per_s=1e8)
    assert group_makespan(cost, group, schedule) == pytest.approx(0.06 + 2 * (0.005 + 0.01))


def test_messages_queue_on_a_busy_link_but_latency_does_not_occupy_it():
    cost, group, _ = pipeline(
        [0.001, 0.001], [1] * 10, latency_s=0.5, bandwidth_bytes_per_s=1e7
    )  # a message keeps the link busy for 0.1 s
    spans = timeline(cost, group, "gpipe")
    starts_s = [i.start_s for i in spans[1] if i.op == FORWARD]
    assert starts_s == pytest.approx([0.601 + 0.1 * k for k in range(10)])


def test_a_stage_runs_one_instruction_at_a_time_in_program_order():
    cost, group, schedule = pipeline([0.02, 0.01, 0.03], [2, 2, 1], latency_s=0.01)
    for stage, todo in zip(
        timeline(cost, group, schedule), build_program(group, schedule), strict=True
    ):
        assert [(i.op, i.microbatch) for i in stage] == [(i.op, i.microbatch) for i in todo]
        assert all(a.end_s <= b.start_s for a, b in pairwise(stage))


def test_alike_groups_are_run_once():
    devices = [make_device(f"d-{i}", slowdown=1.5 if i == 5 else 1.0) for i in range(6)]
    cost = CostModel(make_problem(make_cluster(devices), make_profile({"gpu": [0.1, 0.2]})))
    alike = [make_group(devices[i : i + 2], [0, 1, 2], [1, 1]) for i in (0, 2)]
    other = make_group(devices[4:], [0, 1, 2], [1, 1])
    ends_s = [stage_ends_s(cost, group, "1f1b") for group in (*alike, other)]
    assert ends_s[0] is ends_s[1]
    assert ends_s[2] > ends_s[0]


def test_stages_that_would_wait_for_each_other_for_ever_are_refused():
    cost, group, schedule = pipeline([0.01, 0.01], [1] * 4)
    first, second = group.stages
    stuck = Group((replace(first, inflight=1), replace(second, inflight=2)), group.microbatches)
    with pytest.raises(ValueError, match="deadlock"):
        timeline(cost, stuck, schedule)


def test_retimed_estimate_differs_only_through_its_group_times():
    cost, group, schedule = pipeline([0.020, 0.010, 0.030, 0.015], [1] * 8)
    closed, exact = cost.evaluate([group], schedule), retime(cost, [group], schedule)
    assert exact.group_s == (group_makespan(cost, group, schedule),)
    assert exact.step_s == pytest.approx(exact.group_s[0] + exact.sync_s + exact.update_s)
    assert exact.peak_memory_bytes == closed.peak_memory_bytes
    assert exact.compute_s == closed.compute_s


def test_more_in_flight_hides_slow_links():
    cost, group, schedule = pipeline(
        [0.01] * 4, [1] * 32, latency_s=0.0, bandwidth_bytes_per_s=1e6 / 0.015
    )  # a message takes half of a stage's 30 ms
    raised = Group(cost.with_inflight(group.stages, 1, 32, schedule), group.microbatches)
    assert [s.inflight for s in raised.stages] == [7, 5, 3, 1]
    gain = group_makespan(cost, group, schedule) / group_makespan(cost, raised, schedule)
    assert gain > 1.25


stage_s = st.floats(min_value=0.001, max_value=0.1)


@settings(max_examples=60, deadline=None)
@given(
    forward_s=st.lists(stage_s, min_size=1, max_size=6),
    microbatches=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    latency_s=st.floats(min_value=0.0, max_value=0.05),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_pipeline_is_never_faster_than_its_busiest_stage_or_its_first_round_trip(
    forward_s, microbatches, latency_s, schedule
):
    cost, group, _ = pipeline(forward_s, microbatches, latency_s=latency_s)
    makespan_s = group_makespan(cost, group, schedule)
    busiest_s = max(s for _, s in cost.evaluate([group], schedule).compute_s)
    round_trip_s = cost.curve(group.stages, microbatches[0], schedule).fill_drain_s
    assert makespan_s >= busiest_s * (1 - EXACT)
    assert makespan_s >= round_trip_s * (1 - EXACT)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["1f1b", "gpipe"]))
def test_a_long_row_of_microbatches_ends_as_its_timeline_says(random, schedule):
    """Whole rounds are skipped once the pipeline runs steadily; a short last one is not."""
    depth = random.randint(1, 5)
    forward_s = [
        random.choice([0.01, 0.01, 0.03, random.uniform(0.005, 0.05)]) for _ in range(depth)
    ]
    short = random.choice([[], [1]])
    cost, group, _ = pipeline(
        forward_s,
        [2] * random.randint(100, 300) + short,
        latency_s=random.choice([0.0, 0.02]),
        bandwidth_bytes_per_s=random.choice([1e30, 1e8, 4e7]),
    )
    held = sorted((random.randint(1, 2 * depth) for _ in range(depth)), reverse=True)
    stages = tuple(replace(s, inflight=k) for s, k in zip(group.stages, held, strict=True))
    group = Group(stages, group.microbatches)
    whole = [spans[-1].end_s for spans in timeline(cost, group, schedule)]
    assert stage_ends_s(cost, group, schedule) == pytest.approx(whole, rel=1e-9)


def test_a_slower_way_through_a_pipeline_may_show_late():
    """Ends that grow by the period for a while may grow faster later, behind slow links."""
    devices = [make_device(f"d-{i}", zone=f"z{i}") for i in range(11)]
    cluster = make_cluster(devices, latency_s=0.2, bandwidth_bytes_per_s=2.4e6)
    sizes = [1e5, 1e4, 1e4, 1e4, 3e4, 3e4, 3e4, 1e4, 3e4, 1e4, 3e4]
    profile = make_profile(
        {"gpu": [0.05] * 11}, backward_ratio=1.0, boundary_bytes=sizes, microbatches=(2,)
    )
    cost = CostModel(make_problem(cluster, profile))
    for count in range(200, 260, 5):
        group = make_group(devices, range(12), [2] * count)
        stages = tuple(replace(s, inflight=11 - i) for i, s in enumerate(group.stages))
        group = Group(stages, group.microbatches)
        whole = [spans[-1].end_s for spans in timeline(cost, group, "1f1b")]
        assert stage_ends_s(cost, group, "1f1b") == pytest.approx(whole, rel=1e-9)
