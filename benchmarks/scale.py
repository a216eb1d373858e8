"""How planning grows: first plan, time to near the best, warm re-plan and memory, by size."""

import argparse
import resource
import time
from dataclasses import replace

import numpy as np

from benchmarks.plan_time import WARM_S, later, timed
from benchmarks.random_problems import Size, random_problem
from benchmarks.result import Figure, Result, main
from orchestrator.control.chooser import incumbent_estimate
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.strategies.registry import make_strategy

DEVICES, LAYERS, CLASSES = (16, 64, 256, 1024, 4096), (24, 48, 96, 128), (1, 3, 9)
BASE = Size(devices=256, layers=48, batch=2048, microbatch=8, classes=6, devices_per_node=4,
            team_sizes=(1, 2, 4))  # fmt: skip
NEAR_RATIO = 0.975  # of the best rate
LONG_S = 6.0
BUDGETS_S = (0.1, 0.2, 0.35, 0.6, 1.0, 1.8, 3.0)
"""Deadlines tried in turn until the plan is near the best one."""


def make_problem(seed: int, size: Size) -> PlanningProblem:
    """The problem of a size; its batch grows with the devices beyond four samples each."""
    size = replace(size, batch=max(size.batch, 4 * size.devices))
    return random_problem(np.random.default_rng((seed, size.devices, size.layers)), size)


def measure(seed: int, size: Size, long_s: float) -> dict[str, object]:
    """One size: CPU seconds of the first plan, to a near-best plan, and of a warm one."""
    problem = make_problem(seed, size)
    _, first_s = timed(make_strategy("joint"), problem, 0.0)
    strategy = make_strategy("joint")
    best, long_used_s = timed(strategy, problem, long_s)
    goal = NEAR_RATIO * best.estimate.samples_per_s
    near_s = long_used_s
    for budget_s in (b for b in BUDGETS_S if b < long_s):
        found, used_s = timed(make_strategy("joint"), problem, budget_s)
        if found.estimate.samples_per_s >= goal:
            near_s = used_s
            break
    changed = later(problem, best, np.random.default_rng(seed))
    warm, warm_s = timed(strategy, changed, WARM_S)
    stay = incumbent_estimate(CostModel(changed), ())
    kept = max(warm.estimate.samples_per_s, stay.samples_per_s if stay else 0.0)
    cold, _ = timed(make_strategy("joint"), replace(changed, incumbent=None), long_s)
    return {
        "devices": size.devices,
        "layers": size.layers,
        "classes": size.classes,
        "first_plan_s": first_s,
        "near_best_s": near_s,
        "warm_s": warm_s,
        "warm_pct": 100 * min(1.0, kept / cold.estimate.samples_per_s),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def growth(rows: list[dict[str, object]], by: str, of: str) -> float:
    """Exponent of a power law through the rows: log-log slope."""
    sizes = np.log([float(row[by]) for row in rows])  # type: ignore[arg-type]
    values = np.log([float(row[of]) for row in rows])  # type: ignore[arg-type]
    return float(np.polyfit(sizes, values, 1)[0])


def run(options: argparse.Namespace) -> Result:
    """Each dimension by itself, the others as in ``BASE``."""
    started_s = time.process_time()
    devices = DEVICES[:2] if options.quick else DEVICES
    layers = LAYERS[:2] if options.quick else LAYERS
    classes = CLASSES[:2] if options.quick else CLASSES
    long_s = 1.0 if options.quick else LONG_S
    by_devices = [measure(options.seed, replace(BASE, devices=n), long_s) for n in devices]
    by_layers = [measure(options.seed, replace(BASE, layers=n), long_s) for n in layers]
    by_classes = [measure(options.seed, replace(BASE, classes=n), long_s) for n in classes]
    return Result(
        figures=(
            Figure("first_plan_s_max", max(float(r["first_plan_s"]) for r in by_devices), "s"),  # type: ignore[arg-type]
            Figure("first_plan_by_devices", growth(by_devices, "devices", "first_plan_s"), "power"),
            Figure("first_plan_by_layers", growth(by_layers, "layers", "first_plan_s"), "power"),
            Figure("first_plan_by_classes", growth(by_classes, "classes", "first_plan_s"), "power"),
            Figure("near_best_by_devices", growth(by_devices, "devices", "near_best_s"), "power"),
            Figure("warm_pct_min", min(float(r["warm_pct"]) for r in by_devices), "%"),  # type: ignore[arg-type]
            Figure("peak_mib", max(float(r["peak_mib"]) for r in by_devices), "MiB"),  # type: ignore[arg-type]
        ),
        table=(*by_devices, *by_layers, *by_classes),
        notes={"cpu_total_s": round(time.process_time() - started_s, 1)},
    )


if __name__ == "__main__":
    main("scale", run)
