"""Small runs of two emulated devices, a few seconds each, and what must be true of their files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, Outcome, RunEvent, SlotRecord
from orchestrator.reports.run_report import read_run
from tests.runtime.reference import train_alone
from workers.worker import WorkerSpec

TEXT = """
run: {{name: tiny, storage_path: {folder}}}
training:
  task: "{task}"
  task_args: {{num_layers: 6, width: 8}}
  global_batch: 8
  microbatch: 2
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.05}}
  checkpoint_every_steps: 10
cluster:
  source: emulated
  offers:
    - {{pool: fast, kind: a100-40, count: 1, price_per_hour: 3.0}}
    - {{pool: slow, kind: t4, count: 1, price_per_hour: 1.0, zone: z2}}
  links:
    - {{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
    - {{between: [z1, z2], latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
budget: {{average_per_hour_usd: 10, horizon_hours: 4}}
control: {{slot_s: 1.5}}
failure: {{timeout_s: 20}}
metrics: {{port: 0}}
emulation: {{billing_speedup: 60, events: [{events}]}}
"""


def config(
    folder: Path, *, task: str = "tests.runtime.models:mlp", steps: int = 30, events: str = ""
) -> RunConfig:
    return RunConfig.parse(TEXT.format(folder=folder, task=task, steps=steps, events=events))


class Watcher:
    """A view that remembers everything and may act on a step."""

    def __init__(self, on_step: Callable[[CommittedStep], None] | None = None) -> None:
        self._on_step = on_step
        self.slots: list[SlotRecord] = []
        self.events: list[RunEvent] = []

    def phase(self, text: str) -> None: ...

    def step(self, step: CommittedStep) -> None:
        if self._on_step is not None:
            self._on_step(step)

    def slot(self, record: SlotRecord) -> None:
        self.slots.append(record)

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def event(self, event: RunEvent) -> None:
        self.events.append(event)

    def close(self) -> None: ...


def once_at(step: int, act: Callable[[], None]) -> Callable[[CommittedStep], None]:
    done: list[int] = []

    def look(seen: CommittedStep) -> None:
        if seen.step >= step and not done:
            done.append(seen.step)
            act()

    return look


def read(run: RunConfig, name: str) -> list[dict[str, float]]:
    text = (Path(run.run.run_url) / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def losses_alone(run: RunConfig) -> list[float]:
    """Of one process that trains the same task on whole batches."""
    training = run.training
    spec = WorkerSpec(
        task=training.task,
        task_args=training.task_args,
        options=training,
        seed=run.run.seed,
        run_url=run.run.run_url,
    )
    return train_alone(spec, training.steps or 0)[1]


def check_books(run: RunConfig, outcome: Outcome) -> None:
    """Every step once, every dollar in the ledger."""
    steps, ledger = read(run, "steps.jsonl"), read(run, "ledger.jsonl")
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert [row["first_sample"] for row in steps] == [8 * row["step"] for row in steps]
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert (result["status"], result["steps"]) == (outcome.status, len(steps))
    assert result["spent_usd"] == pytest.approx(sum(row["usd"] for row in ledger), abs=1e-9)
    assert read_run(run.run.run_url).warnings == ()


def check_undisturbed(run: RunConfig, outcome: Outcome) -> None:
    """It finished with sound books, and with the losses of one process."""
    assert outcome.status == "finished"
    check_books(run, outcome)
    losses = [row["loss"] for row in read(run, "steps.jsonl")]
    assert losses == pytest.approx(losses_alone(run), rel=1e-5)
