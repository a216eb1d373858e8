from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import (
    GIB,
    make_cluster,
    make_device,
    make_group,
    make_problem,
    make_profile,
    make_stages,
    team_of,
)
from orchestrator.core.cluster import Link
from orchestrator.core.model import MORE_SIZES
from orchestrator.core.plan import Group
from orchestrator.core.slot import IDLE_ESTIMATE
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from orchestrator.planning.partition import partition
from orchestrator.planning.sums import list_sums


def model_of(devices, profile, *, problem=None, **cluster):
    return CostModel(make_problem(make_cluster(devices, **cluster), profile, **(problem or {})))


def whole(device, num_layers, microbatches):
    return make_group([device], [0, num_layers], microbatches)


# Time -------------------------------------------------------------------------------


def test_input_is_drawn_by_the_first_and_the_last_stage_once_each():
    """traceml#165: a slow loader is local time of the stages that draw, whatever their layers."""
    devices = [make_device(f"gpu-{i}") for i in range(3)]
    slow = [replace(device, input_s_per_sample=0.5) for device in devices]
    profile = make_profile({"gpu": [0.1] * 4})
    healthy, cost = model_of(devices, profile), model_of(slow, profile)
    team = team_of(slow[0])
    for first, end, extra_s in ((0, 1, 1.0), (1, 3, 0.0), (3, 4, 1.0), (0, 4, 1.0)):
        plain_s = healthy.stage_seconds(team, first, end, 2)
        slow_s = cost.stage_seconds(team, first, end, 2)
        assert slow_s == pytest.approx((plain_s[0] + extra_s, plain_s[1]))
        if end - first < 4:  # what cutting sees of a chain
            prefix = cost.cutting.prefix(team, 2)
            cut_s = prefix.both_s[end] - prefix.both_s[first]
            assert cut_s == pytest.approx(sum(slow_s))


def test_layers_move_away_from_a_stage_whose_input_is_slow():
    devices = [make_device(f"gpu-{i}") for i in range(2)]
    slow = [replace(devices[0], input_s_per_sample=0.5), devices[1]]
    profile = make_profile({"gpu": [0.1] * 6})
    cuts = []
    for chain in (devices, slow):
        cost = model_of(chain, profile)
        teams = tuple(team_of(device) for device in chain)
        cuts.append(partition(cost, teams, 1, "1f1b")[0][0].end_layer)
    assert cuts[0] == 3
    assert cuts[1] < 3


def test_one_device_runs_m_s_over_3_f_samples_per_second_at_its_own_price():
    device = make_device()
    cost = model_of([device], make_profile({"gpu": [0.1, 0.3]}), price_usd_per_s=0.002)
    estimate = cost.evaluate([whole(device, 2, [1] * 8)], "1f1b")
    assert estimate.samples_per_s == pytest.approx(1 / (3 * 0.4))
    assert estimate.cost_usd_per_s == pytest.approx(0.002)
    assert estimate.bubble_ratio == pytest.approx(0.0)
    assert estimate.sync_s == 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 2), (4, 8), (6, 3)])
def test_equal_stages_without_links_take_count_plus_stages_minus_one_periods(
    schedule, stages, count
):
    devices = [make_device(f"d-{i}") for i in range(stages)]
    cost = model_of(devices, make_profile({"gpu": [0.01] * stages}), bandwidth_bytes_per_s=1e30)
    group = make_group(devices, range(stages + 1), [1] * count)
    found = cost.evaluate([group], schedule).group_s[0]
    assert found == pytest.approx((count + stages - 1) * 0.03)


def test_curve_is_fill_and_drain_plus_a_period_a_microbatch():
    devices = [make_device(f"d-{i}") for i in range(2)]
    cost = model_of(
        devices, make_profile({"gpu": [0.1, 0.2]}, boundary_bytes=1e6),
        latency_s=0.01, bandwidth_bytes_per_s=1e8,
    )  # fmt: skip
    curve = cost.curve(make_stages(devices, [0, 1, 2]), 1, "1f1b")
    round_trip_s = 0.3 + 0.6 + 2 * 0.02
    assert curve.fill_drain_s == pytest.approx(round_trip_s)
    assert curve.period_s == pytest.approx(max(0.6, round_trip_s / 2))


def test_round_trips_over_what_is_in_flight_bound_the_period():
    devices = [make_device(f"d-{i}") for i in range(2)]
    cost = model_of(devices, make_profile({"gpu": [0.1, 0.1]}), latency_s=0.3)
    stages = make_stages(devices, [0, 1, 2])
    assert cost.curve(stages, 1, "1f1b").period_s == pytest.approx((0.6 + 0.6) / 2)
    raised = (replace(stages[0], inflight=4), stages[1])
    assert cost.curve(raised, 1, "1f1b").period_s == pytest.approx(0.3)  # a busy stage


def test_a_stage_that_may_hold_all_microbatches_never_waits_for_a_round_trip():
    devices = [make_device(f"d-{i}") for i in range(2)]
    cost = model_of(devices, make_profile({"gpu": [0.1, 0.1]}), latency_s=0.3)
    group = make_group(devices, [0, 1, 2], [1, 1])
    found = cost.evaluate([group], "1f1b").group_s[0]
    assert found == pytest.approx(group_makespan(cost, group, "1f1b"))
    assert found < 1.2 + 0.6  # fill, drain and one period of the long run


def test_slowdown_of_the_slowest_member_stretches_the_stage():
    devices = [make_device(), make_device("e-0", slowdown=2.5)]
    cost = model_of(devices, make_profile({"gpu": [0.1, 0.1]}))
    forward_s, backward_s = cost.stage_seconds(team_of(devices[1]), 0, 2, 1)
    assert (forward_s, backward_s) == pytest.approx((0.5, 1.0))
    estimate = cost.evaluate([make_group(devices, [0, 1, 2], [1] * 4)], "1f1b")
    assert dict(estimate.compute_s) == pytest.approx({"d-0": 4 * 0.3, "e-0": 4 * 0.75})


def test_microbatches_between_measured_sizes_are_interpolated_and_say_so():
    device = make_device()
    cost = model_of([device], make_profile({"gpu": [0.1]}, microbatches=(2, 4)))
    assert cost.stage_seconds(team_of(device), 0, 1, 3) == pytest.approx((0.3, 0.6))
    assert cost.stage_seconds(team_of(device), 0, 1, 1) == pytest.approx((0.1, 0.2))
    assert cost.evaluate([whole(device, 1, [3])], "1f1b").interpolated
    assert not cost.evaluate([whole(device, 1, [4])], "1f1b").interpolated


def test_the_slowest_device_update_and_the_step_overhead_end_every_step():
    devices = [make_device(), make_device("e-0", slowdown=2.0)]
    profile = make_profile({"gpu": [0.1] * 3}, update_s=0.01, step_overhead_s=0.005)
    estimate = model_of(devices, profile).evaluate([make_group(devices, [0, 2, 3], [1])], "1f1b")
    assert estimate.update_s == pytest.approx(0.02 + 0.005)
    assert estimate.step_s == pytest.approx(estimate.group_s[0] + 0.025)


def test_links_are_what_is_exposed_of_a_single_microbatch():
    devices = [make_device(f"d-{i}") for i in range(2)]
    cost = model_of(devices, make_profile({"gpu": [0.1, 0.1]}), latency_s=0.3)
    estimate = cost.evaluate([make_group(devices, [0, 1, 2], [1])], "1f1b")
    assert estimate.exposed_comm_s == pytest.approx(0.6)


def uneven_case(rng, *, p2p_ratio, extra, short):
    count, num_microbatches = int(rng.integers(2, 9)), int(rng.integers(1, 33))
    forward_s = rng.uniform(0.2, 1.8, count)
    border_s = rng.uniform(0, 2 * p2p_ratio, count - 1) * 3 * forward_s.mean()
    links = []
    for i, seconds in enumerate(border_s):
        latency_s = seconds * rng.uniform(0, 0.3)
        rate = 4.0 / (seconds - latency_s)
        links += [Link(f"z{a}", f"z{b}", latency_s, rate) for a, b in ((i, i + 1), (i + 1, i))]
    devices = [make_device(f"d-{i}", zone=f"z{i}") for i in range(count)]
    profile = make_profile(
        {"gpu": list(forward_s / 4)}, microbatches=(1, 2, 3, 4), boundary_bytes=1.0
    )
    cost = CostModel(make_problem(make_cluster(devices, links=links), profile, batch_samples=256))
    last = [int(rng.integers(1, 4))] if short else []
    group = make_group(devices, range(count + 1), [4] * num_microbatches + last)
    if extra:
        stages = cost.with_inflight(group.stages, 4, len(group.microbatches), "1f1b")
        group = Group(stages, group.microbatches)
    return cost, group


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("p2p_ratio", [0.01, 0.2, 0.5, 0.8])
def test_closed_form_of_uneven_pipelines_stays_close_to_the_exact_times(p2p_ratio, extra, short):
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(60):
        cost, group = uneven_case(rng, p2p_ratio=p2p_ratio, extra=extra, short=short)
        exact_s = group_makespan(cost, group, "1f1b")
        errors.append(cost.evaluate([group], "1f1b").group_s[0] / exact_s - 1)
    assert np.max(errors) <= 1e-9
    assert np.mean(errors) >= -0.02
    assert np.median(errors) >= -0.01
    assert np.percentile(errors, 5) >= -0.08
    assert np.min(errors) >= -0.12


# In flight and memory ---------------------------------------------------------------


def test_slow_links_raise_what_is_in_flight_and_the_last_stage_keeps_one():
    devices = [make_device(f"d-{i}") for i in range(4)]
    stages = make_stages(devices, range(5))
    free = model_of(devices, make_profile({"gpu": [0.1] * 4}))
    fast = model_of(devices, make_profile({"gpu": [0.1] * 4}), latency_s=0.02)
    slow = model_of(devices, make_profile({"gpu": [0.1] * 4}), latency_s=0.04)
    assert [s.inflight for s in free.with_inflight(stages, 1, 16, "1f1b")] == [4, 3, 2, 1]
    # A microbatch is away from the last but one for 0.30 + 0.30 + 0.04 s: more than two periods.
    assert [s.inflight for s in fast.with_inflight(stages, 1, 16, "1f1b")] == [7, 5, 3, 1]
    assert [s.inflight for s in slow.with_inflight(stages, 1, 16, "1f1b")] == [7, 5, 3, 1]
    assert [s.inflight for s in slow.with_inflight(stages, 1, 16, "gpipe")] == [16] * 4


def test_memory_limits_what_is_in_flight_and_later_stages_leave_the_first_what_it_needs():
    devices = [make_device("a-0", memory_bytes=GIB), *(make_device(f"d-{i}") for i in range(3))]
    profile = make_profile({"gpu": [0.1] * 4}, param_bytes=0.0, stash_bytes=0.9 * GIB / 4.5)
    stages = model_of(devices, profile, latency_s=1.0).with_inflight(
        make_stages(devices, range(5)), 1, 16, "1f1b"
    )
    # With four at the second stage, too, the two would take turns over the slow link.
    assert [s.inflight for s in stages] == [4, 3, 2, 1]


def test_peak_is_state_stash_in_flight_boundaries_and_buckets():
    devices = [make_device(f"d-{i}") for i in range(3)]
    profile = make_profile(
        {"gpu": [0.1] * 2}, microbatches=(2,), param_bytes=[100.0, 10.0], boundary_bytes=[7.0, 0.0],
        stash_bytes=[3.0, 5.0], optimizer_bytes_per_param_byte=3.0,
    )  # fmt: skip
    cost = model_of(devices, profile)
    pipeline = make_group(devices[:2], [0, 1, 2], [2] * 4)
    alone = dict(cost.evaluate([pipeline], "1f1b").peak_memory_bytes)
    # Two in flight, the gradient of one, and that of the other waits.
    assert alone["d-0"] == 4 * 100 + 2 * 2 * 3 + 2 * 14
    assert alone["d-1"] == 4 * 10 + 2 * 5 + 2 * 14  # one in flight, an input and a gradient
    both = cost.evaluate([pipeline, whole(devices[2], 2, [2])], "1f1b")
    # The bucket of the sum, once nothing is in flight any more.
    assert dict(both.peak_memory_bytes)["d-0"] == 4 * 100 + 100
    gpipe = dict(cost.evaluate([pipeline], "gpipe").peak_memory_bytes)
    assert gpipe["d-0"] == 4 * 100 + 4 * 2 * 3 + (1 + 3) * 14
    assert gpipe["d-1"] == 4 * 10 + 4 * 2 * 5 + 14  # the stage before is not ahead of it


def test_the_margin_decides_and_the_message_names_device_need_and_room():
    device = make_device(memory_bytes=1000 * 2**30)
    profile = make_profile({"gpu": [0.1]}, param_bytes=200.0 * 2**30)
    cost = model_of([device], profile, problem={"memory_margin_ratio": 0.25})
    message = cost.memory_error([whole(device, 1, [1])])
    assert message is not None
    assert "'d-0'" in message
    assert "layers 0 to 0 need 800 GiB" in message
    assert "750 are usable" in message
    roomy = model_of([device], profile, problem={"memory_margin_ratio": 0.2})
    assert roomy.memory_error([whole(device, 1, [1])]) is None


def test_every_stage_is_checked_not_the_average_one():
    devices = [make_device("a-0", memory_bytes=10**10), make_device("b-0", memory_bytes=10**7)]
    cost = model_of(devices, make_profile({"gpu": [0.1] * 2}, param_bytes=[1e6, 1e7]))
    message = cost.memory_error([make_group(devices, [0, 1, 2], [1])])
    assert message is not None
    assert "'b-0'" in message


def test_memory_caps_the_microbatches_of_gpipe_but_not_of_1f1b():
    device = make_device(memory_bytes=1000)
    profile = make_profile({"gpu": [0.1]}, param_bytes=0.0, stash_bytes=100.0)
    cost = model_of([device], profile, problem={"batch_samples": 64})
    stages = make_stages([device], [0, 1])
    assert cost.curve(stages, 1, "gpipe").max_microbatches == 9
    assert cost.curve(stages, 1, "1f1b").max_microbatches == 64


def test_a_tied_parameter_is_stored_once_a_stage():
    device = make_device()
    profile = make_profile({"gpu": [0.1] * 3}, param_bytes=100.0, ties=((0, 2),), tie_bytes=(60.0,))
    estimate = model_of([device], profile).evaluate([whole(device, 3, [1])], "1f1b")
    # A part of its gradient waits for the other.
    assert dict(estimate.peak_memory_bytes)["d-0"] == 4 * (300 - 60) + 60


def frozen_profile():
    """Four layers of 100 bytes, of which the first is frozen and the second one in half."""
    profile = make_profile({"gpu": [0.1] * 4}, param_bytes=100.0)
    return replace(
        profile, sizes=(replace(profile.sizes[0], frozen_bytes=(100.0, 50.0, 0.0, 0.0)),)
    )


def test_what_is_not_trained_has_no_gradient_no_state_and_no_sum():
    devices = [make_device("a-0"), make_device("b-0")]
    cost = model_of(devices, frozen_profile())
    alone = dict(cost.evaluate([whole(devices[0], 4, [1])], "1f1b").peak_memory_bytes)
    assert alone["a-0"] == 400 + 3 * 250
    both = dict(cost.evaluate([whole(d, 4, [1]) for d in devices], "1f1b").peak_memory_bytes)
    assert both["a-0"] == alone["a-0"] + 250  # the bucket
    ((_, size_bytes),) = list_sums([whole(d, 4, [1]) for d in devices], cost.tables)
    assert size_bytes == 250
    first = [make_group(devices, [0, 1, 4], [1])] * 2
    assert [size for _, size in list_sums(first, cost.tables)] == [250]  # none of the first layer


def test_memory_of_all_ranges_is_that_of_each():
    profile = make_profile(
        {"gpu": [0.1] * 6}, param_bytes=[7.0, 2.5, 3.1, 9.0, 1.0, 7.0], ties=((0, 5), (1, 2, 3)),
        tie_bytes=(6.0, 0.3), stash_bytes=[1.0, 2.0, 3.3, 4.0, 5.0, 6.0],
        boundary_bytes=[11.0, 12.0, 13.0, 14.0, 15.0, 0.0],
    )  # fmt: skip
    rng = np.random.default_rng(3)
    measured = replace(
        profile.sizes[0], input_bytes_per_sample=9.0,
        **{name: tuple(rng.integers(1, 30, 6).astype(float)) for name in MORE_SIZES},
    )  # fmt: skip
    for changes in ({}, {"dtype": "bf16"}, {"sizes": (measured,)}):
        memory = model_of([make_device()], replace(profile, **changes)).memory
        for recompute in (False, True):
            matrices = memory.matrices(1, 2, recompute=recompute)
            for i, j in combinations(range(7), 2):
                parts = memory.parts(1, i, j, 2, recompute=recompute)
                assert tuple(m[i, j] for m in matrices) == pytest.approx(parts, rel=1e-12)
                assert matrices.always[j, i] == matrices.always[i, i] == inf


# Gradient sums ----------------------------------------------------------------------


def test_two_replicas_ring_their_parameters_over_the_slowest_hop():
    devices = [make_device("a-0"), make_device("b-0")]
    cost = model_of(
        devices, make_profile({"gpu": [0.1]}, param_bytes=1e8),
        latency_s=0.01, bandwidth_bytes_per_s=1e9,
    )  # fmt: skip
    estimate = cost.evaluate([whole(d, 1, [1] * 4) for d in devices], "1f1b")
    assert estimate.sync_s == pytest.approx(2 * (1 / 2) * 1e8 / 1e9 + 2 * 0.01)


def test_segments_with_disjoint_owners_sum_at_the_same_time():
    devices = [make_device(f"d-{i}") for i in range(4)]
    profile = make_profile({"gpu": [0.1] * 2}, param_bytes=[1e9, 2e9])
    cost = model_of(devices, profile, bandwidth_bytes_per_s=1e9)
    alike = [make_group(devices[:2], [0, 1, 2], [1]), make_group(devices[2:], [0, 1, 2], [1])]
    assert cost.evaluate(alike, "1f1b").sync_s == pytest.approx(2.0)
    shared = [make_group(devices[:2], [0, 1, 2], [1]), whole(devices[2], 2, [1])]
    assert cost.evaluate(shared, "1f1b").sync_s == pytest.approx(1.0 + 2.0)


def test_sums_that_overlap_start_when_their_owners_are_free():
    devices = [make_device(f"d-{i}") for i in range(4)]
    profile = make_profile({"gpu": [0.1] * 2}, param_bytes=[0.0, 1e8])
    groups = [make_group(devices[:2], [0, 1, 2], [1]), make_group(devices[2:], [0, 1, 2], [1])]
    late = model_of(devices, profile, bandwidth_bytes_per_s=1e9)
    early = model_of(devices, profile, bandwidth_bytes_per_s=1e9, problem={"overlap": True})
    assert late.evaluate(groups, "1f1b").sync_s == pytest.approx(0.1)
    assert early.evaluate(groups, "1f1b").sync_s == 0.0  # done before the first stage's backward


def test_a_tied_parameter_is_summed_over_all_its_owners_even_in_one_group():
    devices = [make_device(f"d-{i}") for i in range(2)]
    profile = make_profile({"gpu": [0.1] * 2}, param_bytes=1e9, ties=((0, 1),), tie_bytes=(1e9,))
    cost = model_of(devices, profile, bandwidth_bytes_per_s=1e9)
    apart = cost.evaluate([make_group(devices, [0, 1, 2], [1])], "1f1b")
    together = cost.evaluate([whole(devices[0], 2, [1])], "1f1b")
    assert apart.sync_s == pytest.approx(1.0)
    assert together.sync_s == 0.0


# Money ------------------------------------------------------------------------------


def test_egress_is_billed_for_boundaries_both_ways_and_for_sums():
    devices = [make_device("a-0", zone="z1"), make_device("b-0", zone="z2")]
    profile = make_profile({"gpu": [0.1] * 2}, boundary_bytes=[10.0, 0.0], param_bytes=100.0)
    cost = model_of(devices, profile, egress_usd_per_byte=0.5, price_usd_per_s=0.001)
    piped = cost.evaluate([make_group(devices, [0, 1, 2], [1] * 6)], "1f1b")
    assert piped.egress_usd_per_s * piped.step_s == pytest.approx(6 * 2 * 10 * 0.5)
    assert piped.cost_usd_per_s == pytest.approx(0.002 + piped.egress_usd_per_s)
    copied = cost.evaluate([whole(d, 2, [1] * 3) for d in devices], "1f1b")
    ring_bytes = 2 * (2 - 1) / 2 * 200  # per hop, two hops
    assert copied.egress_usd_per_s * copied.step_s == pytest.approx(2 * ring_bytes * 0.5)


def standing_cluster():
    devices = [make_device("own-0"), make_device("own-1"), make_device("spot-0")]
    cluster = make_cluster(devices, price_usd_per_s={"own": 0.01, "spot": 0.02})
    offers = tuple(
        replace(o, billed="while_present") if o.pool == "own" else o for o in cluster.offers
    )
    return devices, replace(cluster, offers=offers)


def test_devices_billed_while_present_cost_in_every_plan_and_in_idle():
    devices, cluster = standing_cluster()
    cost = CostModel(make_problem(cluster, make_profile(num_layers=1), backlog_usd=2.0))
    assert cost.standing_usd_per_s == pytest.approx(0.02)
    assert cost.evaluate([whole(devices[0], 1, [1])], "1f1b").cost_usd_per_s == pytest.approx(0.02)
    assert cost.evaluate([whole(devices[2], 1, [1])], "1f1b").cost_usd_per_s == pytest.approx(0.04)
    assert cost.evaluate([], "1f1b").cost_usd_per_s == pytest.approx(0.02)
    assert cost.score(IDLE_ESTIMATE) == pytest.approx(-2.0 * 0.02)


def test_score_weighs_samples_against_dollars_and_idle_scores_zero():
    device = make_device()
    cost = model_of(
        [device], make_profile({"gpu": [0.1]}), price_usd_per_s=0.5,
        problem={"penalty_weight": 3.0, "backlog_usd": 4.0},
    )  # fmt: skip
    estimate = cost.evaluate([whole(device, 1, [1])], "1f1b")
    assert cost.score(estimate) == pytest.approx(3.0 / 0.3 - 4.0 * 0.5)
    assert cost.score(IDLE_ESTIMATE) == 0.0


# Invariants -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    forward_s=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6),
    count=st.integers(1, 12),
    latency_s=st.floats(0.0, 0.5),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_estimates_are_consistent_whatever_the_pipeline(forward_s, count, latency_s, schedule):
    devices = [make_device(f"d-{i}") for i in range(len(forward_s))]
    cost = model_of(
        devices, make_profile({"gpu": forward_s}, boundary_bytes=1e6, update_s=0.01),
        latency_s=latency_s, bandwidth_bytes_per_s=1e8,
    )  # fmt: skip
    group = make_group(devices, range(len(devices) + 1), [1] * count)
    estimate = cost.evaluate([group], schedule)
    busiest_s = max(seconds for _, seconds in estimate.compute_s)
    assert estimate.step_s >= busiest_s
    assert 0 <= estimate.bubble_ratio < 1
    assert 0 <= estimate.exposed_comm_s <= estimate.step_s
    assert estimate.samples_per_s * estimate.step_s == pytest.approx(count)
    assert estimate == cost.evaluate([group], schedule)
