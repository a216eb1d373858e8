"""Datasets as people bring them: each trains as in one process, or is refused in one message."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import ChildError, Fleet, make_plan
from orchestrator.core.slot import StepReport, WorkerFailed
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone

pytestmark = pytest.mark.runtime

FIRST = make_plan([([("a", 1), ("b", 2)], (2, 3)), ([("c", 3)], (3,))])
SECOND = make_plan([([("c", 2), ("a", 1)], (1, 4)), ([("b", 3)], (1, 2))], generation=2)
NUM_LAYERS = 3
ADAMW = {"name": "adamw", "lr": 0.01}


def spec_of(folder: Path, task: str = "task", **changes: Any) -> Any:
    options = {"global_batch": 8, "optimizer": ADAMW, "steps": 5, **changes}
    return make_spec(f"tests.runtime.datasets:{task}", str(folder), **options)


def trained(fleet: Fleet, spec: Any, num_steps: int, num_layers: int = NUM_LAYERS) -> list[float]:
    """Train under two unlike plans; the loss of each step as the last stages tell it."""
    fleet.start(spec)
    fleet.install(FIRST, first_step=0, end_step=3)
    fleet.run(FIRST)
    fleet.install(SECOND, first_step=3, end_step=num_steps)
    fleet.run(SECOND)
    reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
    fleet.save(num_steps, num_layers=num_layers)
    return [next(r.loss for r in reports if r.step == s and r.loss) for s in range(num_steps)]


def agrees(fleet: Fleet, spec: Any, num_steps: int = 5) -> None:
    losses = trained(fleet, spec, num_steps)
    alone, wanted = train_alone(spec, num_steps)
    assert losses == pytest.approx(wanted, rel=1e-12)
    saved = saved_parameters(spec.run_url, num_steps, NUM_LAYERS)
    assert largest_difference(alone, saved) <= 1e-12


@pytest.mark.parametrize(
    "dataset",
    [
        "rows", "one", "three", "list", "tensors", "subset", "concat", "columns", "arrays",
        "locked", "augmented", "threaded", "stream", "sized", "seeking",
    ],
)  # fmt: skip
def test_a_dataset_trains_as_in_one_process(fleet: Fleet, tmp_path: Path, dataset: str) -> None:
    agrees(fleet, spec_of(tmp_path, task_args={"dataset": dataset}))


@pytest.mark.parametrize("collate", ["named", "fields", "encoded"])
def test_a_batch_of_any_class_trains_as_in_one_process(
    fleet: Fleet, tmp_path: Path, collate: str
) -> None:
    agrees(fleet, spec_of(tmp_path, task_args={"collate": collate}))


@pytest.mark.parametrize("dataset", ["rows", "sized", "seeking"])
def test_epochs_end_within_a_batch_and_with_a_short_one(
    fleet: Fleet, tmp_path: Path, dataset: str
) -> None:
    """Twice 13 samples are three batches of 8 and one of 2, of which one group gets nothing."""
    changes = {"steps": None, "epochs": 2, "task_args": {"dataset": dataset}}
    agrees(fleet, spec_of(tmp_path, **changes), num_steps=4)


@pytest.mark.parametrize("dataset", ["augmented", "stream"])
def test_prefetch_changes_no_bit(fleet: Fleet, tmp_path: Path, dataset: str) -> None:
    losses = []
    for ahead in (0, 1, 50):
        changes = {"prefetch_microbatches": ahead, "task_args": {"dataset": dataset}}
        losses.append(trained(fleet, spec_of(tmp_path / str(ahead), **changes), 5))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("dataset", ["augmented", "stream", "seeking"])
def test_steps_that_are_undone_get_the_same_samples_again(
    fleet: Fleet, tmp_path: Path, dataset: str
) -> None:
    spec = spec_of(tmp_path, steps=9, task_args={"dataset": dataset})
    fleet.start(spec)
    fleet.install(FIRST, first_step=0, end_step=2)
    fleet.run(FIRST)
    manifest = fleet.save(2, num_layers=NUM_LAYERS)
    fleet.all("extend", 6)
    fleet.run(FIRST)
    fleet.all("rewind", 2)
    fleet.install(SECOND, first_step=2, end_step=9, restore=manifest)
    fleet.run(SECOND)
    fleet.save(9, num_layers=NUM_LAYERS)
    alone, _ = train_alone(spec, 9)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 9, NUM_LAYERS)) <= 1e-12


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("empty", "Task.dataset is empty; give at least one sample"),
        ("loader", "Task.dataset is a DataLoader; batches are made here: give what it loads from"),
        ("generator", "Task.dataset is a map, which can be read only once"),
    ],
)
def test_what_cannot_be_a_dataset_is_refused_before_the_first_step(
    fleet: Fleet, tmp_path: Path, dataset: str, message: str
) -> None:
    with pytest.raises(ChildError, match=f"ConfigError: training.task: {message}"):
        fleet.start(spec_of(tmp_path, task_args={"dataset": dataset}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "raises"}, "(sample 5 of 13), raised OSError: torn page"),
        ({"dataset": "lies"}, "(sample 5 of 13), raised IndexError: 5"),
        ({"dataset": "none"}, "(sample 5 of 13), raised TypeError: it returned None; return a"),
        ({"dataset": "ragged"}, "torch's default_collate (Task.collate replaces it), of the"),
        ({"collate": "fails"}, "Task.collate, of the samples at positions"),
    ],
)
def test_what_fails_is_told_once_by_each_that_met_it_with_the_step_that_needs_it(
    tmp_path: Path, arguments: dict[str, str], message: str
) -> None:
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec_of(tmp_path, task_args=arguments, check=False))
        fleet.install(FIRST, first_step=0, end_step=5)
        ends = fleet.all("run")
        news = [item for items in fleet.news() for item in items]
    failed = [item for item in news if isinstance(item, WorkerFailed)]
    assert {end.reason for end in ends} == {"failed"}
    assert len(failed) == 3
    blamed = [failure for failure in failed if failure.user_traceback]
    assert blamed
    for failure in blamed:
        assert message in failure.message
        assert failure.message.startswith(f"step {failure.step}: ")
    for failure in failed:
        assert failure.user_traceback or "lost contact with" in failure.message


def test_a_device_that_sees_another_dataset_than_the_others_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    with pytest.raises(ChildError, match=r"has 13 samples on \w, but 14 on the others; every devi"):
        fleet.start(spec_of(tmp_path, dataset_samples=14))


def test_only_the_first_and_the_last_stage_read_samples(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(spec_of(tmp_path, task_args={"dataset": "raises"}))
    chain = make_plan([([(device, 1) for device in "abc"], (4, 4))])
    fleet.install(chain, first_step=0, end_step=1)
    held = fleet.all("ask", _has_feed)
    assert held == [True, False, True]


def _has_feed(worker: Any) -> bool:
    return worker._runner.executor.feed is not None
