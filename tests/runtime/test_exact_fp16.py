"""fp16: the loss scale that workers agree on is the one of torch's scaler in one process."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.slot import StepReport
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from workers.scaling import LossScale

DEVICES = tuple("abcdef")
ADAMW = {"name": "adamw", "lr": 0.003}
NUM_STEPS = 8
SHARES = ((4, 3), (3, 2))
PAIR = make_plan([([("a", 2), ("b", 4)], SHARES[0]), ([("c", 3), ("d", 1), ("e", 2)], SHARES[1])])
OTHER = make_plan(
    [([("e", 5), ("c", 1)], SHARES[0]), ([("f", 1), ("a", 5)], SHARES[1])], generation=2
)


def fp16_spec(run_url: str, **changes: Any) -> Any:
    """12 of 60 samples a step; one of them overflows until the scale has come down."""
    return make_spec(
        "mlp", run_url, task_args={"num_samples": 60, "loud": 23}, precision="fp16",
        **{"global_batch": 12, "optimizer": ADAMW, "clip_grad_norm": 1.0, **changes},
    )  # fmt: skip


def told(fleet: Fleet) -> dict[int, set[tuple[float, bool]]]:
    """Loss scale and whether the step was skipped, as all workers report each step."""
    found: dict[int, set[tuple[float, bool]]] = {}
    for news in fleet.news():
        for report in news:
            if isinstance(report, StepReport):
                found.setdefault(report.step, set()).add((report.loss_scale, report.skipped))
    return found


def expected(scales: Sequence[float], after: float) -> dict[int, set[tuple[float, bool]]]:
    """What torch's scaler did: a step whose scale is larger than the next one's was skipped."""
    pairs = zip(scales, [*scales[1:], after], strict=True)
    return {step: {(scale, following < scale)} for step, (scale, following) in enumerate(pairs)}


@pytest.mark.parametrize("plan", [PAIR, OTHER], ids=["pair", "other"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_fp16_equals_one_process_with_torchs_scaler(
    fleet: Fleet, tmp_path: Path, plan: Any, clip: float | None
) -> None:
    spec = fp16_spec(str(tmp_path), clip_grad_norm=clip)
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=0)
    fleet.run_apart(plan, 0, NUM_STEPS)
    fleet.save(NUM_STEPS, num_layers=6)
    scales: list[float] = []
    alone, _ = train_alone(spec, NUM_STEPS + 1, shares=SHARES, scales=scales)
    alone, _ = train_alone(spec, NUM_STEPS, shares=SHARES)
    assert largest_difference(alone, saved_parameters(str(tmp_path), NUM_STEPS, 6)) <= 1e-6
    skipped = [now > following for now, following in pairwise(scales)]
    assert not skipped[0]  # an overflow in the middle
    assert any(skipped)
    assert told(fleet) == expected(scales[:-1], scales[-1])


def test_the_scale_survives_a_change_of_plan_a_joiner_and_a_resume(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = fp16_spec(str(tmp_path))
    scales: list[float] = []
    alone, _ = train_alone(spec, NUM_STEPS, shares=SHARES, scales=scales)
    fleet.start(spec)
    fleet.install(PAIR, first_step=0, end_step=5)
    fleet.run(PAIR)
    fleet.install(OTHER, first_step=5, end_step=6)  # f had nothing yet, e goes to the other group
    fleet.run(OTHER)
    manifest = fleet.save(6, num_layers=6)
    fleet.all("extend", NUM_STEPS)
    fleet.run(OTHER)
    fleet.save(NUM_STEPS, num_layers=6)
    assert largest_difference(alone, saved_parameters(str(tmp_path), NUM_STEPS, 6)) <= 1e-6
    seen = told(fleet)
    assert {step: {scale for scale, _ in found} for step, found in seen.items()} == {
        step: {scale} for step, scale in enumerate(scales)
    }
    fleet.start(spec)  # nothing is left but the files
    fleet.install(PAIR, first_step=6, end_step=NUM_STEPS, restore=manifest)
    fleet.run(PAIR)
    fleet.save(NUM_STEPS, num_layers=6)
    assert told(fleet) == {step: seen[step] for step in (6, 7)}
    assert largest_difference(alone, saved_parameters(str(tmp_path), NUM_STEPS, 6)) <= 1e-6


def test_the_scale_follows_the_steps_as_torchs_scaler_does() -> None:
    torch.manual_seed(0)
    ours, parameter = LossScale("fp16"), nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum())  # it begins to count with the first loss
    for step in range(5000):
        finite = step not in (3, 4, 900, 3500)
        parameter.grad = torch.tensor([1.0 if finite else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        ours.follow(finite)
        assert ours.scale == scaler.get_scale(), step
    other = LossScale("fp16")
    other.load(ours.tensors())
    assert other.tensors() == ours.tensors()


def test_the_scale_of_steps_without_any_finite_gradient_stays_above_zero() -> None:
    scale = LossScale("fp16")
    for _ in range(200):
        scale.follow(False)
    assert scale.scale > 0
