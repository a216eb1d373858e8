"""Workers between two step boundaries. The fleet is a fake that says what it is told to say."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest

from orchestrator.control.recovery import Timeouts
from orchestrator.core.durable import CheckpointFile
from orchestrator.core.evaluation import RoundReport
from orchestrator.core.slot import DeviceLost, StepReport, WorkerFailed
from orchestrator.core.training import TrainingOptions
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.runtime.progress import Progress
from orchestrator.runtime.trouble import Loss
from orchestrator.runtime.watch import Watch

if TYPE_CHECKING:
    from orchestrator.runtime.fleet import Fleet

pytestmark = pytest.mark.runtime

BOTH = ("a-0", "b-0")


@dataclass(frozen=True)
class Said:
    reports: tuple[StepReport, ...] = ()
    rounds: tuple[RoundReport, ...] = ()
    parts: tuple[tuple[int, tuple[CheckpointFile, ...]], ...] = ()
    failure: WorkerFailed | None = None
    ended_before: int | None = None
    waits_for: str = ""


class FakeFleet:
    """Notes orders; hands out what was put into ``heard``, ``losses`` and ``silent``."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.killed: list[str] = []
        self.heard: list[tuple[str, Said]] = []
        self.losses: list[Loss] = []
        self.silent: list[Loss] = []
        self.every: tuple[str, Callable[[], Said]] | None = None  # heard each time

    def tell(self, method: str, *arguments: object, device_ids: Iterable[str]) -> None:
        self.told.append((method, *arguments, tuple(sorted(device_ids))))

    def gather(self, timeout_s: float) -> tuple[tuple[tuple[str, Said], ...], tuple[Loss, ...]]:
        heard, self.heard = tuple(self.heard), []
        if self.every is not None and self.every[0] not in self.killed:
            heard += ((self.every[0], self.every[1]()),)
        losses, self.losses = tuple(self.losses), []
        return heard, losses

    def kill_silent(self, longest_s: float) -> tuple[Loss, ...]:
        silent, self.silent = tuple(self.silent), []
        return silent

    def kill(self, device_id: str) -> None:
        self.killed.append(device_id)
        self.losses.append(Loss(device_id, "its process was killed"))


def report(step: int, device_id: str) -> StepReport:
    return StepReport(1, step, device_id, 0, 4, 0.0, 1.0, step_s=1.0, compute_s=1.0)


SHORT = Timeouts(receive_s=0.1, hold_s=0.15, checkpoint_s=0.2, start_s=0.3)
PATIENT = Timeouts(receive_s=1.0, hold_s=1.2, checkpoint_s=1.5, start_s=4.0)


def watch_of(fleet: FakeFleet, timeouts: Timeouts = PATIENT) -> Watch:
    watch = Watch(
        cast("Fleet", fleet),
        timeouts,
        slot_s=4.0,
        progress=Progress(0),
        last_step=20,
        silent_s=0.1,
    )
    watch.step_s = 1.0
    watch.progress.expect(BOTH, generation=1)
    watch.go(BOTH)
    return watch


def test_workers_run_in_a_window_of_two_slots_which_moves_along() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    assert fleet.told == [("run", 8, 5.0, BOTH)]
    fleet.heard = [(d, Said(reports=tuple(report(s, d) for s in range(3)))) for d in BOTH]
    watch.pump(0.0)
    assert len(fleet.told) == 1  # more than half the window is left
    fleet.heard = [(d, Said(reports=tuple(report(s, d) for s in range(3, 6)))) for d in BOTH]
    watch.pump(0.0)
    assert fleet.told[1:] == [("extend", 14, 5.0, BOTH)]


def test_the_window_ends_with_the_run() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    fleet.heard = [(d, Said(reports=tuple(report(s, d) for s in range(20)))) for d in BOTH]
    fleet.heard += [(d, Said(ended_before=20)) for d in BOTH]
    watch.pump(0.0)
    assert watch.finished
    assert not watch.running
    watch.go(BOTH)
    assert fleet.told == [("run", 8, 5.0, BOTH)]


def test_standing_waits_until_all_have_stopped_at_the_same_step() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    fleet.heard = [(d, Said(reports=(report(0, d),), ended_before=1)) for d in BOTH]
    assert watch.stand() == ()
    assert fleet.told[1:] == [("hold", BOTH)]
    assert watch.progress.next_step == 1


def test_whoever_reaches_no_boundary_in_time_is_ended_and_named() -> None:
    """ray-project/ray#58229: a call that one rank leaves out is a deadlock that names nobody."""
    fleet = FakeFleet()
    watch = watch_of(fleet, SHORT)
    watch.step_s = 0.0
    fleet.heard = [("a-0", Said(ended_before=0))]
    (lost,) = watch.stand()
    assert isinstance(lost, DeviceLost)
    assert lost.device_id == "b-0"
    assert fleet.killed == ["b-0"]
    assert not watch.running


def test_who_makes_steps_but_never_stands_is_ended_and_named() -> None:
    """ray-project/ray#58229: whatever keeps it from the boundary, the others do not wait on."""
    fleet = FakeFleet()
    watch = watch_of(fleet, SHORT)
    watch.progress.expect(["b-0"], generation=1)
    fleet.heard = [("a-0", Said(ended_before=0))]
    fleet.every = ("b-0", lambda: Said(reports=(report(watch.progress.next_step, "b-0"),)))
    (lost,) = watch.stand()
    assert isinstance(lost, DeviceLost)
    assert "b-0: it reached no step boundary" in f"{lost.device_id}: {lost.reason}"


def test_a_loss_explains_its_neighbours_lost_contact() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    lost_contact = WorkerFailed("b-0", 3, "lost contact with a-0: reset")
    fleet.heard = [("b-0", Said(failure=lost_contact))]
    watch.pump(0.0)
    fleet.losses = [Loss("a-0", "its process was killed")]
    assert watch.events() == (
        DeviceLost("a-0", "its process was killed (step 3)"),
        lost_contact,
    )
    assert [loss.device_id for loss in watch.lost()] == ["a-0"]


def test_a_worker_that_others_waited_for_in_vain_is_ended_and_named() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    waited = WorkerFailed("b-0", 3, "TimeoutError: nothing came from rank 0")
    fleet.heard = [("b-0", Said(failure=waited))]
    watch.pump(0.0)
    first, second = watch.events()
    assert isinstance(first, DeviceLost)
    assert first.device_id == "a-0"
    assert second == waited
    assert fleet.killed == ["a-0"]
    watch.pump(0.0)  # Ray tells of the same end
    assert watch.events() == ()


def test_a_lone_worker_that_finishes_no_step_is_ended() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet, SHORT)
    watch.step_s = 0.0
    while not (events := watch.events()):
        watch.pump(0.0)
    assert [e.device_id for e in events if isinstance(e, DeviceLost)] == list(BOTH)
    assert "finished no step" in events[0].reason


def test_how_long_a_step_may_take_follows_the_steps_that_came_and_starts_anew_with_a_plan() -> None:
    """learning-at-home/hivemind#676: a constant is wrong both ways; the arrivals are known."""
    fleet = FakeFleet()
    watch = watch_of(fleet)
    watch.step_s = 0.01  # what was promised
    steps = tuple(replace(report(s, d), step_s=0.2) for s in range(20) for d in BOTH)
    fleet.heard = [(d, Said(tuple(r for r in steps if r.device_id == d))) for d in BOTH]
    assert watch.patience_s == pytest.approx(0.01 + PATIENT.hold_s)
    watch.pump(0.0)
    assert watch.patience_s == pytest.approx(0.2 + PATIENT.receive_s)
    assert fleet.told[-1][:1] + fleet.told[-1][2:] == ("extend", watch.patience_s, BOTH)
    watch.progress.expect(BOTH, generation=2)
    assert watch.patience_s == pytest.approx(0.01 + PATIENT.hold_s)


def test_a_step_under_way_goes_by_the_patience_it_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head must outlast whoever waits in it: it would end all, and not the one that is late."""
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    fleet = FakeFleet()
    watch = watch_of(fleet)
    watch.step_s = 0.0

    def step(number: int) -> None:
        fleet.heard = [(d, Said((replace(report(number, d), step_s=0.1),))) for d in BOTH]
        watch.pump(0.0)

    granted_s = fleet.told[0][2]  # for the second step, too: it had begun when the first was heard
    assert granted_s == pytest.approx(1.0 + PATIENT.start_s)
    step(0)
    assert fleet.told[-1][0] == "extend"
    assert fleet.told[-1][2] == pytest.approx(0.1 + PATIENT.receive_s)
    now_s[0] = granted_s + PATIENT.receive_s - 0.1
    assert watch.events() == ()
    step(1)
    now_s[0] += 0.1 + 2 * PATIENT.receive_s + 0.1  # the third goes by what was told since
    assert {event.device_id for event in watch.events() if isinstance(event, DeviceLost)} == {*BOTH}


def test_time_between_plans_is_no_part_of_a_step() -> None:
    """intelligent-machine-learning/dlrover#1727: what passed between two steps raised an alarm."""
    fleet = FakeFleet()
    watch = watch_of(fleet, SHORT)
    watch.step_s = 0.0
    fleet.heard = [(d, Said(ended_before=0)) for d in BOTH]
    assert watch.stand() == ()
    time.sleep(2 * (watch.patience_s + SHORT.receive_s))  # a checkpoint, moves, measuring, thinking
    assert watch.events() == ()
    watch.go(BOTH)
    assert watch.events() == ()
    assert fleet.killed == []


def test_a_round_of_an_evaluation_is_a_sign_of_life_and_may_take_longer_than_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """intelligent-machine-learning/dlrover#1727: a hang alarm during evaluation."""
    fleet, now_s = FakeFleet(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    watch = watch_of(fleet)
    training = TrainingOptions(task="m:t", global_batch=4, steps=20, eval_every_steps=1)
    watch.progress.evaluations = Evaluations(training, num_steps=20, num_samples=8)
    watch.progress.expect(BOTH, generation=1)
    fleet.heard = [(d, Said(reports=(report(0, d),))) for d in BOTH]
    watch.pump(0.0)
    assert watch.progress.owes_evaluation
    longest_s = watch.patience_s + PATIENT.receive_s + PATIENT.checkpoint_s
    for device_id in BOTH:  # the round is whole with the second one
        now_s[0] += 0.5 * longest_s
        fleet.heard = [(device_id, Said(rounds=(RoundReport(1, 1, 0, device_id, 0.5),)))]
        watch.pump(0.0)
        assert watch.events() == ()
    now_s[0] += 0.9 * longest_s
    assert watch.events() == ()
    now_s[0] += 0.2 * longest_s  # too long even for a round
    assert {type(event) for event in watch.events()} == {DeviceLost}


def test_the_run_is_not_finished_before_its_last_evaluation() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    training = TrainingOptions(task="m:t", global_batch=4, steps=20, eval_every_steps=100)
    watch.progress.evaluations = Evaluations(training, num_steps=20, num_samples=4)
    watch.progress.expect(BOTH, generation=1)
    fleet.heard = [(d, Said(reports=tuple(report(s, d) for s in range(20)))) for d in BOTH]
    fleet.heard += [(d, Said(ended_before=20)) for d in BOTH]  # asked to hold behind the last step
    watch.pump(0.0)
    assert not watch.finished
    watch.go(BOTH)
    assert fleet.told[-1][:2] == ("run", 20)
    fleet.heard = [
        (d, Said(rounds=(RoundReport(1, 20, 0, d, 0.5),), ended_before=20)) for d in BOTH
    ]
    watch.pump(0.0)
    assert watch.finished


def test_whoever_is_ended_while_it_waits_for_samples_is_said_to() -> None:
    fleet = FakeFleet()
    watch = watch_of(fleet)
    fleet.heard = [("a-0", Said(waits_for="")), ("b-0", Said(waits_for="Task.dataset"))]
    watch.pump(0.0)
    fleet.silent = [Loss(d, "it answered nothing for 9 s and was ended") for d in BOTH]
    a, b = watch.events()
    assert isinstance(a, DeviceLost)
    assert isinstance(b, DeviceLost)
    assert "samples" not in a.reason
    assert b.reason.startswith(
        "it answered nothing for 9 s and was ended; it waited for samples: Task.dataset"
    )
