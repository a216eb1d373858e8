"""Changes of plan inside running workers: layers and optimizer state move, nothing restarts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.fleet import ChildError, Fleet, make_plan
from orchestrator.core.plan import Move, Plan
from orchestrator.core.slot import StepReport
from orchestrator.core.training import ScheduleOptions
from tests.runtime.harness import make_spec, wait_for_parts
from tests.runtime.plans import random_plan
from tests.runtime.reference import largest_difference, saved_parameters, train_alone

DEVICES = tuple(f"d{i}" for i in range(8))
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 0.003}
TOLERANCE = {"sgd": 1e-6, "adamw": 1e-12}  # fp32 and fp64
NUM_LAYERS = 5
IDLE = Plan(9, "1f1b")


def run_to(fleet: Fleet, plan: Plan, first_step: int, end_step: int, **options: object) -> None:
    fleet.install(plan, first_step=first_step, end_step=end_step, **options)
    end = fleet.run(plan)
    assert (end.next_step, end.reason) == (end_step, "window")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd-fp32", "adamw-fp64"])
def test_two_replans_in_the_middle_change_nothing(
    fleet: Fleet, tmp_path: Path, optimizer: dict, seed: int
) -> None:
    rng = np.random.default_rng([seed, len(optimizer)])
    batch = int(rng.integers(8, 17))
    plans = [
        random_plan(rng, DEVICES, num_layers=NUM_LAYERS, batch=batch, generation=g)
        for g in (1, 2, 3)
    ]
    spec = make_spec(
        "mlp", str(tmp_path), optimizer=optimizer, global_batch=batch,
        task_args={"num_layers": NUM_LAYERS, "double": optimizer is ADAMW},
    )  # fmt: skip
    fleet.start(spec)
    for plan, first_step, end_step in zip(plans, (0, 7, 13), (7, 13, 20), strict=True):
        fleet.install(plan, first_step=first_step, end_step=end_step)
        fleet.run_apart(plan, first_step, end_step)
    fleet.save(20, num_layers=NUM_LAYERS)
    alone, _ = train_alone(spec, 20)
    difference = largest_difference(alone, saved_parameters(str(tmp_path), 20, NUM_LAYERS))
    assert difference <= TOLERANCE[optimizer["name"]], f"seed {seed}: {plans}"


def test_tied_layers_and_dropout_survive_replans_and_an_idle_slot(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = make_spec(
        "language", str(tmp_path), task_args={"dropout": 0.2}, global_batch=8, optimizer=ADAMW,
        clip_grad_norm=0.1,
    )  # fmt: skip
    first = make_plan([([("d0", 3), ("d1", 4)], (3, 2)), ([("d2", 7)], (3,))])
    second = make_plan([([("d2", 2), ("d3", 2), ("d0", 3)], (2, 2, 2, 2))], generation=2)
    third = make_plan([([("d4", 6), ("d5", 1)], (4,)), ([("d1", 7)], (4,))], generation=3)
    fleet.start(spec)
    run_to(fleet, first, 0, 4)
    run_to(fleet, second, 4, 8)
    fleet.install(IDLE, first_step=8, end_step=8)
    run_to(fleet, third, 8, 12)
    fleet.save(12, num_layers=7)
    alone, _ = train_alone(spec, 12)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 12, 7)) <= 1e-12


def test_layers_come_from_the_source_that_the_migration_names(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 2}, global_batch=4)
    first = make_plan([([("d0", 2)], (2,)), ([("d1", 2)], (2,))])
    second = make_plan([([("d2", 1), ("d3", 1)], (2, 2))], generation=2)
    moves = (Move(0, "d1", "d2", 0), Move(1, "d0", "d3", 0))
    fleet.start(spec)
    run_to(fleet, first, 0, 2)
    run_to(fleet, second, 2, 4, moves=moves)
    fleet.save(4, num_layers=2)
    alone, _ = train_alone(spec, 4)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 4, 2)) <= 1e-6


def test_any_plan_restores_any_checkpoint(fleet: Fleet, tmp_path: Path) -> None:
    """deepspeedai/Megatron-DeepSpeed#439, THUDM/GLM#136, verl-project/verl#2265.

    There a file demands the old world size; here any number of devices and another transport do.

    PrimeIntellect-ai/prime-rl#1092, NVIDIA-BioNeMo/bionemo-recipes#1250: loader states by rank.
    huggingface/transformers#40245: other workers on resume, and part of the data is never seen.
    """
    spec = make_spec(
        "language", str(tmp_path), global_batch=8, optimizer=ADAMW, checkpoint_every_steps=5
    )
    first = make_plan([([("d0", 3), ("d1", 4)], (3, 2)), ([("d2", 7)], (3,))])
    second = make_plan([([("d3", 1), ("d1", 5), ("d0", 1)], (4, 4))], generation=2)
    fleet.start(spec)
    run_to(fleet, first, 0, 10)
    manifest = fleet.save(10, num_layers=7)
    alone, _ = train_alone(spec, 16)
    lonely = make_plan([([("d5", 7)], (8,))], generation=2)
    for plan, transport in ((second, "tcp"), (lonely, "tcp"), (second, "gloo")):
        fleet.start(replace(spec, transport=transport))  # nothing is left but the files
        run_to(fleet, plan, 10, 16, restore=manifest)
        fleet.save(16, num_layers=7)
        assert largest_difference(alone, saved_parameters(str(tmp_path), 16, 7)) <= 1e-12
    fleet.news()
    run_to(fleet, first, 10, 16, restore=manifest)  # the same workers go back
    fleet.save(16, num_layers=7)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 16, 7)) <= 1e-12


def test_run_writes_checkpoints_by_itself_and_names_each_layer_once(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 3}, global_batch=6, checkpoint_every_steps=4
    )
    plan = make_plan([([("d0", 1), ("d1", 2)], (2, 1)), ([("d3", 2), ("d2", 1)], (3,))])
    fleet.start(spec)
    run_to(fleet, plan, 0, 6)
    parts = wait_for_parts(fleet, 2)
    fleet.all("extend", 9)
    fleet.run(plan)
    parts += wait_for_parts(fleet, 2)
    layers = {
        step: sorted(f.layer for p in parts if p.step == step for f in p.files) for step in (4, 8)
    }
    assert layers == {4: [0, 1, 2], 8: [0, 1, 2]}
    alone, _ = train_alone(spec, 8)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 8, 3)) <= 1e-6
    tensors = load_file(f"{tmp_path}/checkpoints/step-000008/layer-001.safetensors")
    assert "optim/up.weight/momentum_buffer" in tensors


def test_damaged_checkpoint_is_refused_by_name(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 2}, global_batch=4)
    plan = make_plan([([("d0", 1), ("d1", 1)], (2, 2))])
    fleet.start(spec)
    run_to(fleet, plan, 0, 1)
    manifest = fleet.save(1, num_layers=2)
    file = tmp_path / "checkpoints" / "step-000001" / "layer-001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    fleet.start(spec)
    with pytest.raises(ChildError, match=r"layer-001\.safetensors is damaged"):
        fleet.install(plan, first_step=1, end_step=2, restore=manifest)


def test_discarded_runs_leave_no_trace(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec(
        "language", str(tmp_path), global_batch=8, optimizer=ADAMW, checkpoint_every_steps=2
    )
    trials = [
        make_plan([([("d0", 7)], (8,))]),
        make_plan([([("d1", 3), ("d0", 4)], (4, 4))]),
    ]
    plan = make_plan([([("d0", 2), ("d2", 5)], (4,)), ([("d3", 7)], (4,))], generation=2)
    fleet.start(spec)
    for trial in trials:
        run_to(fleet, trial, 0, 3, discard=True)
    assert not (tmp_path / "checkpoints").exists()
    run_to(fleet, plan, 0, 6)
    fleet.save(6, num_layers=7)
    alone, _ = train_alone(spec, 6)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 6, 7)) <= 1e-12


def test_the_learning_rate_is_that_of_the_step_however_many_devices_there_are(
    fleet: Fleet, tmp_path: Path
) -> None:
    """open-mmlab/mmdetection#3800: with more devices the rate stays, and a user expects scaling.

    It is a function of the step, and the global batch is that of the file, whatever the plan.
    """
    schedule = ScheduleOptions(name="cosine", warmup_steps=3)
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, lr_schedule=schedule
    )
    plans = [
        make_plan([([("d0", 4)], (4, 4))]),
        make_plan([([("d1", 2), ("d2", 2)], (3, 2)), ([("d3", 4)], (3,))], generation=2),
        make_plan([([(f"d{i}", 4)], (2,)) for i in range(4)], generation=3),
    ]
    fleet.start(spec)
    for index, plan in enumerate(plans):
        run_to(fleet, plan, 4 * index, 4 * index + 4)
    reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
    assert {(r.step, r.lr) for r in reports} == {
        (step, 0.05 * schedule.factor(step, 20)) for step in range(12)
    }
    groups = {(r.step, r.group_index): r.num_samples for r in reports}
    for step in range(12):
        assert sum(size for (at, _), size in groups.items() if at == step) == 8


def test_layers_that_left_free_their_memory(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=4)
    whole = make_plan([([("d0", 4)], (2, 2))])
    quarter = make_plan([([("d0", 1), ("d1", 3)], (2, 2))], generation=2)
    fleet.start(spec)
    run_to(fleet, whole, 0, 2)
    run_to(fleet, quarter, 2, 4)
    reports = [item for news in fleet.news() for item in news]
    peaks = {r.step: r.peak_memory_bytes for r in reports if r.device_id == "d0"}
    assert peaks[3] < 0.5 * peaks[1]


def test_install_without_any_source_names_the_layer(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 2}, global_batch=4)
    plan = make_plan([([("d0", 1), ("d1", 1)], (2, 2))])
    fleet.start(spec)
    with pytest.raises(ChildError, match="no worker holds layer 0 as of step 3"):
        fleet.install(plan, first_step=3, end_step=4)


def test_many_replans_leave_no_threads_and_files_behind(fleet: Fleet, tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#3146: after a change of size a port is still bound."""
    rng = np.random.default_rng(5)
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 5}, global_batch=8, steps=41)
    fleet.start(spec)
    counts = []
    for step in range(40):
        plan = random_plan(rng, DEVICES, num_layers=5, batch=8, generation=step + 1)
        run_to(fleet, plan, step, step + 1)
        counts.append(np.array(fleet.all("count")).max(0))
    fleet.save(40, num_layers=5)
    alone, _ = train_alone(spec, 40)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 40, 5)) <= 1e-6
    threads, files = np.array(counts).T
    # 16 unused process groups are kept, of 3 threads and some files each; then no more come
    assert threads[25:].max() <= threads[:25].max() + 12
    assert files[25:].max() <= files[:25].max() + 60
