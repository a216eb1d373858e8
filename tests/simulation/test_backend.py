from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_profile
from orchestrator.core.plan import Migration, Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Decision, DeviceLost, PreemptionNotice
from orchestrator.core.training import TrainingOptions
from orchestrator.simulation.backend import SimulatedBackend, SimulationOptions
from orchestrator.simulation.traces import TraceEvent

A, B = make_device("a-0"), make_device("b-0")
TRAINING = TrainingOptions(task="t:t", global_batch=4, microbatch=1, steps=1000)
ALONE = make_plan(make_group([A], [0, 4], [1] * 4))  # 4 x 4 layers x 30 ms = 0.48 s a step
OTHER = make_plan(make_group([B], [0, 4], [1] * 4), generation=2)
IDLE = Plan(3, "1f1b")


def backend_of(
    events: Sequence[TraceEvent] = (), *, num_samples: int = 4000, slot_s: float = 10.0
) -> SimulatedBackend:
    return SimulatedBackend(
        make_cluster([A, B]),
        make_profile(),
        TRAINING,
        SimulationOptions(slot_s=slot_s, num_samples=num_samples),
        events,
    )


def run(plan: Plan, *, pause_s: float = 0.0, run_until_s: float | None = None) -> Decision:
    return Decision(
        "switch", plan, IDLE_ESTIMATE, "switch: test", Migration((), pause_s), run_until_s
    )


def test_observe_returns_at_once_before_anything_was_applied() -> None:
    backend = backend_of()
    seen = backend.observe()
    assert (seen.now_s, seen.next_step, seen.reports, seen.usage) == (0.0, 0, (), ())
    assert [d.slowdown for d in seen.devices] == [1.0, 1.0]


def test_the_step_under_way_at_the_end_of_a_slot_goes_on_in_the_next() -> None:
    backend = backend_of()
    backend.apply(run(ALONE))
    first, second = backend.observe(), backend.observe()
    assert (first.now_s, first.next_step) == (10.0, 20)  # 10 / 0.48 = 20.8
    assert (second.now_s, second.next_step) == (20.0, 41)
    assert [r.step for r in first.reports + second.reports] == list(range(41))
    assert second.reports[0].started_s == pytest.approx(20 * 0.48)
    assert [r.compute_s for r in first.reports] == [pytest.approx(0.48)] * 20


def test_held_devices_are_used_without_gaps() -> None:
    backend = backend_of()
    backend.apply(run(ALONE))
    stretches = [u for _ in range(3) for u in backend.observe().usage]
    assert [(u.from_s, u.to_s) for u in stretches] == [(0, 10), (10, 20), (20, 30)]


def test_another_plan_starts_after_the_step_under_way_and_the_pause() -> None:
    backend = backend_of()
    backend.apply(run(ALONE))
    backend.observe()
    backend.apply(run(OTHER, pause_s=2.0))
    seen = backend.observe()
    assert [r.generation for r in seen.reports[:2]] == [1, 2]
    assert seen.reports[0].ended_s == pytest.approx(21 * 0.48)
    assert seen.reports[1].started_s == pytest.approx(12.0)
    held = {u.device_id: (u.from_s, u.to_s) for u in seen.usage}
    assert held == {"a-0": (10.0, pytest.approx(12.0)), "b-0": (10.0, 20.0)}


def test_idling_releases_devices_at_the_end_of_the_step_under_way() -> None:
    backend = backend_of()
    backend.apply(run(ALONE))
    backend.observe()
    backend.apply(run(IDLE))
    seen = backend.observe()
    assert (seen.now_s, seen.next_step) == (20.0, 21)
    (used,) = seen.usage
    assert used.to_s == pytest.approx(21 * 0.48)
    assert backend.observe().usage == ()


def test_no_step_starts_that_would_end_after_run_until() -> None:
    backend = backend_of()
    backend.apply(run(ALONE, run_until_s=1.0))
    seen = backend.observe()
    assert (seen.next_step, seen.now_s) == (2, pytest.approx(0.96))


def test_a_slow_down_counts_from_the_next_step() -> None:
    backend = backend_of([TraceEvent(at_step=10, device="a-0", speed_ratio=0.5)])
    backend.apply(run(ALONE))
    reports = backend.observe().reports
    assert [r.step_s for r in reports[:12]] == [pytest.approx(0.48)] * 10 + [
        pytest.approx(0.96)
    ] * 2


def test_congested_links_count_from_the_next_step() -> None:
    chain = make_plan(make_group([A, B], [0, 2, 4], [1] * 4))
    narrowed = TraceEvent(at_step=4, links=("all",), bandwidth_ratio=0.001)
    options = SimulationOptions(slot_s=10.0, num_samples=4000)
    profile = make_profile(boundary_bytes=1e6)
    backend = SimulatedBackend(make_cluster([A, B]), profile, TRAINING, options, [narrowed])
    backend.apply(run(chain))
    step_s = [r.step_s for r in backend.observe().reports if r.device_id == "a-0"]
    assert len(set(step_s[:4])) == 1
    assert min(step_s[4:]) > step_s[0]


def test_a_new_price_ends_the_slot() -> None:
    backend = backend_of([TraceEvent(at_s=3.3, pool="a", price_usd_per_s=0.5)])
    backend.apply(run(ALONE))
    seen = backend.observe()
    assert seen.now_s == 3.3
    assert [o.price_usd_per_s for o in seen.offers if o.pool == "a"] == [0.5]
    assert backend.observe().now_s == pytest.approx(13.3)


def test_a_loss_ends_the_slot_and_the_step_under_way_never_happened() -> None:
    backend = backend_of([TraceEvent(at_s=1.0, device="a-0", lost=True)])
    backend.apply(run(ALONE))
    seen = backend.observe()
    assert [e.device_id for e in seen.events if isinstance(e, DeviceLost)] == ["a-0"]
    assert (seen.now_s, seen.next_step) == (1.0, 2)
    assert [d.device_id for d in seen.devices] == ["b-0"]
    (used,) = seen.usage
    assert used.to_s == 1.0


def test_the_last_step_may_be_short_and_nothing_follows_it() -> None:
    backend = backend_of(num_samples=10)
    backend.apply(run(ALONE))
    seen = backend.observe()
    assert [r.num_samples for r in seen.reports] == [4, 4, 2]
    assert seen.next_step == 3
    assert seen.now_s == pytest.approx(2.5 * 0.48)
    assert backend.observe().now_s == seen.now_s


def test_a_group_without_samples_in_the_last_step_still_reports_it() -> None:
    plan = make_plan(make_group([A], [0, 4], [1, 1]), make_group([B], [0, 4], [1, 1]))
    backend = backend_of(num_samples=5)
    backend.apply(run(plan))
    last = [r for r in backend.observe().reports if r.step == 1]
    assert [(r.device_id, r.num_samples, r.compute_s > 0) for r in last] == [
        ("a-0", 1, True), ("b-0", 0, False),
    ]  # fmt: skip


def test_a_checkpoint_finishes_the_step_under_way_and_the_rest_is_told_at_once() -> None:
    backend = backend_of()
    assert backend.checkpoint() is None
    backend.apply(run(ALONE))
    backend.observe()
    manifest = backend.checkpoint()
    assert manifest is not None
    assert (manifest.step, manifest.samples_committed, manifest.generation) == (21, 84, 1)
    rest = backend.observe()
    assert (rest.now_s, rest.next_step) == (pytest.approx(21 * 0.48), 21)
    assert [r.step for r in rest.reports] == [20]
    assert backend.observe().now_s == rest.now_s


def test_work_resumes_with_apply_after_a_checkpoint() -> None:
    backend = backend_of()
    backend.apply(run(ALONE))
    backend.observe()
    backend.checkpoint()
    backend.observe()
    backend.apply(replace(run(ALONE), kind="keep"))
    seen = backend.observe()
    assert seen.reports[0].step == 21
    assert seen.now_s == pytest.approx(21 * 0.48 + 10.0)


def test_steps_since_the_checkpoint_are_done_again_when_their_only_copy_is_lost() -> None:
    """20 steps of 0.48 s on A are gone at 10 s; B does them again before its first new one."""
    backend = backend_of([TraceEvent(at_s=10.0, device="a-0", lost=True)])
    backend.apply(run(ALONE))
    assert backend.observe().next_step == 20
    backend.apply(run(OTHER, pause_s=2.0))
    reports = [r for _ in range(2) for r in backend.observe().reports]
    assert reports[0].step == 20
    assert reports[0].started_s == pytest.approx(10.0 + 2.0 + 20 * 0.48)
    assert backend.num_redone == 20


def test_nothing_is_done_again_where_another_group_holds_the_layers() -> None:
    both = make_plan(make_group([A], [0, 4], [1, 1]), make_group([B], [0, 4], [1, 1]))
    backend = backend_of([TraceEvent(at_s=10.0, device="a-0", lost=True)])
    backend.apply(run(both))
    step = backend.observe().next_step
    backend.apply(run(OTHER, pause_s=2.0))
    seen = backend.observe()
    assert (seen.reports[0].step, seen.reports[0].started_s) == (step, 12.0)
    assert backend.num_redone == 0


def test_a_device_under_notice_is_left_before_it_goes_and_nothing_is_done_again() -> None:
    """ray-project/ray#63968: up to a checkpoint's interval was lost in spite of notice."""
    backend = backend_of([TraceEvent(at_s=3.0, device="a-0", notice_s=2.0)])
    backend.apply(run(ALONE))
    seen = backend.observe()
    assert (seen.now_s, seen.events) == (3.0, (PreemptionNotice("a-0", 5.0),))
    assert seen.leaving == {"a-0"}
    assert [d.device_id for d in seen.devices] == ["a-0", "b-0"]  # still a source of layers
    backend.apply(run(OTHER, pause_s=0.5))
    seen = backend.observe()
    assert seen.now_s == 5.0
    assert seen.events == (DeviceLost("a-0", "it left the simulated cluster", preempted=True),)
    assert seen.leaving == frozenset()
    backend.apply(replace(run(OTHER), kind="keep"))
    steps = [r.step for r in (*seen.reports, *backend.observe().reports)]
    assert steps == list(range(6, 6 + len(steps)))  # the seventh was under way at 3 s
    assert backend.num_redone == 0


def test_a_notice_shorter_than_the_step_under_way_does_not_save_it() -> None:
    """ray-project/ray#63968: the steps since the checkpoint are done again, before new ones."""
    backend = backend_of([TraceEvent(at_s=3.0, device="a-0", notice_s=0.1)])
    backend.apply(run(ALONE))
    backend.observe()
    backend.apply(run(OTHER))
    backend.observe()
    backend.apply(replace(run(OTHER), kind="keep"))
    seen = backend.observe()
    assert backend.num_redone == 6
    assert (seen.reports[0].step, seen.reports[0].started_s) == (6, pytest.approx(3.1 + 6 * 0.48))


def test_notices_that_overlap_are_told_one_by_one_and_the_first_deadline_stays() -> None:
    """ray-project/ray#66225: two notices at a time, and one that comes again."""
    backend = backend_of([
        TraceEvent(at_s=1.0, device="a-0", notice_s=9.0),
        TraceEvent(at_s=2.0, device="b-0", notice_s=5.0),
        TraceEvent(at_s=3.0, pool="a", notice_s=60.0),
    ])  # fmt: skip
    backend.apply(run(IDLE))
    told = [e for _ in range(4) for e in backend.observe().events]
    assert told == [
        PreemptionNotice("a-0", 10.0),
        PreemptionNotice("b-0", 7.0),
        DeviceLost("b-0", "it left the simulated cluster", preempted=True),
        DeviceLost("a-0", "it left the simulated cluster", preempted=True),
    ]
