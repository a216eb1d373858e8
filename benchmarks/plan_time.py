"""CPU seconds until there is a plan, cold and warm, device by device and class by class."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.random_problems import Size, random_problem
from benchmarks.result import Figure, Result, main
from orchestrator.control.chooser import incumbent_estimate
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.strategies.registry import Strategy, make_strategy

DEVICE_LEVEL = {
    8: Size(devices=8, layers=16, batch=64, microbatch=4),
    32: Size(devices=32, layers=24, batch=256, microbatch=4, devices_per_node=4),
}
CLASS_LEVEL = (16, 64, 256, 1024)
LAYERS, CLASSES = 48, 9
LONG_S, HALF_S, WARM_S = 6.0, 0.5, 0.2
SLOWED_SHARE = 0.05
"""Of the devices, whose speed changes before a warm re-plan."""


def within(limit_s: float) -> Callable[[], bool]:
    """Says when so much CPU time has passed from now on."""
    end_s = time.process_time() + limit_s
    return lambda: time.process_time() > end_s


def timed(
    strategy: Strategy, problem: PlanningProblem, limit_s: float = 1e9
) -> tuple[Candidate, float]:
    """The best candidate, and the CPU seconds it took."""
    gc.collect()  # what earlier searches have left would be looked through now
    started_s = time.process_time()
    found = strategy.propose(problem, out_of_time=within(limit_s))
    return found[0], time.process_time() - started_s


def later(problem: PlanningProblem, plan: Candidate, rng: np.random.Generator) -> PlanningProblem:
    """The problem of a next slot: some devices run slower, and the plan is in place."""
    devices = tuple(
        replace(d, slowdown=1.5) if rng.random() < SLOWED_SHARE else d
        for d in problem.cluster.devices
    )
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, cluster=cluster, incumbent=plan.plan)


def device_level(devices: int, seed: int, runs: int) -> dict[str, object]:
    """Cold, and again in the same state at another price of money."""
    cold_s, warm_s = [], []
    for run in range(runs):
        problem = random_problem(np.random.default_rng((seed, run)), DEVICE_LEVEL[devices])
        strategy = make_strategy("joint")
        best, seconds = timed(strategy, problem)
        cold_s.append(seconds)
        price = 0.2 * best.estimate.samples_per_usd
        warm = replace(problem, incumbent=best.plan, backlog_usd=price)
        timed(strategy, warm)
        warm_s.append(timed(strategy, replace(warm, backlog_usd=1.05 * price))[1])
    return {
        "devices": devices,
        "cold_s": statistics.median(cold_s),
        "warm_s": statistics.median(warm_s),
    }


def class_level(devices: int, seed: int, limit_s: float) -> dict[str, object]:
    """First plan, plan of half a second and of a warm re-plan, against long searches."""
    rng = np.random.default_rng((seed, devices))
    size = Size(
        devices=devices, layers=LAYERS, batch=max(256, 4 * devices), microbatch=8,
        classes=CLASSES, devices_per_node=4, team_sizes=(1, 2, 4),
    )  # fmt: skip
    problem = random_problem(rng, size)
    _, first_s = timed(make_strategy("joint"), problem, 0.0)
    half, _ = timed(make_strategy("joint"), problem, HALF_S)
    strategy = make_strategy("joint")
    best, _ = timed(strategy, problem, limit_s)
    changed = later(problem, best, rng)
    warm, _ = timed(strategy, changed, WARM_S)
    stay = incumbent_estimate(CostModel(changed), ())  # which every decision compares with
    cold, _ = timed(make_strategy("joint"), replace(changed, incumbent=None), limit_s)

    def rate(found: Candidate) -> float:
        return found.estimate.samples_per_s

    kept = max(rate(warm), stay.samples_per_s if stay else 0.0)
    return {
        "devices": devices,
        "first_plan_s": first_s,
        "half_second_pct": 100 * rate(half) / max(rate(half), rate(best)),
        "warm_0p2s_pct": 100 * kept / max(kept, rate(cold)),
    }


def run(options: argparse.Namespace) -> Result:
    """All sizes; the short form leaves the largest ones and the long searches out."""
    runs = 2 if options.quick else options.runs
    small = [device_level(n, options.seed, runs) for n in ((8,) if options.quick else (8, 32))]
    sizes, limit_s = ((64,), 2.0) if options.quick else (CLASS_LEVEL, LONG_S)
    rows = [class_level(n, options.seed, limit_s) for n in sizes]
    bars = {8: ("<= 0.5", "<= 0.05"), 32: ("<= 5", "<= 0.5")}
    figures = []
    for row, (devices, (cold, bar)) in zip(small, bars.items(), strict=False):
        figures += [
            Figure(f"n{devices}_cold_s", float(row["cold_s"]), "s", cold),  # type: ignore[arg-type]
            Figure(f"n{devices}_warm_s", float(row["warm_s"]), "s", bar),  # type: ignore[arg-type]
        ]

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows]  # type: ignore[arg-type]

    # With 16 nodes or fewer a warm plan is no better than a cold one: these run cold anyway.
    warm = [p for row, p in zip(rows, column("warm_0p2s_pct"), strict=True) if row["devices"] != 16]
    return Result(
        figures=(
            *figures,
            Figure("first_plan_s_max", max(column("first_plan_s")), "s", "<= 0.3"),
            Figure("half_second_pct_min", min(column("half_second_pct")), "%", ">= 97.5"),
            Figure("warm_0p2s_pct_min", min(warm), "%", ">= 97"),
        ),
        table=(*small, *rows),
    )


if __name__ == "__main__":
    main("plan_time", run, [("runs", 5, "problems of each size at device level")])
