"""S5: several jobs on one fleet whose kinds they rank differently, against a max-min scheduler."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog

from benchmarks.scenarios import static
from benchmarks.scenarios.files import Case, ScenarioFile
from benchmarks.scenarios.rows import OURS, Row
from orchestrator.simulation.environments import FloatArray

SHARED = "all jobs at once"


def run(file: ScenarioFile, options: argparse.Namespace) -> list[Row]:
    """Every model by itself, then all that were asked for at once."""
    cases = file.cases(quick=options.quick)
    rows = [row for case in cases for row in static.run_case(case, options)]
    return [*rows, *_shared(file.cases(quick=False), options)]


def _shared(cases: Sequence[Case], options: argparse.Namespace) -> list[Row]:
    """Least normalised throughput of any job, ours against max-min."""
    contests = [static.contest_of(case, options) for case in cases]
    pools = list(cases[0].counts)
    rate_JK = np.array([[_rate(c, [pool]) for pool in pools] for c in contests])
    equal_J = rate_JK.sum(axis=1) / len(cases)
    ours_J = np.array([_rate(c, pools) for c in contests]) / len(cases) / equal_J
    fair, share_JK = max_min(rate_JK / equal_J[:, None])
    best_kind_J = rate_JK.max(axis=1) / len(cases) / equal_J
    kinds = ", ".join(
        f"{case.name} on {pools[int(np.argmax(share_JK[j]))]}" for j, case in enumerate(cases)
    )
    unit = "least share of any job; 1: an equal share of every kind alone"
    plain = Row(cases[0].file.name, SHARED, "", "strong", 0.0)

    def row(changes: Mapping[str, object]) -> Row:
        return replace(plain, **changes)  # type: ignore[arg-type]

    return [
        row({"strategy": OURS, "role": "ours", "samples_per_s": float(ours_J.min()), "note": unit}),
        row({"strategy": "max-min by rates", "samples_per_s": fair, "note": f"mostly {kinds}"}),
        row({"strategy": "best kind in turn", "samples_per_s": float(best_kind_J.min()),
             "note": "every job a fifth of the time on its fastest kind alone"}),
    ]  # fmt: skip


def _rate(contest: static.Contest, pools: list[str]) -> float:
    found = static.joint_on(contest, pools)
    return found.estimate.samples_per_s if found else 0.0


def max_min(value_JK: FloatArray) -> tuple[float, FloatArray]:
    """The largest least sum_k X_jk v_jk, with sum_j X_jk <= 1 and sum_k X_jk <= 1.

    Args:
        value_JK: What job j makes of kind k, all of its devices and all of the time.

    Returns:
        The value, and X: how much of the time job j has kind k.
    """
    jobs, kinds = value_JK.shape
    value = np.kron(np.eye(jobs), np.ones(kinds)) * -value_JK.reshape(-1)  # J rows over X
    job = np.kron(np.eye(jobs), np.ones(kinds))
    kind = np.kron(np.ones(jobs), np.eye(kinds))
    least = np.concatenate([np.ones(jobs), np.zeros(jobs + kinds)])
    solved = linprog(
        np.concatenate([np.zeros(jobs * kinds), [-1.0]]),
        A_ub=np.column_stack([np.vstack([value, job, kind]), least]),
        b_ub=1.0 - least,
        method="highs",
    )
    assert solved.status == 0, f"max-min ended with {solved.message!r}"
    return -float(solved.fun), solved.x[:-1].reshape(jobs, kinds)
