import pytest

from benchmarks.builders import make_device
from orchestrator.control.recovery import FailureOptions, judge
from orchestrator.core.slot import DeviceJoined, DeviceLost, WorkerFailed
from orchestrator.errors import LostWorkerError, UserCodeError


def test_time_outs_are_strictly_nested_and_grow_with_the_one_knob() -> None:
    """pytorch/torchtitan#2899: one knob, a derived ladder, its order asserted."""
    ladder = FailureOptions(timeout_s=60.0).timeouts
    assert ladder.receive_s < ladder.hold_s < ladder.checkpoint_s < ladder.start_s
    assert 10 <= ladder.receive_s <= 15
    assert FailureOptions(timeout_s=120.0).timeouts.start_s == 2 * ladder.start_s


@pytest.mark.parametrize(
    ("name", "value"), [("timeout_s", 0.0), ("max_failures", -2), ("max_preemptions", -5)]
)
def test_impossible_failure_options_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        FailureOptions(**{name: value})  # type: ignore[arg-type]


def test_an_error_in_the_users_code_ends_the_run_with_its_own_traceback() -> None:
    events = (
        DeviceLost("b-0", "its process was killed"),
        WorkerFailed("a-0", 7, "KeyError: 'x'", "File task.py, line 3"),
    )
    with pytest.raises(UserCodeError, match="device a-0 at step 7: KeyError") as caught:
        judge(events, in_use={"a-0", "b-0"}, checkpoint_step=None)
    assert caught.value.user_traceback == "File task.py, line 3"


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
