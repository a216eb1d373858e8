"""Evaluation on a plan equals that of one process, and training does not notice it."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.evaluation import Evaluated, RoundReport
from orchestrator.core.plan import Plan
from orchestrator.core.slot import StepReport
from orchestrator.core.training import Task
from orchestrator.errors import UserCodeError
from tests.runtime.harness import make_spec
from tests.runtime.reference import saved_parameters, train_alone
from workers.emulation import EmulatedStage
from workers.evaluation import at_rest
from workers.loading import load
from workers.seeding import Draws
from workers.splitting import load_task, split
from workers.worker import WorkerSpec

NUM_EVAL = 21  # in rounds of 8: the last one leaves the second group of most plans nothing


CHAIN = make_plan([([("a", 1), ("b", 2), ("c", 1)], (3, 3, 2))])
UNEVEN = make_plan([([("a", 1), ("b", 3)], (2, 2, 2)), ([("c", 4)], (2,))])


def spec_of(folder: Path, **changes: Any) -> WorkerSpec:
    task_args = {"num_eval": NUM_EVAL, **changes.pop("task_args", {})}
    options = {"global_batch": 8, "steps": 10, "eval_every_steps": 4, **changes}
    options.setdefault("optimizer", {"name": "sgd", "lr": 0.02})
    return make_spec("judged", str(folder), task_args=task_args, **options)


def run(fleet: Fleet, spec: WorkerSpec, plan: Plan, **options: Any) -> list[Any]:
    """What all workers told of a whole run."""
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=10, **options)
    end = fleet.run(plan)
    assert (end.next_step, end.reason) == (10, "finished")
    return [item for news in fleet.news() for item in news]


def sums(items: list[Any], step: int) -> dict[str, float]:
    """Loss and metrics of the evaluation at a step, of all rounds and devices."""
    totals: dict[str, list[float]] = {}
    for item in items:
        if isinstance(item, RoundReport) and item.step == step:
            for name, total, weight in (("loss", item.loss_sum, item.weight_sum), *item.metrics):
                known = totals.setdefault(name, [0.0, 0.0])
                known[0] += total
                known[1] += weight
    return {name: total / weight for name, (total, weight) in totals.items()}


def evaluated_alone(spec: WorkerSpec, step: int) -> dict[str, float]:
    """The same by one process, which trains first."""
    layers, _ = train_alone(spec, step)
    return judged(nn.Sequential(*layers), load_task(spec.task, spec.task_args, spec.seed))


def judged(model: nn.Module, task: Task) -> dict[str, float]:
    """Loss and metric of a model: torch's own way to evaluate it."""
    with torch.no_grad():
        data = [task.eval_dataset[i] for i in range(len(task.eval_dataset))]
        x, y = (torch.stack(column) for column in zip(*data, strict=True))
        output = model.eval()(x)
        loss, weight = task.loss(output, (x, y))
        near, count = task.metrics(output, (x, y))["near"]
    return {"loss": float(loss) / weight, "near": float(near) / count}


@pytest.mark.parametrize("plan", [CHAIN, UNEVEN], ids=["chain", "uneven"])
def test_an_evaluation_is_that_of_one_process_whatever_the_plan(
    fleet: Fleet, tmp_path: Path, plan: Plan
) -> None:
    spec = spec_of(tmp_path)
    items = run(fleet, spec, plan)
    steps = sorted({item.step for item in items if isinstance(item, RoundReport)})
    assert steps == [4, 8, 10]  # and once at the end
    for step in steps:
        assert sums(items, step) == pytest.approx(evaluated_alone(spec, step), rel=1e-5)
    rounds = [i for i in items if isinstance(i, RoundReport) and i.step == 4]
    assert sorted((r.index, r.device_id) for r in rounds) == [
        (index, device) for index in range(3) for device in "abc"
    ]
    assert sum(r.weight_sum for r in rounds) == NUM_EVAL


@pytest.mark.parametrize("form", ["blocks", "whole"])
def test_dropout_is_off_in_every_part_of_a_whole_model_and_on_again_behind_it(
    fleet: Fleet, tmp_path: Path, form: str
) -> None:
    spec = spec_of(tmp_path, task_args={"form": form}, optimizer={"name": "sgd", "lr": 0.001})
    task = load_task(spec.task, spec.task_args, spec.seed)
    num_layers = len(split(task).layers)
    plan = make_plan([([("a", 1), ("b", num_layers - 1)], (3, 3)), ([("c", num_layers)], (2,))])
    told = {}
    for every in (None, 4):
        items = run(
            fleet, replace(spec, options=replace(spec.options, eval_every_steps=every)), plan
        )
        told[every] = {i.step: i.loss for i in items if isinstance(i, StepReport)}
    assert told[4] == told[None]
    fleet.save(10, num_layers=num_layers)
    for tensors in saved_parameters(spec.run_url, 10, num_layers):
        for name, value in tensors.items():
            task.layers.get_parameter(name).data.copy_(value)
    assert sums(items, 10) == pytest.approx(judged(task.layers, task), rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "precision"), [(CHAIN, "fp32"), (UNEVEN, "fp32"), (UNEVEN, "fp16")]
)
def test_training_is_the_same_to_the_bit_with_evaluation_and_without(
    fleet: Fleet, tmp_path: Path, plan: Plan, precision: str
) -> None:
    """Dropout, and a dataset and a layer that look at global generators and at their mode."""
    told = {}
    for every in (None, 4):
        spec = spec_of(tmp_path, eval_every_steps=every, precision=precision)
        items = run(fleet, spec, plan)
        losses = {i.step: i.loss for i in items if isinstance(i, StepReport)}
        told[every] = losses, fleet.all("checksums")
    assert told[4] == told[None]


def test_samples_that_are_drawn_meanwhile_do_not_notice_an_evaluation() -> None:
    """They are loaded ahead by a thread of their own, at any time."""

    def draw() -> tuple[float, float]:
        return random.random(), np.random.rand()  # noqa: NPY002 - as careless datasets do

    with Draws() as draws:
        draws.key(5)
        alone = draw()
    evaluation = at_rest([], torch.device("cpu"))
    with Draws() as draws:
        with evaluation:
            draws.key(5)
        assert draw() == alone


def test_whoever_goes_on_begins_with_the_first_round_that_is_not_done(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    fleet.start(spec)
    fleet.install(CHAIN, first_step=0, end_step=4)
    assert fleet.run(CHAIN).reason == "window"
    before = [item for news in fleet.news() for item in news]
    fleet.install(
        make_plan([([("a", 4)], (4, 4))], generation=2),
        first_step=4, end_step=4, evaluated=Evaluated(4, 1),
    )  # fmt: skip
    fleet.all("run", ranks=[0])
    after = [i for i in fleet.news()[0] if isinstance(i, RoundReport)]
    assert [(r.step, r.index) for r in after] == [(4, 1), (4, 2)]
    first = [i for i in before if isinstance(i, RoundReport) and i.index == 0]
    assert sums([*first, *after], 4) == pytest.approx(evaluated_alone(spec, 4), rel=1e-5)


def test_the_virtual_clock_pays_forwards_and_no_step_is_longer_for_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    link = (0.0, 1e15)
    stage = EmulatedStage(dict.fromkeys((1, 2, 3), (0.004, 0.008)), link, link, step_end_s=0.01)
    items = run(fleet, spec_of(tmp_path), CHAIN, emulation=dict.fromkeys("abc", stage))
    # 3 microbatches over 3 stages: 5 forwards, nothing for sums or the update
    rounds = [i for i in items if isinstance(i, RoundReport) and i.index == 0]
    assert [r.round_s for r in rounds] == pytest.approx([5 * 0.004] * 9, abs=1e-9)
    steps = [i for i in items if isinstance(i, StepReport) and i.device_id == "a"]
    assert [s.step_s for s in steps] == pytest.approx([5 * 0.012 + 0.01] * 10, abs=1e-9)
    apart_s = {b.step: b.started_s - a.ended_s for a, b in pairwise(steps)}
    taken_s = sum(r.round_s for r in items if isinstance(r, RoundReport) and r.step == 4) / 3
    assert apart_s[4] == pytest.approx(taken_s, abs=1e-9)
    assert apart_s[5] == pytest.approx(0.0, abs=1e-9)


def test_the_users_error_in_a_metric_is_told_with_the_users_own_frames(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, task_args={"raises": True})
    with pytest.raises(UserCodeError, match=r"a metric of mine \(tried on the first sample"):
        load(spec, "a")
    fleet.start(replace(spec, check=False))
    fleet.install(UNEVEN, first_step=0, end_step=10)
    assert {end.reason for end in fleet.all("run")} == {"failed"}
    told = [i for news in fleet.news() for i in news if getattr(i, "user_traceback", "")]
    assert told
    for failure in told:
        assert failure.message == "step 4: Task.metrics raised ZeroDivisionError: a metric of mine"
        assert "raise ZeroDivisionError" in failure.user_traceback
