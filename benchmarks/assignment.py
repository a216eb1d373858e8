"""Whole-number shares: water-filling against a solver, and the slot's mixed-integer problem."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_problem
from benchmarks.builders import make_profile as profile_of
from benchmarks.result import Figure, Result, main
from orchestrator.core.budget import LimitOptions
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.planning.constraints import make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.margins import marginal_values
from orchestrator.planning.program import SlotProgram
from orchestrator.planning.slot_table import slot_table
from orchestrator.planning.waterfill import water_fill

MANY_GROUPS, MANY_SETS, MANY_MICROBATCHES = 1024, 10, 8
IDLE = Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """Median processor time of a call."""
    found = []
    for _ in range(repeats):
        started_s = time.process_time()
        work()
        found.append(time.process_time() - started_s)
    return median(found)


def milp_gap(rng: np.random.Generator) -> float:
    """Relative difference of the slowest group's end: water-filling, and HiGHS on the same data."""
    num_groups = int(rng.integers(2, 13))
    tau_G = rng.uniform(0.05, 2.0, num_groups)
    alpha_G = tau_G * rng.uniform(1.0, 4.0, num_groups)
    num_microbatches = int(rng.integers(num_groups, 12 * num_groups))
    cap_G = rng.integers(1 + num_microbatches // num_groups, num_microbatches + 1, num_groups)

    def end_s(count_G: np.ndarray) -> float:
        return float((alpha_G + (count_G - 1) * tau_G).max())

    ends = np.column_stack([np.diag(tau_G), -np.ones(num_groups)])
    whole = np.array([[*[1.0] * num_groups, 0.0]])
    solved = milp(
        [*[0.0] * num_groups, 1.0],
        constraints=[
            LinearConstraint(ends, -np.inf, tau_G - alpha_G),
            LinearConstraint(whole, num_microbatches, num_microbatches),
        ],
        integrality=[*[1] * num_groups, 0],
        bounds=Bounds([*[1.0] * num_groups, 0.0], [*map(float, cap_G), np.inf]),
        options={"mip_rel_gap": 0.0},
    )
    filled_s = end_s(water_fill(alpha_G, tau_G, num_microbatches, cap_G))
    solved_s = end_s(np.rint(solved.x[:-1]))
    return abs(filled_s - solved_s) / solved_s


def water_fill_cpu_s(rng: np.random.Generator, repeats: int) -> float:
    """Of one call with many groups, all unlike."""
    tau_G = rng.uniform(0.05, 1.0, MANY_GROUPS)
    alpha_G = rng.uniform(0.1, 2.0, MANY_GROUPS)
    count = MANY_GROUPS * MANY_MICROBATCHES
    batch = 20  # the processor clock is coarse
    return cpu_s(lambda: [water_fill(alpha_G, tau_G, count) for _ in range(batch)], repeats) / batch


def data_parallel(
    rng: np.random.Generator, counts: list[int], num_microbatches: int
) -> tuple[PlanningProblem, Candidate, float]:
    """Sets of alike devices with shares drawn at random; the step time of the best shares."""
    seconds = [float(s) for s in rng.uniform(0.02, 0.3, len(counts))]
    devices = [
        make_device(f"k{k}-{i}", kind=f"k{k}", zone=f"z{k % 2}")
        for k, count in enumerate(counts)
        for i in range(count)
    ]
    profile = profile_of({f"k{k}": [s / 12] * 4 for k, s in enumerate(seconds)}, param_bytes=1e6)
    problem = make_problem(make_cluster(devices), profile, batch_samples=num_microbatches)
    problem = replace(problem, backlog_usd=float(rng.uniform(0, 1)))
    shares = 1 + rng.multinomial(num_microbatches - len(devices), [1 / len(devices)] * len(devices))
    groups = [make_group([d], (0, 4), (1,) * int(n)) for d, n in zip(devices, shares, strict=True)]
    plan, cost = make_plan(*groups), CostModel(problem)
    estimate = cost.evaluate(plan.groups, plan.schedule)
    period_s = np.repeat(seconds, counts)
    best = water_fill(period_s, period_s, num_microbatches)
    best_s = float((best * period_s).max()) + estimate.sync_s + estimate.update_s
    return problem, Candidate(plan, estimate, cost.score(estimate)), best_s


def mixed_integer_gap(rng: np.random.Generator) -> float:
    """Relative difference in step time: the slot's problem without rows, and water-filling."""
    counts = [int(c) for c in rng.integers(1, 9, int(rng.integers(1, 8)))]
    problem, drawn, best_s = data_parallel(rng, counts, int(rng.integers(2, 9)) * sum(counts))
    table = slot_table(CostModel(problem), drawn, ())
    least = -table.backlog_usd * table.usd_per_s  # J of an endless step
    found = SlotProgram(1, len(table.sets), 0).best([table], (), least, 60.0)
    assert found is not None, "the solver found no shares"
    taken = SlotAssignment(60.0).solve(problem, (drawn, IDLE), ()).candidate.estimate.step_s
    return max(abs(step_s - best_s) / best_s for step_s in (table.step_s(found[1]), taken))


def many(rng: np.random.Generator, repeats: int) -> dict[str, float]:
    """Processor time of a slot's assignment and of its marginal values at many groups."""
    counts = [MANY_GROUPS // MANY_SETS] * MANY_SETS
    counts[0] += MANY_GROUPS - sum(counts)
    problem, drawn, best_s = data_parallel(rng, counts, MANY_GROUPS * MANY_MICROBATCHES)
    assignment, cost = SlotAssignment(60.0), CostModel(problem)
    free = assignment.solve(problem, (drawn, IDLE), ()).candidate.plan
    read = sum(g.num_samples for g in free.groups if g.device_ids[0].startswith("k0-"))
    share = min(1.0, read / free.num_samples + 0.05)  # so that it binds
    rows = make_rows([LimitOptions(pool="k0", min_share=share)])
    first_s = cpu_s(lambda: assignment.solve(problem, (drawn, IDLE), rows), 1)
    solved = assignment.solve(problem, (drawn, IDLE), ())
    return {
        "groups": MANY_GROUPS,
        "sets": MANY_SETS,
        "first_s": first_s,  # compiled and CVXPY imported
        "rows_s": cpu_s(lambda: assignment.solve(problem, (drawn, IDLE), rows), repeats),
        "no_rows_s": cpu_s(lambda: assignment.solve(problem, (drawn, IDLE), ()), repeats),
        "margins_s": cpu_s(lambda: marginal_values(cost, solved.candidate, ()), repeats),
        "rel_diff": abs(solved.candidate.estimate.step_s - best_s) / best_s,
    }


def run(options: argparse.Namespace) -> Result:
    """Random cases against solvers, then the processor time at many groups."""
    rng = np.random.default_rng(options.seed)
    cases = 20 if options.quick else 200
    milp_gaps = [milp_gap(rng) for _ in range(cases)]
    mixed_gaps = [mixed_integer_gap(rng) for _ in range(10 if options.quick else 60)]
    fill_s = water_fill_cpu_s(rng, 20)
    large = many(rng, 2 if options.quick else 5)
    figures = (
        Figure("milp_rel_diff_max", max(milp_gaps), "1", "<= 1e-9"),
        Figure("cpu_ms_g1024", 1e3 * fill_s, "ms", "<= 0.2"),
        Figure("mixed_integer_rel_diff_max", max(*mixed_gaps, large["rel_diff"]), "1", "<= 1e-9"),
        Figure("mixed_integer_cpu_s_g1024", large["rows_s"], "s", "<= 0.3"),
        Figure("margins_cpu_s_g1024", large["margins_s"], "s"),
    )
    return Result(figures, (large,), {"cases": cases, "mixed_integer_cases": len(mixed_gaps)})


if __name__ == "__main__":
    main("assignment", run)
