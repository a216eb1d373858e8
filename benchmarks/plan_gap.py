"""What the search misses of the best plan of all, on problems small enough to try every plan."""

import argparse
import time

import numpy as np

from benchmarks.exhaustive import Exhaustive, TooLargeError
from benchmarks.random_problems import Size, random_problem
from benchmarks.result import Figure, Result, main
from orchestrator.strategies.registry import make_strategy

SIZES = (
    Size(devices=4, layers=8, batch=16, microbatch=4),
    Size(devices=5, layers=12, batch=24, microbatch=4),
    Size(devices=6, layers=12, batch=32, microbatch=4),
    Size(devices=6, layers=16, batch=24, microbatch=2, classes=2, devices_per_node=2),
    Size(devices=8, layers=8, batch=32, microbatch=4, classes=2),
    Size(devices=8, layers=16, batch=32, microbatch=4, classes=2),
    Size(devices=4, layers=10, batch=24, microbatch=2, classes=2, devices_per_node=2,
         team_sizes=(1, 2)),
)  # fmt: skip
MONEY = (0.0, 0.3, 0.7)
"""Prices of money in units of about the best samples per dollar; 0: only speed counts."""


def measure(size: Size, money: float, seed: int) -> dict[str, object]:
    """One problem: the search against branch and bound."""
    problem = random_problem(np.random.default_rng(seed), size, money=money)
    strategy = make_strategy("joint")
    started_s = time.process_time()
    found = strategy.propose(problem, out_of_time=lambda: False)
    search_s = time.process_time() - started_s
    reached = max(candidate.score for candidate in found)
    fastest = max(candidate.estimate.samples_per_s for candidate in found)
    reference = Exhaustive(problem)
    row: dict[str, object] = {
        "devices": size.devices,
        "layers": size.layers,
        "teams": max(size.team_sizes),
        "money": money,
        "seed": seed,
        "search_cpu_s": search_s,
    }
    try:
        best = reference.best(reached)
    except TooLargeError:
        return {**row, "gap_pct": None, "groupings": reference.num_groupings}
    gap = (best - reached) / (problem.penalty_weight * fastest)
    return {**row, "gap_pct": 100 * gap, "groupings": reference.num_groupings}


def run(options: argparse.Namespace) -> Result:
    """Problems of every size at every price of money."""
    sizes = SIZES[:1] if options.quick else SIZES
    runs = 2 if options.quick else options.runs
    rows = [
        measure(size, money, 1000 * options.seed + 100 * s + 10 * r + m)
        for s, size in enumerate(sizes)
        for r in range(runs)
        for m, money in enumerate(MONEY)
    ]
    gaps = np.array([row["gap_pct"] for row in rows if row["gap_pct"] is not None], dtype=float)
    return Result(
        figures=(
            Figure("gap_mean_pct", float(gaps.mean()), "%", "<= 0.1"),
            Figure("gap_p95_pct", float(np.percentile(gaps, 95)), "%", "<= 0.5"),
            Figure("gap_worst_pct", float(gaps.max()), "%", "<= 2"),
            Figure("exact_pct", float(100 * np.mean(gaps <= 1e-6)), "%", ">= 90"),
            Figure(
                "search_cpu_s", float(np.median([row["search_cpu_s"] for row in rows])), "s",
                "<= 0.4",
            ),
        ),
        table=tuple(rows),
        notes={"too_large": sum(row["gap_pct"] is None for row in rows)},
    )  # fmt: skip


if __name__ == "__main__":
    main("plan_gap", run, [("runs", 2, "problems of each size and price")])
