from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan
from orchestrator.control.records import (
    Clock,
    Settled,
    all_done,
    bubble_ratio,
    device_views,
    group_step_s,
    measured_rates,
    predicted_rates,
    step_spreads,
    utilization_ratios,
)
from orchestrator.control.scribe import Scribe
from orchestrator.core.plan import Migration
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    CommittedStep,
    Decision,
    DeviceJoined,
    DeviceLost,
    PreemptionNotice,
    StepEstimate,
    StepReport,
    Usage,
    WorkerFailed,
)
from orchestrator.core.view import Spread
from orchestrator.telemetry.estimator import Straggler

A, B, C = (make_device(f"gpu-{i}") for i in range(3))
PLAN = make_plan(make_group([A, B], [0, 2, 4], [4]), make_group([C], [0, 4], [4]))
CLUSTER = make_cluster([A, B, C], price_usd_per_s=0.001)


def report(device_id: str, group_index: int, compute_s: float, step: int = 0) -> StepReport:
    return StepReport(
        generation=1,
        step=step,
        device_id=device_id,
        group_index=group_index,
        num_samples=4,
        started_s=0.0,
        ended_s=1.0,
        step_s=1.0,
        compute_s=compute_s,
        peak_memory_bytes=100 + step,
    )


def slot(**changes: object) -> Settled:
    steps = tuple(CommittedStep(k, 1, 8 * k, 8 * k + 8, step_s=s, ended_s=1.0) for k, s in
                  enumerate((1.0, 1.0, 4.0)))  # fmt: skip
    reports = tuple(
        report(d, g, s, k)
        for k in range(3)
        for d, g, s in (("gpu-0", 0, 0.2), ("gpu-1", 0, 0.4), ("gpu-2", 1, 0.9))
    )
    known = Settled(PLAN, IDLE_ESTIMATE, 0.0, 10.0, 0.02, steps, reports)
    return replace(known, **changes)  # type: ignore[arg-type]


def test_measured_rates_are_the_median_step_and_totals_over_the_real_length() -> None:
    rates = measured_rates(slot(), Clock())
    assert (rates.step_s, rates.samples_per_s) == (1.0, pytest.approx(2.4))
    assert rates.cost_per_hour_usd == pytest.approx(7.2)
    assert rates.peak_memory_bytes == (("gpu-0", 102), ("gpu-1", 102), ("gpu-2", 102))


def test_steps_of_the_plan_before_do_not_time_the_new_one() -> None:
    old, new = (CommittedStep(k, g, 8 * k, 8 * k + 8, step_s=s, ended_s=1.0)
                for k, (g, s) in enumerate(((0, 5.0), (1, 2.0))))  # fmt: skip
    rates = measured_rates(slot(steps=(old, new)), Clock())
    assert (rates.step_s, rates.samples_per_s) == (2.0, pytest.approx(1.6))
    assert measured_rates(slot(steps=(old,)), Clock()).step_s is None


def test_a_slot_without_length_measures_nothing() -> None:
    rates = measured_rates(slot(to_s=0.0, steps=(), reports=()), Clock())
    assert (rates.step_s, rates.samples_per_s, rates.cost_per_hour_usd) == (None, None, None)


def test_dollars_per_hour_are_true_ones_however_fast_billing_runs() -> None:
    clock = Clock(billing_speedup=60.0)
    assert clock.per_hour(0.06) == pytest.approx(3.6)
    assert clock.billed_s(10.0) == 600.0
    rates = predicted_rates(StepEstimate(0.5, 16.0, 0.06), clock)
    assert (rates.step_s, rates.cost_per_hour_usd) == (0.5, pytest.approx(3.6))


def test_an_idle_plan_predicts_its_cost_and_no_rate() -> None:
    rates = predicted_rates(replace(IDLE_ESTIMATE, cost_usd_per_s=0.001), Clock())
    assert (rates.step_s, rates.samples_per_s, rates.cost_per_hour_usd) == (None, None, 3.6)


def test_a_group_takes_the_compute_time_of_its_busiest_device() -> None:
    assert group_step_s(slot()) == (pytest.approx(0.4), pytest.approx(0.9))
    assert group_step_s(slot(reports=())) == ()


def test_bubbles_are_device_time_in_steps_without_compute() -> None:
    assert bubble_ratio(slot()) == pytest.approx(1 - (0.2 + 0.4 + 0.9) / 3)
    assert bubble_ratio(slot(reports=())) is None


def test_a_slot_prolonged_adds_up() -> None:
    whole = slot().then(slot(from_s=10.0, to_s=12.0, lost=("gpu-2",)))
    assert (whole.elapsed_s, whole.bill_usd, len(whole.steps)) == (12.0, 0.04, 6)
    assert whole.lost == ("gpu-2",)


def test_devices_are_shown_as_used_idle_and_lost() -> None:
    plan = make_plan(make_group([A], [0, 4], [8]))
    rest = make_cluster([A, B], price_usd_per_s=0.001)
    views = device_views(rest, plan, slot(lost=("gpu-2",)), ["gpu-0"], Clock())
    assert [(v.device_id, v.state, v.straggler) for v in views] == [
        ("gpu-0", "used", True), ("gpu-1", "idle", False), ("gpu-2", "lost", False),
    ]  # fmt: skip
    assert views[0].price_per_hour == pytest.approx(3.6)


def test_a_device_is_utilized_while_it_computes_of_the_time_that_it_is_held() -> None:
    usage = (Usage("gpu-0", 0.0, 1.0), Usage("gpu-0", 4.0, 9.0), Usage("gpu-1", 0.0, 1.0),
             Usage("gpu-3", 0.0, 10.0), Usage("gpu-4", 10.0, 10.0))  # fmt: skip
    ratios = utilization_ratios(slot(usage=usage))
    assert ratios == {
        "gpu-0": pytest.approx(3 * 0.2 / 6.0),
        "gpu-1": 1.0,  # its first step began in the slot before
        "gpu-3": 0.0,  # held, and it computed nothing
    }
    views = device_views(CLUSTER, PLAN, slot(usage=usage), (), Clock())
    assert [v.utilization_ratio for v in views] == [ratios["gpu-0"], 1.0, None]
    assert [v.memory_bytes for v in views] == [A.memory_bytes] * 3
    twice = slot(usage=usage[:1]).then(slot(usage=usage[1:2], reports=()))
    assert utilization_ratios(twice) == {"gpu-0": ratios["gpu-0"]}


def test_time_of_a_slots_steps_is_split_by_device_into_its_own_and_that_of_others() -> None:
    """marin-community/marin#7681: least, median and most; steps of the plan before are not its."""
    waits = (0.1, 0.2, 0.9)
    reports = tuple(
        replace(report("gpu-0", 0, 0.2 * (k + 1), k), receive_s=s, reduce_s=0.1, data_s=0.01)
        for k, s in enumerate(waits)
    )
    before = replace(reports[0], generation=0, compute_s=50.0)
    spreads = step_spreads(slot(reports=(before, *reports)))
    assert set(spreads) == {"gpu-0"}
    assert spreads["gpu-0"].compute == Spread(0.2, 0.4, pytest.approx(0.6))
    assert spreads["gpu-0"].wait == Spread(0.2, pytest.approx(0.3), 1.0)
    assert spreads["gpu-0"].input == Spread(0.01, 0.01, 0.01)


def test_every_event_of_the_cluster_is_written_with_its_device() -> None:
    written = Scribe(60.0, 3).cluster_events(
        [
            DeviceJoined(A),
            DeviceLost("gpu-1", "its process was killed"),
            PreemptionNotice("gpu-2", 90.0),
            WorkerFailed("gpu-0", 7, "out of memory"),
        ]
    )
    assert [(e.kind, e.device) for e in written] == [
        ("joined", "gpu-0"), ("lost", "gpu-1"), ("notice", "gpu-2"), ("failed", "gpu-0"),
    ]  # fmt: skip
    assert {(e.time_s, e.slot) for e in written} == {(60.0, 3)}
    assert written[3].detail == "step 7: out of memory"


def test_a_straggler_is_written_when_found_when_lasting_and_when_over() -> None:
    scribe, slow = Scribe(0.0, 0), Straggler("gpu-0", "compute", 2.5)
    found = scribe.stragglers((), (slow,), (), CLUSTER)
    assert [(e.kind, e.detail) for e in found] == [
        ("straggler", "computes 2.5x slower than predicted for it")
    ]
    lasting = scribe.stragglers((slow,), (replace(slow, lasting=True),), (), CLUSTER)
    assert [e.detail for e in lasting] == ["lasting: still 2.5x slower than predicted"]
    over = scribe.stragglers((slow,), (), (), CLUSTER)
    assert [(e.kind, e.detail) for e in over] == [("recovered", "runs as predicted again")]
    (forgotten,) = scribe.stragglers((slow,), (), (slow,), CLUSTER)
    assert forgotten.detail == "was not measured for long: counted as healthy until it is"


def test_a_straggler_is_named_with_its_phase() -> None:
    """traceml#165, #252: which device, and what of it."""
    found = (
        Straggler("gpu-0", "input", 1.5, lasting=True),
        Straggler("gpu-1", "link", 4.0, towards="node-7"),
    )
    written = Scribe(0.0, 0).stragglers((), found, (), CLUSTER)
    assert [(e.device, e.detail.split(":")[0]) for e in written] == [
        ("gpu-0", "input"), ("gpu-0", "lasting"), ("gpu-1", "link to node-7"),
    ]  # fmt: skip
    assert written[1].detail.endswith("(input)")
    assert "take 4x as long" in written[2].detail


def test_keeping_the_plan_is_no_event() -> None:
    decision = Decision("keep", PLAN, IDLE_ESTIMATE, "keep: no other plan is better")
    assert Scribe(0.0, 0).decision(decision) == []
    switched = replace(decision, kind="switch", reason="switch: x", migration=Migration((), 0.3))
    (event,) = Scribe(0.0, 0).decision(switched)
    assert (event.kind, event.detail, event.duration_s) == ("replan", "switch: x", 0.3)


def test_steps_that_changed_nothing_are_told_and_kept_for_the_end() -> None:
    step, scribe = CommittedStep(0, 1, 0, 8, step_s=1.0, ended_s=1.0), Scribe(0.0, 0)
    (event,) = scribe.skipped([replace(step, skipped=k != 1) for k in range(3)])
    assert event.kind == "skipped"
    assert event.detail == "2 of 3 steps changed nothing: the gradient was not finite"
    (event,) = scribe.skipped([replace(step, skipped=True, loss_scale=65536.0)])
    assert event.detail.endswith(
        "at a loss scale of 65536, which is halved then: in fp16 a few are usual"
    )
    assert scribe.skipped([step]) == ()
    assert all_done(10, 0) == "all 10 steps are done"
    assert all_done(10, 2) == (
        "all 10 steps are done, but 2 changed nothing: the gradient was not finite"
    )
