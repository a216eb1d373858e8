"""How long workers wait for samples in the examples, with prefetch and without.

Each example is trained as a pipeline of all its devices, as slow as its emulation makes them: the
real work takes ``CPU_SHARE`` of this machine's cores. The waits are real, by the wall clock. Two
further rows say how it is where samples take time to read, and where two workers compute as
fast as they can, so that nothing but a spare core could hide what loading takes.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.fleet import Fleet, make_plan
from benchmarks.result import Figure, Result, main
from orchestrator.config import RunConfig
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import StepReport
from orchestrator.core.training import Task, TrainingOptions
from workers.emulation import EmulatedStage
from workers.profiler import profile_model
from workers.splitting import load_task, split
from workers.worker import Worker, WorkerSpec

EXAMPLES = ("byte_gpt", "digits_cnn")
FOLDER = Path(__file__).parents[1] / "examples"
CPU_SHARE = 0.45
"""As emulation.time_scale: auto has it."""

READ_S = 0.0002
"""Of one sample of the dataset that takes time to read."""


class _Slow:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)
        return self._dataset[index]


def slow(task: str, **arguments: Any) -> Task:
    """An example whose samples take ``READ_S`` each to read."""
    found = load_task(task, arguments, seed=0)
    return replace(found, dataset=_Slow(found.dataset))


@dataclass(frozen=True, slots=True)
class Case:
    """A pipeline of some devices, emulated or as fast as they are."""

    training: TrainingOptions
    plan: Plan
    emulation: Mapping[str, EmulatedStage] | None


def case_of(training: TrainingOptions, profile: ModelProfile, count: int, *, fast: bool) -> Case:
    """Equal shares of the layers on ``count`` devices."""
    num_layers = len(profile.layers)
    bounds = [num_layers * s // count for s in range(count + 1)]
    devices = [f"device-{s}" for s in range(count)]
    full, rest = divmod(training.global_batch, training.microbatch)
    sizes = [training.microbatch] * full + [rest] * bool(rest)
    chain = [(d, bounds[s + 1] - bounds[s]) for s, d in enumerate(devices)]
    plan = make_plan([(chain, sizes)])
    if fast:
        return Case(training, plan, None)
    cores = len(os.sched_getaffinity(0))
    scale = max(1.0, count / (CPU_SHARE * cores))
    emulation = {}
    for s, device in enumerate(devices):
        layers = slice(bounds[s], bounds[s + 1])
        seconds = {
            size: (scale * sum(times.forward_s[layers]), scale * sum(times.backward_s[layers]))
            for times in profile.times
            if (size := times.microbatch) in sizes
        }
        link = (1e-4, 3e9)
        emulation[device] = EmulatedStage(
            seconds=seconds,
            to_next=link if s < count - 1 else None,
            to_previous=link if s else None,
        )
    return Case(training, plan, emulation)


def waited_s(worker: Worker) -> float:
    """How long a worker waited for samples so far."""
    feed = worker._runner.executor.feed if worker._runner else None
    return feed.waited_s if feed else 0.0


def measure(case: Case, task: str, arguments: Mapping[str, Any], seed: int) -> tuple[float, float]:
    """Run, and return a step's length in s and the share of it that the worst worker waits."""
    devices, num_steps = case.plan.device_ids, case.training.steps or 0
    with tempfile.TemporaryDirectory() as folder, Fleet(devices) as fleet:
        spec = WorkerSpec(
            task=task, task_args=arguments, options=case.training, seed=seed, run_url=folder
        )
        fleet.start(spec)
        fleet.install(
            case.plan, first_step=0, end_step=1, checkpoint=False, emulation=case.emulation
        )
        fleet.run(case.plan)  # the first step also loads what is only needed then
        before_s = fleet.all("ask", waited_s)
        fleet.news()
        fleet.all("extend", num_steps)
        fleet.run(case.plan)
        after_s = fleet.all("ask", waited_s)
        reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
    mine = [report.wall_step_s for report in reports if report.device_id == devices[0]]
    worst_s = max(after - before for after, before in zip(after_s, before_s, strict=True))
    return sum(mine) / len(mine), worst_s / sum(mine)


def rows_of(example: str, seed: int, *, quick: bool) -> list[dict[str, object]]:
    """One example: as it is, with samples that take time, and at full speed."""
    config = RunConfig.load(FOLDER / f"{example}.yaml")
    # Evaluations are not what is measured.
    training = replace(
        config.training,
        epochs=None,
        steps=6 if quick else 21,
        eval_every_steps=None,
        keep_best=None,
        early_stop=None,
    )
    arguments = dict(training.task_args)
    task = load_task(training.task, arguments, seed)
    profile = profile_model(split(task), task, training)
    count = sum(offer.count for offer in config.cluster.offers)
    reading = {"task": training.task, **arguments}
    rows: list[dict[str, object]] = []
    for name, devices, fast, path, given in (
        ("example", count, False, training.task, arguments),
        ("slow reads", count, False, "benchmarks.input_stall:slow", reading),
        ("full speed", 2, True, training.task, arguments),
    ):
        for ahead in (training.prefetch_microbatches, 0):
            options = replace(training, prefetch_microbatches=ahead)
            case = case_of(options, profile, devices, fast=fast)
            step_s, stall = measure(case, path, given, seed)
            rows.append(
                {
                    "example": example,
                    "case": name,
                    "devices": devices,
                    "prefetch": ahead,
                    "step_ms": 1e3 * step_s,
                    "stall_pct": 100 * stall,
                }
            )
    return rows


def run(options: argparse.Namespace) -> Result:
    """Every example in every case."""
    rows = [
        row for example in EXAMPLES for row in rows_of(example, options.seed, quick=options.quick)
    ]

    def worst(case: str, *, prefetched: bool) -> float:
        chosen = (r for r in rows if r["case"] == case and bool(r["prefetch"]) == prefetched)
        return max(float(str(row["stall_pct"])) for row in chosen)

    figures = [Figure("stall_max_pct", worst("example", prefetched=True), "%", "<= 2")]
    for case in ("example", "slow reads", "full speed"):
        for prefetched in (True, False):
            if case != "example" or not prefetched:
                name = f"{case.replace(' ', '_')}_{'with' if prefetched else 'without'}_prefetch"
                figures.append(Figure(f"{name}_pct", worst(case, prefetched=prefetched), "%"))
    return Result(tuple(figures), tuple(rows))


if __name__ == "__main__":
    main("input_stall", run)
