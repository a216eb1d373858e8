"""Single workers' reports become whole steps, whole checkpoints and held stretches."""

from dataclasses import replace

from orchestrator.core.durable import CheckpointFile, CheckpointPart
from orchestrator.core.slot import StepReport, Usage
from orchestrator.runtime.progress import Meter, Progress, RunClock, window_steps


def report(
    step: int, device_id: str, *, generation: int = 1, loss: float | None = None
) -> StepReport:
    return StepReport(
        generation=generation, step=step, device_id=device_id, group_index=0, num_samples=4,
        started_s=0.0, ended_s=1.0, step_s=1.0, compute_s=1.0, loss=loss,
    )  # fmt: skip


def two_workers(next_step: int = 0) -> Progress:
    progress = Progress(next_step)
    progress.expect(("a", "b"), generation=1)
    return progress


def test_a_step_counts_once_every_device_has_reported_it() -> None:
    progress = two_workers()
    progress.report(report(0, "a"))
    progress.report(report(1, "a"))
    assert (progress.next_step, progress.take()) == (0, ())
    progress.report(report(0, "b"))
    assert progress.next_step == 1
    assert [(r.step, r.device_id) for r in progress.take()] == [(0, "a"), (0, "b")]
    progress.report(report(1, "b"))
    assert [(r.step, r.device_id) for r in progress.take()] == [(1, "a"), (1, "b")]


def test_reports_of_another_generation_or_an_old_step_are_dropped() -> None:
    progress = two_workers(next_step=5)
    for device_id in ("a", "b"):
        progress.report(report(5, device_id, generation=2))
        progress.report(report(4, device_id))
    assert (progress.next_step, progress.take()) == (5, ())


def test_a_change_of_plan_keeps_whole_steps_and_forgets_half_ones() -> None:
    progress = two_workers()
    for device_id in ("a", "b"):
        progress.report(report(0, device_id))
    progress.report(report(1, "a"))
    progress.expect(("a",), generation=2)
    assert [r.step for r in progress.take()] == [0, 0]
    progress.report(report(1, "a", generation=2))
    assert [r.generation for r in progress.take()] == [2]


def test_a_step_that_all_who_are_left_applied_counts_with_the_reports_there_are() -> None:
    progress = two_workers()
    progress.report(report(0, "a"))
    progress.settle(1)
    assert progress.next_step == 1
    assert [(r.step, r.device_id) for r in progress.take()] == [(0, "a")]
    assert [len(reports) for reports in progress.fresh()] == [1]


def test_steps_behind_a_checkpoint_are_reported_anew() -> None:
    progress = two_workers()
    for _ in range(2):
        for step in range(3):
            for device_id in ("a", "b"):
                progress.report(report(step, device_id))
        assert progress.next_step == 3
        progress.rewind(1)
    assert [r.step for r in progress.take()] == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2]


FILES = tuple(CheckpointFile(i, f"layer-{i:03d}", 1, "x") for i in range(2))


def part(step: int, layers: tuple[int, ...], *, generation: int = 1) -> CheckpointPart:
    return CheckpointPart(step, generation, tuple(FILES[layer] for layer in layers))


def test_a_checkpoint_is_whole_when_all_layers_are_there_and_its_steps_committed() -> None:
    progress = two_workers()
    progress.part(part(1, (1,)))
    assert progress.whole_checkpoints(2) == ()
    progress.part(part(1, (0,)))
    assert progress.whole_checkpoints(2) == ()  # step 0 is not committed yet
    for device_id in ("a", "b"):
        progress.report(report(0, device_id))
    assert progress.whole_checkpoints(2) == (part(1, (0, 1)),)
    assert progress.whole_checkpoints(2) == ()
    progress.part(part(1, (0,)))  # told twice: by the writer, and by who waited for it
    assert progress.whole_checkpoints(1) == ()


def test_writing_a_checkpoint_takes_as_long_as_the_slowest_worker() -> None:
    progress = two_workers(next_step=3)
    progress.part(replace(part(2, (0,)), write_s=3.0))
    progress.part(replace(part(2, (1,)), write_s=1.0))
    assert [whole.write_s for whole in progress.whole_checkpoints(2)] == [3.0]
    progress.part(replace(part(3, (0, 1)), write_s=2.0))
    assert [whole.write_s for whole in progress.whole_checkpoints(2)] == [2.0]


def test_a_checkpoint_becomes_whole_though_the_plan_changes_while_it_is_written() -> None:
    progress = two_workers(next_step=3)
    progress.part(part(2, (0,)))
    progress.expect(("c",), generation=2)
    progress.part(part(2, (1,)))
    assert progress.whole_checkpoints(2) == (part(2, (0, 1)),)


def test_parts_of_steps_that_were_done_twice_are_not_mixed() -> None:
    progress = two_workers(next_step=3)
    progress.part(part(2, (0,)))
    progress.part(part(2, (1,), generation=2))
    assert progress.whole_checkpoints(2) == ()
    progress.part(part(2, (0,), generation=2))
    assert progress.whole_checkpoints(2) == (part(2, (0, 1), generation=2),)


def test_a_checkpoint_of_undone_steps_is_never_whole() -> None:
    progress = two_workers(next_step=3)
    progress.part(part(3, (0,)))
    progress.rewind(1)
    progress.part(part(3, (0, 1)))  # the old workers' last word
    progress.expect(("a",), generation=2)
    for step in (1, 2):
        progress.report(report(step, "a", generation=2))
    assert progress.next_step == 3
    assert progress.whole_checkpoints(2) == ()
    progress.part(part(3, (0, 1), generation=2))
    assert progress.whole_checkpoints(2) == (part(3, (0, 1), generation=2),)


def test_a_plan_that_goes_on_after_a_rewind_has_checkpoints_again() -> None:
    progress = two_workers(next_step=3)
    progress.rewind(1)
    progress.expect(("a", "b"), generation=1)  # every device was lost and has a new worker
    for step in (1, 2):
        for device_id in ("a", "b"):
            progress.report(report(step, device_id))
    progress.part(part(1, (0, 1)))  # what was restored is whole already
    assert progress.whole_checkpoints(2) == ()
    progress.part(part(3, (0, 1)))
    assert progress.whole_checkpoints(2) == (part(3, (0, 1)),)


def test_a_checkpoint_that_one_device_could_not_write_is_told_once_and_never_whole() -> None:
    progress = two_workers(next_step=3)
    progress.part(part(2, (0, 1)))
    for problem in ("full", "full too"):
        progress.part(CheckpointPart(2, 1, (), problem))
    assert progress.unwritten_checkpoints() == ((2, "full"),)
    assert progress.unwritten_checkpoints() == ()
    progress.part(CheckpointPart(2, 1, (), "late"))
    assert progress.unwritten_checkpoints() == ()


def test_fresh_steps_are_told_once() -> None:
    progress = two_workers()
    for device_id in ("a", "b"):
        progress.report(report(0, device_id))
    assert [len(reports) for reports in progress.fresh()] == [2]
    assert progress.fresh() == ()


def test_usage_covers_each_hold_without_gap_or_overlap() -> None:
    meter = Meter(RunClock())
    meter.hold(("a", "b"), 1.0)
    assert meter.cut(2.0) == (Usage("a", 1.0, 2.0), Usage("b", 1.0, 2.0))
    meter.hold(("b", "c"), 3.0)  # a goes, b stays, c comes
    assert meter.cut(4.0) == (Usage("a", 2.0, 3.0), Usage("b", 2.0, 4.0), Usage("c", 3.0, 4.0))
    meter.release("b", 5.0)
    meter.release("b", 6.0)
    assert meter.cut(7.0) == (Usage("b", 4.0, 5.0), Usage("c", 4.0, 7.0))
    assert meter.held == {"c"}


def test_a_window_is_two_slots_long() -> None:
    assert window_steps(slot_s=8.0, step_s=0.5) == 32
    assert window_steps(slot_s=1.0, step_s=10.0) == 4
    assert window_steps(slot_s=1.0, step_s=0.0) == 4
