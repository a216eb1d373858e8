import pytest

from orchestrator.control.headway import MOST_IN_VAIN, MOST_SKIPPED, Headway
from orchestrator.core.slot import (
    ClusterEvent,
    CommittedStep,
    DeviceLost,
    Observation,
    Recovered,
    WorkerFailed,
)
from orchestrator.errors import LostWorkerError, UserCodeError

HANGS = "it did not get on with its step and was ended; it waited for samples: Task.dataset"
LOST = DeviceLost("a-0", HANGS)
IN_USE = ("a-0", "b-0")


def slot(*events: ClusterEvent, step: int = 6, checkpoint: int | None = None) -> Observation:
    return Observation(1.0, (), (), events, (), step, (), checkpoint)


def fail(headway: Headway, observation: Observation) -> None:
    for _ in range(MOST_IN_VAIN):
        headway.look(observation, IN_USE)


def test_a_run_that_fails_again_and_again_at_one_step_ends_and_says_what_happens_there() -> None:
    headway = Headway()
    for _ in range(MOST_IN_VAIN - 1):
        headway.look(slot(LOST, checkpoint=4), IN_USE)
        headway.look(slot(checkpoint=4), IN_USE)  # it goes on in between
    with pytest.raises(LostWorkerError) as caught:
        headway.look(slot(LOST, checkpoint=4), IN_USE)
    for part in ("5 times", "step 6", "a-0", "Task.dataset", "resumes at step 4"):
        assert part in str(caught.value)


def test_what_is_run_again_is_no_headway() -> None:
    again = slot(LOST, Recovered(0, "start", num_undone=6), step=0)
    with pytest.raises(LostWorkerError, match="further than step 6"):
        fail(Headway(), again)


@pytest.mark.parametrize("kept", ["steps", "checkpoints"])
def test_a_run_that_gets_on_between_its_failures_may_fail_for_ever(kept: str) -> None:
    headway = Headway()
    for n in range(10 * MOST_IN_VAIN):
        if kept == "steps":  # on replicas, or all of them run again
            again = Recovered(0, "start", num_undone=n)
            headway.look(slot(LOST, again, step=0), IN_USE)
        else:  # far behind what was reached once
            headway.look(slot(LOST, step=n, checkpoint=n), IN_USE)


def test_devices_that_come_and_go_or_are_out_of_reach_or_not_in_use_say_nothing() -> None:
    headway = Headway()
    for _ in range(2 * MOST_IN_VAIN):
        headway.look(slot(DeviceLost("a-0", "its node went", preempted=True)), IN_USE)
        headway.look(slot(DeviceLost("a-0", "lost contact with node n for 9 s")), IN_USE)
        headway.look(slot(WorkerFailed("b-0", 6, "lost contact with a-0: reset")), IN_USE)
        headway.look(slot(DeviceLost("c-0", HANGS)), IN_USE)


def test_errors_of_workers_that_live_on_count_too() -> None:
    with pytest.raises(LostWorkerError, match="device b-0 failed: RuntimeError: shapes"):
        fail(Headway(), slot(WorkerFailed("b-0", 6, "RuntimeError: shapes")))


def steps(first: int, end: int, *, skipped: bool, scale: float = 1.0) -> list[CommittedStep]:
    return [
        CommittedStep(k, 1, 8 * k, 8 * k + 8, 1.0, 1.0, skipped=skipped, loss_scale=scale)
        for k in range(first, end)
    ]


def test_a_run_that_changes_nothing_for_many_steps_ends_and_says_what_to_do() -> None:
    headway = Headway()
    headway.learn(steps(0, MOST_SKIPPED - 1, skipped=True, scale=2.0**-24))
    with pytest.raises(UserCodeError, match=r"precision: bf16 or fp32.*clip_grad_norm") as caught:
        headway.learn(steps(MOST_SKIPPED - 1, MOST_SKIPPED, skipped=True, scale=2.0**-24))
    assert f"the last {MOST_SKIPPED} steps up to step {MOST_SKIPPED - 1} " in str(caught.value)
    with pytest.raises(UserCodeError, match="samples that are not finite") as caught:
        Headway().learn(steps(0, MOST_SKIPPED, skipped=True))
    assert "fp16" not in str(caught.value)


def test_steps_that_are_run_again_are_counted_once() -> None:
    headway = Headway()
    headway.learn(steps(0, 10, skipped=False))
    for _ in range(3):  # back to a checkpoint of step 10
        headway.learn(steps(10, 9 + MOST_SKIPPED, skipped=True))
    with pytest.raises(UserCodeError, match=f"the last {MOST_SKIPPED} steps"):
        headway.learn(steps(9 + MOST_SKIPPED, 10 + MOST_SKIPPED, skipped=True))


def test_odd_steps_between_good_ones_never_end_a_run() -> None:
    headway = Headway()
    for k in range(0, 20 * MOST_SKIPPED, MOST_SKIPPED):
        headway.learn(steps(k, k + MOST_SKIPPED - 1, skipped=True))
        headway.learn(steps(k + MOST_SKIPPED - 1, k + MOST_SKIPPED, skipped=False))
