"""What a model may hold (ties, masks, frozen layers, dropout, ragged lengths) changes nothing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.plan import Plan
from orchestrator.core.training import ScheduleOptions
from tests.runtime.harness import make_spec
from tests.runtime.reference import Shares, largest_difference, saved_parameters, train_alone

ADAMW = {"name": "adamw", "lr": 0.003}
NUM_STEPS = 20


DEVICES = tuple("abcdef")


def difference(
    fleet: Fleet, spec: Any, plan: Plan, *, num_steps: int = NUM_STEPS, shares: Shares | None = None
) -> float:
    """Largest difference of a parameter from one process after training on the plan."""
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=0)
    fleet.run_apart(plan, 0, num_steps)
    fleet.save(num_steps, num_layers=plan.num_layers)
    alone, losses = train_alone(spec, num_steps, shares=shares)
    reports = [report for news in fleet.news() for report in news]
    assert max(abs(r.loss - losses[r.step]) for r in reports) <= 1e-5
    return largest_difference(alone, saved_parameters(spec.run_url, num_steps, plan.num_layers))


LANGUAGE_PLAN = make_plan(
    [
        ([("a", 2), ("b", 1), ("c", 4)], (3, 3, 1)),
        ([("d", 5), ("e", 2)], (5,)),
        ([("f", 7)], (2, 2)),
    ],
    extra=1,
)


@pytest.mark.parametrize(
    ("task_args", "training"),
    [
        ({"tied": True}, {}),
        ({"tied": True}, {"clip_grad_norm": 0.05}),
        ({"tied": True, "ragged": True}, {}),
        ({"tied": False, "ragged": True}, {"clip_grad_norm": 0.05}),
        (
            {"tied": True, "dropout": 0.3},
            {"lr_schedule": ScheduleOptions(name="cosine", warmup_steps=3)},
        ),
    ],
    ids=["tied", "tied-clipped", "tied-ragged", "ragged-clipped", "tied-dropout-cosine"],
)
def test_language_model_equals_one_process(
    fleet: Fleet, tmp_path: Path, task_args: dict, training: dict
) -> None:
    """PrimeIntellect-ai/prime-rl#2562, NVIDIA-NeMo/Automodel#3830, modelscope/ms-swift#10165,
    vllm-project/speculators#942: ranks with unequal counts of tokens."""
    spec = make_spec(
        "language", str(tmp_path), task_args=task_args, global_batch=16, optimizer=ADAMW, **training
    )
    assert difference(fleet, spec, LANGUAGE_PLAN) <= 1e-12


def test_tie_across_the_stages_of_a_single_group_is_summed(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("language", str(tmp_path), global_batch=6, optimizer=ADAMW)
    plan = make_plan([([("b", 3), ("a", 4)], (2, 2, 2))], schedule="gpipe")
    assert difference(fleet, spec, plan) <= 1e-12


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_masks_and_parameters_without_gradient_equal_one_process(
    fleet: Fleet, tmp_path: Path, frozen: int, cut: int
) -> None:
    spec = make_spec(
        "odd", str(tmp_path), task_args={"frozen": frozen}, global_batch=9, optimizer=ADAMW
    )
    plan = make_plan(
        [([("a", cut), ("b", 9 - cut)], (2, 2, 1)), ([("c", 4), ("d", 1), ("e", 4)], (1, 3))]
    )
    assert difference(fleet, spec, plan, num_steps=6) <= 1e-12


@pytest.mark.parametrize("cut", [2, 4])
def test_dicts_of_tensors_numbers_and_text_cross_borders(
    fleet: Fleet, tmp_path: Path, cut: int
) -> None:
    spec = make_spec("nested", str(tmp_path), global_batch=9, optimizer=ADAMW)
    plan = make_plan(
        [([("a", cut), ("b", 7 - cut)], (2, 2, 1)), ([("c", 3), ("d", 2), ("e", 2)], (1, 3))]
    )
    assert difference(fleet, spec, plan, num_steps=6) <= 1e-12


@pytest.mark.parametrize("cut", [1, 3])
def test_a_model_with_blocks_equals_its_own_forward(fleet: Fleet, tmp_path: Path, cut: int) -> None:
    spec = make_spec("speaker", str(tmp_path), global_batch=9, optimizer=ADAMW)
    plan = make_plan(
        [([("a", cut), ("b", 6 - cut)], (2, 2, 1)), ([("c", 2), ("d", 3), ("e", 1)], (1, 3))]
    )
    assert difference(fleet, spec, plan, num_steps=6) <= 1e-12


def test_bf16_equals_one_process_with_the_same_microbatches(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), global_batch=12, precision="bf16")
    shares = ((4, 3), (3, 2))
    plan = make_plan(
        [([("a", 2), ("b", 4)], shares[0]), ([("c", 3), ("d", 1), ("e", 2)], shares[1])]
    )
    assert difference(fleet, spec, plan, shares=shares) <= 1e-6


def test_adamw_in_fp32_is_bitwise_that_of_one_process_that_adds_in_the_same_order(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = make_spec("mlp", str(tmp_path), global_batch=12, optimizer=ADAMW)
    shares = ((4, 3), (3, 2))
    plan = make_plan(
        [([("a", 2), ("b", 4)], shares[0]), ([("c", 3), ("d", 1), ("e", 2)], shares[1])]
    )
    assert difference(fleet, spec, plan, shares=shares) == 0.0


def test_group_left_empty_by_a_short_last_step_takes_part_with_weight_zero(
    fleet: Fleet, tmp_path: Path
) -> None:
    """hiyouga/EasyR1#11012: the rank without work stops, the others hang.

    microsoft/PyMarlin#80, horovod/horovod#708: unequal numbers of batches hang as an epoch ends.
    """
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4, "num_samples": 25, "double": True},
        steps=None, epochs=2, global_batch=12, optimizer=ADAMW,
    )  # fmt: skip
    plan = make_plan([([("a", 1), ("b", 3)], (3, 3)), ([("c", 2), ("d", 2)], (4, 2))])
    assert difference(fleet, spec, plan, num_steps=5) <= 1e-12  # 50 samples: the last step has 2
    ends = fleet.run(plan)
    assert (ends.next_step, ends.reason) == (5, "finished")


def test_gloo_transport_equals_one_process(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec(
        "language", str(tmp_path), task_args={"ragged": True}, global_batch=16, optimizer=ADAMW,
        transport="gloo",
    )  # fmt: skip
    assert difference(fleet, spec, LANGUAGE_PLAN, num_steps=4) <= 1e-12


def test_step_whose_gradient_is_not_finite_is_skipped_by_everybody(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = make_spec(
        "mlp", str(tmp_path), global_batch=8, optimizer=ADAMW,
        task_args={"num_layers": 4, "num_samples": 32, "double": True, "poisoned": 5},
    )  # fmt: skip
    plan = make_plan([([("a", 1), ("b", 3)], (3, 2)), ([("c", 4)], (3,))])
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=8)
    fleet.run(plan)
    fleet.save(8, num_layers=4)
    reports = [report for news in fleet.news() for report in news]
    alone, losses = train_alone(spec, 8)
    skipped = {step for step, loss in enumerate(losses) if not math.isfinite(loss)}
    assert len(skipped) == 2  # two epochs
    assert {(r.step, r.skipped) for r in reports} == {(s, s in skipped) for s in range(8)}
    assert largest_difference(alone, saved_parameters(str(tmp_path), 8, 4)) <= 1e-12


def test_sparse_gradients_of_an_embedding_equal_dense_ones(fleet: Fleet, tmp_path: Path) -> None:
    args = {"tied": False}
    spec = make_spec("language", str(tmp_path), task_args=args, global_batch=16, optimizer=ADAMW)
    fleet.start(replace(spec, task_args={**args, "sparse": True}))
    fleet.install(LANGUAGE_PLAN, first_step=0, end_step=5)
    fleet.run(LANGUAGE_PLAN)
    fleet.save(5, num_layers=7)
    alone, _ = train_alone(spec, 5)  # torch's AdamW refuses sparse gradients
    assert largest_difference(alone, saved_parameters(str(tmp_path), 5, 7)) <= 1e-12
