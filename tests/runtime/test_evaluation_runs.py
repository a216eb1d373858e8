"""Whole runs on forked workers that evaluate: exact, recorded once, and through every fault."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.chaos import make_config
from benchmarks.forked_run import run_forked
from orchestrator.callbacks import STOP, Callback, Callbacks, TensorBoardWriter, only
from orchestrator.config import RunConfig
from orchestrator.control.faults import FaultPlan
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent
from orchestrator.errors import ConfigError, UserCodeError
from orchestrator.export import export_weights
from orchestrator.runtime.chaos import with_faults
from tests.runtime.reference import train_alone
from tests.runtime.test_evaluation import evaluated_alone
from workers.worker import WorkerSpec

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]

BASE = (
    "training.task=tests.runtime.models:judged",
    "training.task_args={num_layers: 6, width: 8}",
    "training.eval_every_steps=10",
    "training.optimizer.lr=0.01",
    "control.slot_s=0.7",
)


class Heard(Callback):
    """Remembers everything."""

    def __init__(self) -> None:
        self.evaluations: list[Evaluation] = []
        self.events: list[RunEvent] = []
        self.closed = 0

    def on_event(self, event: RunEvent) -> None:
        self.events.append(event)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def close(self) -> None:
        self.closed += 1


def config_of(folder: Path, *overrides: str, faults: FaultPlan | None = None) -> RunConfig:
    made = make_config(folder, "judged", *BASE, *overrides)
    return with_faults(made, faults) if faults else made


def result_of(run: RunConfig) -> dict[str, Any]:
    found = RunStore(run.run.run_url).read_result()
    assert found is not None
    return found


def alone(run: RunConfig, step: int) -> dict[str, float]:
    return evaluated_alone(spec_of(run), step)


def spec_of(run: RunConfig) -> WorkerSpec:
    training = run.training
    return WorkerSpec(
        task=training.task, task_args=training.task_args, options=training, seed=run.run.seed,
        run_url=run.run.run_url,
    )  # fmt: skip


def check(run: RunConfig, steps: list[int]) -> tuple[Evaluation, ...]:
    """Each evaluation is on record once, and is that of one process."""
    found = RunStore(run.run.run_url).read_evaluations()
    assert [e.step for e in found] == steps
    for evaluation in found:
        known = alone(run, evaluation.step)
        assert evaluation.loss == pytest.approx(known.pop("loss"), rel=1e-5)
        assert evaluation.metrics == pytest.approx(known, rel=1e-5)
        assert evaluation.samples == 21
    return found


def test_a_run_records_what_one_process_would_find_and_tells_it_everywhere(tmp_path: Path) -> None:
    run, heard = config_of(tmp_path, "training.steps=25"), Heard()
    outcome = run_forked(run, view=Callbacks([heard]))
    assert outcome.status == "finished"
    found = check(run, [10, 20, 25])
    assert heard.evaluations == list(found)
    best = min(found, key=lambda e: e.loss or 0.0)
    assert [e.best for e in found].count(True) >= 1
    assert result_of(run)["evaluation"]["step"] == 25
    assert result_of(run)["best_evaluation"]["step"] == best.step
    assert all(e.eval_s > 0 for e in found)


@pytest.mark.parametrize("kind", ["fail_at", "hang_at"])
def test_a_worker_that_goes_in_an_evaluation_costs_no_step_of_a_replica_and_no_record(
    tmp_path: Path, kind: str
) -> None:
    """intelligent-machine-learning/dlrover#1727: a hang alarm during evaluation."""
    faults: FaultPlan = getattr(FaultPlan(), kind)(10, "fast-0", "evaluate")
    run, heard = config_of(tmp_path, "training.steps=25", faults=faults), Heard()
    outcome = run_forked(run, view=Callbacks([heard]))
    assert outcome.status == "finished"
    assert [e.device for e in heard.events if e.kind == "lost"] == ["fast-0"]
    check(run, [10, 20, 25])
    steps = RunStore(run.run.run_url).read("steps")
    assert [row["loss"] for row in steps] == pytest.approx(
        train_alone(spec_of(run), 25)[1], rel=1e-5
    )


def test_a_worker_that_goes_in_the_last_evaluation_does_not_end_the_run_without_it(
    tmp_path: Path,
) -> None:
    faults = FaultPlan().fail_at(25, "fast-1", "evaluate")
    run = config_of(tmp_path, "training.steps=25", faults=faults)
    assert run_forked(run).status == "finished"
    check(run, [10, 20, 25])


def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path) -> None:
    run = config_of(tmp_path, "training.steps=40")

    def stop(step: CommittedStep) -> None:
        if step.step == 22:
            raise KeyError("enough")

    first = Callbacks([only("on_step", stop)])
    assert run_forked(run, view=first).status == "stopped"
    assert first.error is not None
    assert "the callback stop.on_step raised KeyError: 'enough' (at step 22)" in str(first.error)
    assert 'raise KeyError("enough")' in first.error.user_traceback
    assert run_forked(run).status == "finished"
    check(run, [10, 20, 30, 40])


def test_the_best_checkpoint_is_kept_and_exported(tmp_path: Path) -> None:
    run = config_of(
        tmp_path, "training.steps=40", "training.eval_every_steps=5", "training.keep_checkpoints=1",
        "training.keep_best={metric: near, mode: max}", "training.checkpoint_every_steps=7",
    )  # fmt: skip
    assert run_forked(run).status == "finished"
    found = check(run, list(range(5, 41, 5)))
    best = max(found, key=lambda e: e.metrics["near"] or 0.0)  # the first of equal ones
    assert best.best
    checkpoints = CheckpointStore(run.run.run_url)
    assert set(checkpoints.steps()) == {best.step, 40}
    target = str(tmp_path / "best.safetensors")
    assert export_weights(run.run.run_url, target, best=True).step == best.step
    layers, _ = train_alone(spec_of(run), best.step)
    for name, value in load_file(target).items():
        assert value.sub(layers.state_dict()[name]).abs().max() <= 1e-5


def test_a_run_that_gets_no_better_ends_finished_behind_that_evaluation(tmp_path: Path) -> None:
    run = config_of(
        tmp_path, "training.eval_every_steps=4", "training.early_stop={patience: 2, min_delta: 99}"
    )
    outcome = run_forked(run)
    assert outcome.status == "finished"
    assert outcome.reason.startswith(
        "early stop: loss was no better by more than 99 in 2 evaluations"
    )
    check(run, [4, 8, 12])  # the first is the best, whatever it is
    assert result_of(run)["steps"] == 12  # and not a step more
    assert run_forked(run).reason.startswith("was done before: early stop")
    (Path(run.run.run_url) / "result.json").unlink()  # as if it had died at that moment
    assert run_forked(run).reason == outcome.reason
    assert result_of(run)["steps"] == 12


def test_a_callback_may_end_the_run_which_is_finished_then(tmp_path: Path) -> None:
    class Enough(Heard):
        def on_evaluation(self, evaluation: Evaluation) -> object:
            super().on_evaluation(evaluation)
            return STOP

    run, enough = config_of(tmp_path, "training.steps=1000"), Enough()
    view = Callbacks([enough])
    outcome = run_forked(run, view=view)
    view.close()
    assert (outcome.status, enough.closed) == ("finished", 1)
    assert "Enough returned STOP at the evaluation of step 10" in outcome.reason
    assert CheckpointStore(run.run.run_url).steps()[-1] == result_of(run)["steps"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.keep_best={metric: nea, mode: max}", "keep_best.metric is 'nea', which"),
        ("training.task=tests.runtime.models:mlp", "the task has no eval_dataset"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_forked(config_of(tmp_path, override))


def test_what_only_the_last_evaluation_shows_is_told_and_the_steps_are_kept(tmp_path: Path) -> None:
    stop = "training.early_stop={metric: near, mode: max, patience: 2}"
    blank = "training.task_args.blank=true"
    run = config_of(tmp_path, "training.steps=10", "training.eval_every_steps=5", stop, blank)
    with pytest.raises(UserCodeError, match="near was no finite number in any evaluation"):
        run_forked(run)
    assert result_of(run)["resumable"]
    assert CheckpointStore(run.run.run_url).steps()[-1] == result_of(run)["steps"] == 10


def test_tensorboard_files_hold_every_step_and_evaluation(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, folder = config_of(tmp_path, "training.steps=15"), str(tmp_path / "tensorboard")
    view = Callbacks([TensorBoardWriter(folder)])
    assert run_forked(run, view=view).status == "finished"
    view.close()
    events = accumulator.EventAccumulator(folder)
    events.Reload()
    losses = [row["loss"] for row in RunStore(run.run.run_url).read("steps")]
    written = events.Scalars("train/loss")
    assert [(e.step, e.value) for e in written] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses)
    ]
    near = [(e.step, e.metrics["near"]) for e in RunStore(run.run.run_url).read_evaluations()]
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("eval/near")] == near
