"""Slow devices, loaders and links in the closed loop: named, re-balanced, dropped, used again."""

import pytest

from orchestrator.core.budget import BudgetOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.telemetry.trends import RETRY_SLOTS
from tests.simulation.closed_loop import SLOT_S, Rehearsal, rehearsal

RICH = BudgetOptions(average_per_hour_usd=100.0, horizon_hours=4)
ENDLESS = 1_000_000
"""Samples that no test uses up."""


def run_with(events: list[TraceEvent], num_slots: int, strategy: str = "joint") -> Rehearsal:
    made = rehearsal(budget=RICH, events=events, num_samples=ENDLESS, strategy=strategy)
    return made.run(max_slots=num_slots)


def changes_of_use(run: Rehearsal, device_id: str) -> list[tuple[int, bool]]:
    """Slots at whose end the device was taken into the plan, or out of it."""
    used = [device_id in record.next_plan.device_ids for record in run.records]
    before = [False, *used]
    return [(slot, now) for slot, (now, was) in enumerate(zip(used, before)) if now != was]  # noqa: B905


def replans(run: Rehearsal) -> list[int]:
    """Slots at whose end the plan changed, without the first plan."""
    return [record.slot for record in run.records[1:] if record.decision != "keep"]


def most_an_hour(slots: list[int]) -> int:
    return max((sum(first <= slot < first + 60 for slot in slots) for first in slots), default=0)


def named(run: Rehearsal, kind: str = "straggler") -> list[tuple[str, str]]:
    """Devices of events, and how their text begins."""
    return [(e.device, e.detail.split(":")[0]) for e in run.events if e.kind == kind]


def slow(
    device_id: str, from_slot: int, ratio: float, to_slot: int | None = None
) -> list[TraceEvent]:
    events = [TraceEvent(at_s=SLOT_S * from_slot, device=device_id, speed_ratio=1 / ratio)]
    if to_slot is not None:
        events.append(TraceEvent(at_s=SLOT_S * to_slot, device=device_id, speed_ratio=1.0))
    return events


def test_a_device_that_recovers_while_it_is_idle_is_used_again() -> None:
    """Megatron-LM#4662: within ``RETRY_SLOTS`` of having been dropped, with two changes in all."""
    run = run_with(slow("mid-0", 5, 10.0, to_slot=20), 45)
    (_, dropped, again) = changes_of_use(run, "mid-0")
    assert dropped[0] in (6, 7)
    assert again == (dropped[0] + RETRY_SLOTS, True)
    assert len(replans(run)) == 2
    before, after = run.records[3].predicted, run.records[-1].predicted
    assert after.step_s == pytest.approx(before.step_s, rel=0.01)


def test_a_device_that_stays_slow_is_tried_more_and_more_rarely_for_one_slot() -> None:
    run = run_with(slow("mid-0", 5, 10.0), 100)
    uses = changes_of_use(run, "mid-0")[1:]
    dropped = [slot for slot, used in uses if not used]
    tried = [slot for slot, used in uses if used]
    assert [again - out for out, again in zip(dropped, tried, strict=False)] == [
        RETRY_SLOTS,
        2 * RETRY_SLOTS,
    ]
    assert [out - again for again, out in zip(tried, dropped[1:], strict=True)] == [1, 1]
    assert most_an_hour(replans(run)) <= 4


@pytest.mark.parametrize(
    ("ratio", "keeps"), [(1.5, True), (2.5, True), (40.0, False)], ids=["1.5x", "2.5x", "40x"]
)
def test_a_slow_device_gets_less_first_and_is_dropped_last(ratio: float, keeps: bool) -> None:
    run = run_with(slow("fast-0", 3, ratio), 9)
    before, after = run.records[2].next_plan, run.records[-1].next_plan
    work = [
        sum(
            group.num_samples * len(stage.layers)
            for group in plan.groups
            for stage in group.stages
            if "fast-0" in stage.team.device_ids
        )
        for plan in (before, after)
    ]
    assert work[1] < work[0]
    assert (work[1] > 0) == keeps


@pytest.mark.parametrize(
    ("device_id", "period_s", "phase_s", "ratio"),
    [
        ("fast-0", 120.0, 0.0, 1.3),
        ("fast-0", 120.0, 0.0, 2.5),
        ("fast-0", 120.0, 30.0, 2.5),
        ("fast-0", 120.0, 17.0, 10.0),
        ("mid-0", 120.0, 0.0, 10.0),
        ("fast-0", 60.0, 30.0, 2.5),
        ("mid-0", 60.0, 0.0, 10.0),
        ("mid-0", 90.0, 17.0, 2.5),
    ],
)
def test_a_device_that_flaps_changes_the_plan_four_times_an_hour_at_most(
    device_id: str, period_s: float, phase_s: float, ratio: float
) -> None:
    """Slow every other slot, half of every slot, and out of step with slots."""
    events, at_s = [], 120.0 + phase_s
    while at_s < 64 * SLOT_S:
        events += [
            TraceEvent(at_s=at_s, device=device_id, speed_ratio=1 / ratio),
            TraceEvent(at_s=at_s + period_s / 2, device=device_id, speed_ratio=1.0),
        ]
        at_s += period_s
    run = run_with(events, 64)
    assert most_an_hour(replans(run)) <= 4


def loader(device_id: str, at_slot: int, seconds: float) -> TraceEvent:
    return TraceEvent(at_s=SLOT_S * at_slot, device=device_id, input_s_per_sample=seconds)


def test_a_slow_loader_is_named_and_blames_nobody_else() -> None:
    """traceml#165: a slow loader makes its peers wait, and slows no estimate of computing."""
    run = run_with([loader("mid-0", 3, 1.5)], 8)
    assert named(run)[0] == ("mid-0", "input")
    assert {device_id for device_id, _ in named(run)} == {"mid-0"}
    cluster = run.loop.problem().cluster
    assert {device.slowdown for device in cluster.devices} == {1.0}
    (view,) = (v for v in run.records[5].devices if v.device_id == "mid-0")
    assert (view.straggler, view.slowdown) == (True, 1.0)
    seen = {d.device_id: d.input_s_per_sample for d in cluster.devices if d.input_s_per_sample}
    assert seen == {"mid-0": pytest.approx(1.5, rel=0.05)}


def test_planning_with_a_slow_loader_is_faster_than_waiting_for_it() -> None:
    events = [loader("fast-0", 3, 1.0)]
    adaptive, stuck = run_with(events, 20), run_with(events, 20, "static")
    assert adaptive.records[-1].step > 1.3 * stuck.records[-1].step
    last = adaptive.records[-1]
    assert last.measured.step_s == pytest.approx(last.predicted.step_s, rel=0.05)


def test_a_congested_link_is_named_and_avoided_and_no_device_is() -> None:
    events = [
        TraceEvent(at_s=3 * SLOT_S, links=("z1", "z2"), bandwidth_ratio=0.01, cause="congestion")
    ]
    run, stuck = run_with(events, 20), run_with(events, 20, "static")
    assert {kind for _, kind in named(run)} == {
        "link to mid-node0", "link to slow-0-node", "link to slow-1-node", "lasting",
    }  # fmt: skip
    assert {d.slowdown for d in run.loop.problem().cluster.devices} == {1.0}
    assert all(record.stragglers == () for record in run.records)
    assert run.records[-1].step > 1.2 * stuck.records[-1].step
    # What is left out is the whole model's error: sums over the link count with it.
    last = stuck.records[-1]
    assert last.measured.step_s == pytest.approx(last.predicted.step_s, rel=0.05)
