"""Predicted over measured peak memory of the heaviest device, of unlike models and plans.

Measured: every byte that torch allocates while a worker runs its steps, as its profiler tells
them, beside the weights that were there before and the messages that arrived meanwhile
(``benchmarks.allocated``).
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from torch import nn

from benchmarks import fleet
from benchmarks.allocated import WATCHED, run_measured
from benchmarks.builders import make_cluster, make_device, make_problem
from benchmarks.fleet import Fleet, make_plan, make_spec
from benchmarks.result import Figure, Result, main
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.training import Precision
from orchestrator.planning.cost import CostModel
from workers.splitting import load_task, split

NUM_STEPS = 10
DEVICES = ("d-0", "d-1", "d-2")
ADAMW: dict[str, object] = {"name": "adamw", "lr": 1e-3}
SGD: dict[str, object] = {"name": "sgd", "lr": 0.05}


def predicted(plan: Plan, model: ModelProfile) -> dict[str, int]:
    """Peak bytes of every device, as planning sees it."""
    cluster = make_cluster([make_device(device, kind="cpu") for device in DEVICES])
    problem = make_problem(cluster, model, batch_samples=plan.num_samples)
    estimate = CostModel(problem).evaluate(plan.groups, plan.schedule)
    return dict(estimate.peak_memory_bytes)


def held_bytes(layers: Sequence[nn.Module], plan: Plan, device_id: str) -> int:
    """Bytes of the parameters and buffers that a device of a plan holds, shared ones once."""
    held = [
        tensor.untyped_storage()
        for group in plan.groups
        for stage in group.stages
        if device_id in stage.team.device_ids
        for layer in layers[stage.first_layer : stage.end_layer]
        for tensor in (*layer.parameters(), *layer.buffers())
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def measure(
    workers: Fleet, layers: Sequence[nn.Module], plan: Plan, model: ModelProfile
) -> dict[str, object]:
    """Both peaks of the device where the measured one is largest."""
    said = predicted(plan, model)
    workers.install(plan, first_step=0, end_step=NUM_STEPS, checkpoint=False)
    ranks = [DEVICES.index(device) for device in plan.device_ids]
    more_bytes = workers.all("ask", run_measured, ranks=ranks)
    peaks = {
        device: held_bytes(layers, plan, device) + more
        for device, more in zip(plan.device_ids, more_bytes, strict=True)
    }
    workers.news()
    device = max(peaks, key=lambda d: peaks[d])
    return {
        "device": device,
        "measured_bytes": peaks[device],
        "predicted_bytes": said[device],
        "ratio": said[device] / peaks[device],
        "all_ratios": [round(said[d] / peaks[d], 3) for d in plan.device_ids],
    }


def plans(num_layers: int) -> dict[str, Plan]:
    """Alone, pipelines of two schedules, replicas, both; and the same recomputing."""
    two, rest = num_layers // 2, num_layers - num_layers // 2
    chain = [("d-0", two), ("d-1", rest)]
    found = {
        "alone": make_plan([([("d-0", num_layers)], (4,) * 4)]),
        "pipeline": make_plan([(chain, (4,) * 6)]),
        "ahead": make_plan([(chain, (2,) * 8)], extra=1),
        "gpipe": make_plan([(chain, (4,) * 4)], schedule="gpipe"),
        "replicas": make_plan([([(d, num_layers)], (4, 4)) for d in DEVICES]),
        "uneven": make_plan([(chain, (4,) * 4), ([("d-2", num_layers)], (4, 4))]),
    }
    return found | {f"{name}, again": _again(found[name]) for name in ("alone", "gpipe", "uneven")}


def _again(plan: Plan) -> Plan:
    groups = [
        replace(group, stages=tuple(replace(stage, recompute=True) for stage in group.stages))
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))


MODELS = tuple(f"benchmarks.tasks:{name}" for name in ("transformer", "convolutions", "perceptron"))


def measure_all(
    tasks: Sequence[str],
    settings: Sequence[tuple[Precision, dict[str, object]]],
    names: Sequence[str] = (),
    **task_args: object,
) -> list[dict[str, object]]:
    """A row for every task, precision and optimizer, and plan.

    Args:
        tasks: Import paths.
        settings: Precisions and optimizers.
        names: Of plans; all when empty.
        task_args: Of every task.
    """
    fleet.preload("benchmarks.allocated", "benchmarks.tasks")
    rows = []
    with tempfile.TemporaryDirectory() as folder, Fleet(DEVICES) as workers:
        for task, (precision, optimizer) in product(tasks, settings):
            layers, model = split(load_task(task, task_args, 0)).layers, None
            for name, plan in plans(len(layers)).items():
                if names and name not in names:
                    continue
                spec = make_spec(
                    task, folder, optimizer=optimizer, precision=precision, microbatch=4,
                    global_batch=plan.num_samples, steps=NUM_STEPS, task_args=task_args,
                    transport=WATCHED,
                )  # fmt: skip
                workers.start(spec)
                if model is None:
                    (model,) = workers.all("profile", False, True, ranks=[0])
                told = {"task": task, "precision": precision, "optimizer": optimizer["name"]}
                rows.append({**told, "plan": name, **measure(workers, layers, plan, model)})
    return rows


def run(options: argparse.Namespace) -> Result:
    """Models, precisions, optimizers and plans; ``--quick``: fewer plans."""
    names = ("alone", "uneven", "gpipe, again") if options.quick else ()
    settings: list[tuple[Precision, dict[str, object]]] = [("fp32", ADAMW), ("bf16", SGD)]
    rows = measure_all(MODELS, settings, names)
    ratios = [float(str(row["ratio"])) for row in rows]
    return Result(
        (
            Figure("predicted_over_measured_min", min(ratios), "1", ">= 1"),
            Figure("predicted_over_measured_max", max(ratios), "1", "<= 1.15"),
        ),
        tuple(rows),
    )


if __name__ == "__main__":
    main("memory", run)
