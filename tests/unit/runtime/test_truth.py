"""What an emulated cluster really does follows from the profile and the events."""

import math

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_profile
from orchestrator.control.backend import EmulatedEvent
from orchestrator.control.faults import FaultPlan
from orchestrator.core.training import TrainingOptions
from orchestrator.runtime.truth import EmulatedTruth, present_by

A, B = make_device("fast-0"), make_device("slow-0", kind="old", zone="z2")
NO_FAULTS = FaultPlan()
TRAINING = TrainingOptions(task="m:t", global_batch=6, microbatch=2, steps=10)


def truth(*events: EmulatedEvent, faults: FaultPlan = NO_FAULTS) -> EmulatedTruth:
    return EmulatedTruth(
        cluster=make_cluster((A, B), latency_s=0.25, bandwidth_bytes_per_s=1e3),
        model=make_profile(
            {"gpu": [1.0] * 4, "old": [3.0] * 4},
            microbatches=(1, 2),
            step_overhead_s=0.5,
            update_s=0.1,
        ),
        training=TRAINING,
        events=events,
        faults=faults.faults,
        billing_speedup=60.0,
    )


def test_a_stage_takes_the_true_time_of_its_kind_for_every_size() -> None:
    plan = make_plan(make_group((A, B), (0, 3, 4), (2, 2, 2)))
    stages = truth().stages(plan, first_step=0)
    assert stages["fast-0"].seconds == {1: (3.0, 6.0), 2: (6.0, 12.0)}
    assert stages["slow-0"].seconds == {1: (3.0, 6.0), 2: (6.0, 12.0)}
    assert (stages["fast-0"].to_next, stages["fast-0"].to_previous) == ((0.25, 1e3), None)
    assert (stages["slow-0"].to_next, stages["slow-0"].to_previous) == (None, (0.25, 1e3))


def test_a_step_ends_with_update_and_overhead_where_nothing_is_summed() -> None:
    plan = make_plan(make_group((A, B), (0, 3, 4), (2, 2, 2)))
    stages = truth().stages(plan, first_step=0)
    assert [s.step_end_s for s in stages.values()] == pytest.approx([3 * 0.1 + 0.5] * 2)


def test_durations_stay_normal_and_slow_downs_stand_beside_them() -> None:
    slow = EmulatedEvent(at_step=3, device="fast-0", speed_ratio=0.5)
    plan = make_plan(make_group((A, B), (0, 3, 4), (2, 2, 2)))
    stage = truth(slow).stages(plan, first_step=5)["fast-0"]
    assert stage.seconds[2] == (6.0, 12.0)
    assert stage.slowdowns == ((3, 2.0),)
    assert stage.step_end_s == pytest.approx(2.0 * 3 * 0.1 + 0.5)


def test_a_delay_reaches_its_device_in_its_phase_for_its_steps() -> None:
    faults = (
        FaultPlan()
        .slow_at(3, "fast-0", "backward", 0.5, num_steps=2)
        .slow_at(4, "fast-0", "loader", 0.25)
        .fail_at(6, "slow-0")
    )
    world = truth(faults=faults)
    assert world.delays("fast-0") == ((3, 5, "backward", 0.5), (4, math.inf, "loader", 0.25))
    assert world.delays("slow-0") == ()
    assert world.present_at(9) == ("fast-0", "slow-0")  # a process that fails leaves its device


def test_a_slow_down_of_a_pool_reaches_its_devices_and_may_end() -> None:
    world = truth(
        EmulatedEvent(at_step=3, pool="fast", speed_ratio=0.25),
        EmulatedEvent(at_step=6, device="fast-0", speed_ratio=1.0),
    )
    assert [world.slowdown_at("fast-0", step) for step in (2, 3, 5, 6)] == [1.0, 4.0, 4.0, 1.0]
    assert world.slowdown_at("slow-0", 5) == 1.0


def test_a_price_counts_from_the_moment_its_step_came_next() -> None:
    world = truth(EmulatedEvent(at_step=4, pool="slow", price_per_hour=7.2))
    before = {o.pool: o for o in world.offers_at(3, {})}
    after = {o.pool: o for o in world.offers_at(4, {4: 12.5})}
    assert before["slow"].price_usd_per_s == 1e-3
    assert after["slow"].price_usd_per_s == pytest.approx(7.2 / 3600 * 60)
    assert after["slow"].valid_from_s == 12.5
    assert after["fast"] == before["fast"]


def test_a_lost_pool_loses_its_devices() -> None:
    world = truth(EmulatedEvent(at_step=4, pool="slow", lost=True))
    assert [world.present_at(step) for step in (3, 4, 9)] == [
        ("fast-0", "slow-0"),
        ("fast-0",),
        ("fast-0",),
    ]


def test_devices_that_join_are_the_last_of_their_pool_and_a_loss_is_for_good() -> None:
    devices = [make_device(f"{pool}-{i}") for pool in ("fast", "slow") for i in range(3)]
    events = (
        EmulatedEvent(at_step=6, pool="fast", joined=1),
        EmulatedEvent(at_step=2, pool="fast", joined=1),
        EmulatedEvent(at_step=4, device="fast-0", lost=True),
        EmulatedEvent(at_step=8, pool="fast", lost=True),
    )
    slow = ("slow-0", "slow-1", "slow-2")
    there = {step: present_by(events, devices, step) for step in (0, 2, 4, 6, 8)}
    assert there == {
        0: ("fast-0", *slow),
        2: ("fast-0", "fast-1", *slow),
        4: ("fast-1", *slow),
        6: ("fast-1", "fast-2", *slow),
        8: slow,
    }


def test_a_device_under_notice_leaves_so_long_after_its_step_came() -> None:
    world = truth(EmulatedEvent(at_step=4, device="slow-0", notice_s=30.0))
    assert world.leaving({}) == {}
    assert world.leaving({4: 12.5}) == {"slow-0": 42.5}


def test_a_slow_link_is_slow_both_ways_for_its_steps_and_no_other_is() -> None:
    chain = make_plan(make_group([A, B], [0, 2, 4], [1]))
    world = truth(faults=FaultPlan().slow_link_at(3, "slow-0", "fast-0", 0.25, num_steps=2))
    stages = world.stages(chain, 0)
    assert stages["fast-0"].narrow_next == stages["slow-0"].narrow_previous == ((3, 5, 0.25),)
    assert stages["fast-0"].narrow_previous == stages["slow-0"].narrow_next == ()
