from dataclasses import replace

import pytest

from benchmarks.builders import make_device
from orchestrator.control.recovery import FailureOptions, judge, unbilled_s
from orchestrator.core.durable import ControlState
from orchestrator.core.plan import Plan
from orchestrator.core.slot import CheckpointFailed, DeviceJoined, DeviceLost, WorkerFailed
from orchestrator.errors import DeviceMemoryError, LostWorkerError, OrchestratorError, UserCodeError


def test_time_outs_are_strictly_nested_and_grow_with_the_one_knob() -> None:
    """pytorch/torchtitan#2899: one knob, a derived ladder, its order asserted."""
    ladder = FailureOptions(timeout_s=60.0).timeouts
    assert ladder.receive_s < ladder.hold_s < ladder.checkpoint_s < ladder.start_s
    assert 10 <= ladder.receive_s <= 15
    assert FailureOptions(timeout_s=120.0).timeouts.start_s == 2 * ladder.start_s


LADDER = FailureOptions(timeout_s=60.0).timeouts


def test_short_steps_are_waited_for_as_long_as_the_knob_says_however_the_load_varies() -> None:
    """learning-at-home/hivemind#676: too high, and every round waits as long as the worst."""
    assert LADDER.patience_s([0.1] * 32, 0.1) == pytest.approx(0.1 + LADDER.receive_s)
    assert LADDER.patience_s([0.1, 0.1, 2.0], 0.1) == pytest.approx(0.1 + LADDER.receive_s)


def test_who_was_slow_in_every_step_is_slow_and_not_dead() -> None:
    """learning-at-home/hivemind#676: too low, and peers are dropped that were about to come."""
    assert LADDER.patience_s([20.0, 20.2, 19.9], 1.0) >= 5 * 20.0
    calm, rough = [10.0, 10.1, 9.9], [10.0, 4.0, 16.0]
    assert LADDER.patience_s(rough, 10.0) > LADDER.patience_s(calm, 10.0)


def test_patience_is_bounded_by_the_ladder_however_long_steps_are() -> None:
    """learning-at-home/hivemind#676: the bounds are the user's."""
    assert LADDER.patience_s([300.0] * 8, 1.0) == 300.0 + LADDER.start_s
    half = FailureOptions(timeout_s=30.0).timeouts
    assert half.patience_s([0.1], 0.1) - 0.1 == (LADDER.patience_s([0.1], 0.1) - 0.1) / 2


def test_first_steps_of_a_plan_go_by_the_prediction_and_are_granted_more() -> None:
    """intelligent-machine-learning/dlrover#1727: a first step is none like the others."""
    assert LADDER.patience_s((), 0.1) == 0.1 + LADDER.hold_s
    assert LADDER.patience_s((), 20.0) >= 5 * 20.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0.0),
        ("max_failures", -2),
        ("max_preemptions", -5),
        ("max_checkpoint_failures", -2),
    ],
)
def test_impossible_failure_options_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        FailureOptions(**{name: value})  # type: ignore[arg-type]


def test_an_error_in_the_users_code_ends_the_run_with_its_own_traceback() -> None:
    events = (
        DeviceLost("b-0", "its process was killed"),
        WorkerFailed("a-0", 7, "step 7: KeyError: 'x'", "File task.py, line 3"),
    )
    with pytest.raises(UserCodeError, match="device a-0 at step 7: KeyError") as caught:
        judge(events, in_use={"a-0", "b-0"}, checkpoint_step=None)
    assert caught.value.user_traceback == "File task.py, line 3"


def test_a_device_without_memory_ends_the_run_and_says_what_was_predicted() -> None:
    events = (
        DeviceLost("b-0", "its process was killed"),
        WorkerFailed("a-0", 7, "step 7: layer 2 (up): CUDA out of memory", out_of_memory=True),
    )
    with pytest.raises(DeviceMemoryError) as caught:
        judge(
            events, in_use={"a-0", "b-0"}, survives=True, checkpoint_step=None,
            predicted_bytes={"a-0": 3 << 30},
        )  # fmt: skip
    for part in ("device a-0", "layer 2 (up): CUDA", "3 GiB were predicted", "training.microbatch"):
        assert part in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_lost_device_is_named_before_the_neighbours_that_felt_it() -> None:
    events = (
        WorkerFailed("b-0", 7, "lost contact with a-0"),
        WorkerFailed("c-0", 7, "lost contact with b-0"),
        DeviceLost("a-0", "its process was killed"),
    )
    with pytest.raises(LostWorkerError) as caught:
        judge(events, in_use={"a-0", "b-0", "c-0"}, checkpoint_step=100)
    assert str(caught.value) == (
        "device a-0 is gone: its process was killed (2 other workers stopped with it); "
        "the same command resumes at step 100"
    )


def test_the_first_error_that_is_not_lost_contact_is_the_cause() -> None:
    events = (
        WorkerFailed("b-0", 7, "lost contact with a-0"),
        WorkerFailed("a-0", 7, "out of memory"),
    )
    with pytest.raises(LostWorkerError, match="device a-0 failed at step 7: out of memory"):
        judge(events, in_use={"a-0", "b-0"}, checkpoint_step=None)


def test_an_unused_device_may_leave_and_a_new_one_may_come() -> None:
    events = (DeviceLost("c-0", "gone"), DeviceJoined(make_device("d-0")))
    judge(events, in_use={"a-0"}, checkpoint_step=None)
    with pytest.raises(LostWorkerError, match="device c-0 is gone"):
        judge(events, in_use={"a-0", "c-0"}, checkpoint_step=None)
    judge(events, in_use={"a-0", "c-0"}, survives=True, checkpoint_step=None)


def test_an_error_in_the_users_code_ends_the_run_whatever_else_it_survives() -> None:
    """ray-project/ray#50640: retries without end pay for a bug of the user's own."""
    events = (WorkerFailed("a-0", 7, "KeyError: 'x'", "File task.py, line 3"),)
    with pytest.raises(UserCodeError):
        judge(events, in_use={"a-0"}, survives=True, checkpoint_step=5)


def dead_heads_state(saved_unix_s: float | None) -> ControlState:
    return ControlState(
        slot=3, generation=1, plan=Plan(1, "1f1b"), time_s=180.0, backlog_usd=0.0,
        penalty_weight=1.0, best_ratio_samples_per_usd=1.0, spent_usd=1.0, num_ledger_entries=2,
        next_step=20, samples_committed=160, checkpoint_step=20, saved_unix_s=saved_unix_s,
    )  # fmt: skip


def test_what_a_dead_head_held_is_billed_to_the_moment_where_it_is_known_else_a_slot_at_most() -> (
    None
):
    state = dead_heads_state(1000.0)
    assert unbilled_s(state, 1070.0, slot_s=60.0, at_once=True) == 70.0
    assert unbilled_s(state, 1070.0, slot_s=60.0, at_once=False) == 60.0
    assert unbilled_s(state, 1012.0, slot_s=60.0, at_once=False) == 12.0


def test_nothing_is_owed_by_a_run_that_ended_or_never_began_or_whose_clock_went_back() -> None:
    assert unbilled_s(None, 1070.0, slot_s=60.0, at_once=True) == 0.0
    assert unbilled_s(dead_heads_state(None), 1070.0, slot_s=60.0, at_once=True) == 0.0
    assert unbilled_s(dead_heads_state(1000.0), 900.0, slot_s=60.0, at_once=True) == 0.0


def test_a_checkpoint_that_failed_is_survived_until_too_many_in_a_row_did() -> None:
    """ray-project/ray#47939, #55350: only N failures in a row end the training."""
    failed = CheckpointFailed(20, "s3://b/r/x: the bucket is gone")
    judge((failed,), in_use={"a-0"}, checkpoint_step=10)
    last = replace(failed, ends_run=True)
    with pytest.raises(OrchestratorError, match=r"s3://b/r/x: the bucket is gone; .*step 10") as e:
        judge((failed, last), in_use={"a-0"}, checkpoint_step=10)
    assert not isinstance(e.value, LostWorkerError)  # another life would not mend it
