"""How often a run survives the loss of devices: what fails and what is taken away are apart."""

from collections.abc import Sequence

import pytest

from benchmarks.builders import make_cluster, make_device, make_plan, make_profile
from orchestrator.control.books import Books, LoopOptions
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    ClusterEvent,
    Decision,
    DeviceLost,
    Observation,
    WorkerFailed,
)
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.lyapunov import ControlOptions

IN_USE = ("a-0", "b-0")
TAKEN = DeviceLost("a-0", "its node went", preempted=True)
BROKEN = DeviceLost("b-0", "its process was killed")


def books(*, max_failures: int = -1, max_preemptions: int = -1) -> Books:
    return Books(
        options=LoopOptions(
            training=TrainingOptions(task="m:t", global_batch=4, steps=10),
            budget=BudgetOptions(average_per_hour_usd=1.0),
            control=ControlOptions(),
            num_steps=10,
            num_samples=40,
            max_failures=max_failures,
            max_preemptions=max_preemptions,
        ),
        cluster=make_cluster([make_device(d) for d in IN_USE]),
        model=make_profile(),
    )


def test_preemptions_use_none_of_the_failures() -> None:
    """ray-project/ray#41285: three preemptions use up max_failures=3."""
    found = books(max_failures=1)
    assert all(found.survives([TAKEN], IN_USE) for _ in range(20))
    assert (found.num_failures, found.num_preemptions) == (0, 20)
    assert found.survives([BROKEN], IN_USE)
    assert not found.survives([BROKEN], IN_USE)
    assert (found.num_failures, found.num_preemptions) == (1, 20)


def test_failures_use_none_of_the_preemptions() -> None:
    """kubeflow/trainer#3316: preempted by the scheduler, the job stays dead."""
    found = books(max_failures=-1, max_preemptions=2)
    assert all(found.survives([BROKEN], IN_USE) for _ in range(20))
    assert [found.survives([TAKEN], IN_USE) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("events", "failures", "preemptions"),
    [
        ((BROKEN, DeviceLost("a-0", "killed")), 1, 0),  # of one moment: once
        ((TAKEN, BROKEN), 1, 1),  # each from its own budget
        ((DeviceLost("c-0", "killed"),), 0, 0),  # nobody used it
        ((WorkerFailed("a-0", 3, "lost contact with b-0"),), 1, 0),  # though nobody is gone
        ((BROKEN, WorkerFailed("a-0", 3, "lost contact with b-0")), 1, 0),
        ((TAKEN, WorkerFailed("b-0", 3, "lost contact with a-0")), 0, 1),
    ],
)
def test_what_happens_in_a_slot_is_counted_once_by_its_cause(
    events: Sequence[ClusterEvent], failures: int, preemptions: int
) -> None:
    found = books()
    assert found.survives(events, IN_USE)
    assert (found.num_failures, found.num_preemptions) == (failures, preemptions)


def test_an_error_of_the_users_uses_none_of_the_failures() -> None:
    """A bug that is mended and resumed, three times over, must not end the run at the next loss."""
    found = books(max_failures=1)
    users = WorkerFailed("a-0", 3, "loss raised ValueError", user_traceback="Traceback ...")
    assert not any(found.survives(events, IN_USE) for events in ([users], [users, BROKEN]))
    assert found.num_failures == 0
    assert found.survives([BROKEN], IN_USE)


def test_a_slots_journal_has_the_checkpoints_that_came_to_exist_in_it() -> None:
    manifest = CheckpointManifest(
        step=0, generation=1, files=(), num_layers=0, samples_committed=0, seed=0
    )
    found = books()
    observation = Observation(
        60.0, (), (), (), found.cluster.offers, 0, found.cluster.devices, checkpoints=(manifest,)
    )
    idle = Decision("idle", make_plan(), IDLE_ESTIMATE, "nothing ran yet")
    _, journal = found.settle(observation, idle)
    assert journal.checkpoints == (manifest,)
