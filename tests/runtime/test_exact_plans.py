"""For random plans, 20 steps equal one process, and replicas stay bitwise equal."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet import Fleet
from tests.runtime.harness import make_spec
from tests.runtime.plans import random_plan
from tests.runtime.reference import largest_difference, saved_parameters, train_alone

DEVICES = tuple(f"d{i}" for i in range(12))
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 0.003}
TOLERANCE = {"sgd": 1e-6, "adamw": 1e-12}  # fp32 and fp64
NUM_LAYERS, NUM_STEPS = 6, 20


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd-fp32", "adamw-fp64"])
def test_random_plan_equals_one_process(
    fleet: Fleet, tmp_path: Path, optimizer: dict, seed: int
) -> None:
    """huggingface/transformers#34242, pytorch/torchtitan#2206: unequal counts changed the loss.

    pytorch/pytorch#67253: weighted by samples, whatever batch each device has, never by rank.
    """
    rng = np.random.default_rng([seed, len(optimizer)])
    batch = int(rng.integers(10, 25))
    plan = random_plan(rng, DEVICES, num_layers=NUM_LAYERS, batch=batch)
    spec = make_spec(
        "mlp", str(tmp_path), optimizer=optimizer, global_batch=batch,
        task_args={"num_layers": NUM_LAYERS, "double": optimizer is ADAMW},
    )  # fmt: skip
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=0)
    num_replicated = fleet.run_apart(plan, 0, NUM_STEPS)
    assert num_replicated == (NUM_LAYERS if len(plan.groups) > 1 else 0)
    fleet.save(NUM_STEPS, num_layers=NUM_LAYERS)
    alone, losses = train_alone(spec, NUM_STEPS)
    saved = saved_parameters(str(tmp_path), NUM_STEPS, NUM_LAYERS)
    difference = largest_difference(alone, saved)
    assert difference <= TOLERANCE[optimizer["name"]], f"seed {seed}: {plan}"
    reports = [report for news in fleet.news() for report in news]
    assert len(reports) == NUM_STEPS * len(plan.device_ids)
    assert max(abs(r.loss - losses[r.step]) for r in reports) <= 1e-5
