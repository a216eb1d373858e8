"""Models as people bring them: cut, and trained on unlike plans, they equal one process."""

from pathlib import Path

import pytest

from benchmarks.fleet import Fleet, make_plan
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone

pytest.importorskip("transformers", reason="the extra dev brings transformers")

TASK = "benchmarks.hub_models:hub"
NUM_STEPS = 5


@pytest.mark.parametrize(
    ("name", "front_end"),
    [
        *((name, "automatic") for name in ("gpt2", "llama", "bert", "t5", "resnet", "vit", "unet")),
        *((name, "blocks") for name in ("gpt2", "llama", "bert", "t5", "resnet", "vit", "unet")),
        *((name, "list") for name in ("resnet", "vit")),
    ],
)
def test_a_model_as_it_comes_equals_its_own_forward_on_unlike_plans(
    fleet: Fleet, tmp_path: Path, name: str, front_end: str
) -> None:
    """As their packages make them, and a U-Net of our own. One plan gives way to another."""
    args = {"name": name, "front_end": front_end}
    spec = make_spec(
        TASK, str(tmp_path), task_args=args, global_batch=9,
        optimizer={"name": "adamw", "lr": 0.003},
    )  # fmt: skip
    alone, losses = train_alone(spec, NUM_STEPS)
    count = len(alone)
    assert count >= 4
    plans = (
        make_plan([([("a", 1), ("b", count - 1)], (2, 2, 1)), ([("c", count)], (1, 3))]),
        make_plan([([("c", 2), ("a", count - 3), ("b", 1)], (4, 3, 2))], generation=2),
    )
    fleet.start(spec)
    for plan, first, end in zip(plans, (0, 2), (2, NUM_STEPS), strict=True):
        fleet.install(plan, first_step=first, end_step=end)
        fleet.run_apart(plan, first, end)
    fleet.save(NUM_STEPS, num_layers=count)
    reports = [report for news in fleet.news() for report in news]
    assert max(abs(r.loss - losses[r.step]) for r in reports) <= 1e-12
    saved = saved_parameters(str(tmp_path), NUM_STEPS, count)
    assert largest_difference(alone, saved) <= 1e-12
