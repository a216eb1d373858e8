"""The 18 figures that the project is held to, from every benchmark that measures one of them.

The bars stand here once more, whatever the benchmarks hold themselves to. A benchmark that is
missing or ends in an error falls short. All run in one process, so that what the control
benchmarks have in common is built once.
"""

import argparse
import io
import json
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass

from benchmarks.result import Figure, Result, main

MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Demand:
    """One figure of the table: who measures it, and what it must reach."""

    number: int
    benchmark: str
    keys: dict[str, str]  # figure -> bar
    full_only: tuple[str, ...] = ()  # figures too long for the short form


DEMANDS = (
    Demand(
        1,
        "time_model",
        {
            "bias_mean_pct": "|| 4",
            "abs_median_pct": "<= 3",
            "abs_p95_pct": "<= 12",
            "abs_worst_pct": "<= 25",
        },
    ),
    Demand(
        2,
        "time_model",
        {"chosen_mean_pct": "|| 5", "chosen_worst_pct": "|| 18", "reranked_worst_pct": "|| 1e-6"},
    ),
    Demand(
        3,
        "assignment",
        {
            "milp_rel_diff_max": "<= 1e-9",
            "cpu_ms_g1024": "<= 0.2",
            "mixed_integer_rel_diff_max": "<= 1e-9",
        },
    ),
    Demand(
        4,
        "plan_gap",
        {
            "gap_mean_pct": "<= 0.1",
            "gap_p95_pct": "<= 0.5",
            "gap_worst_pct": "<= 2",
            "exact_pct": ">= 90",
            "search_cpu_s": "<= 0.4",
        },
    ),
    Demand(
        5,
        "plan_time",
        {
            "n8_cold_s": "<= 0.5",
            "n8_warm_s": "<= 0.05",
            "n32_cold_s": "<= 5",
            "n32_warm_s": "<= 0.5",
        },
        full_only=("n32_cold_s", "n32_warm_s"),
    ),
    Demand(
        6,
        "plan_time",
        {
            "first_plan_s_max": "<= 0.3",
            "half_second_pct_min": ">= 97.5",
            "warm_0p2s_pct_min": ">= 97",
        },
    ),
    Demand(7, "control_law", {"violations": "<= 0", "adversary_bound_use_max_pct": "<= 100"}),
    Demand(8, "control_law", {"cost_over_budget": "<= 1.001"}),
    Demand(9, "control_law", {"gap_pct": "<= 0.5", "tau_v_relaxations": ">= 8"}),
    Demand(10, "control_law", {"slope_markov": "<= -0.6", "slope_iid": "<= -1"}),
    Demand(
        11,
        "finite_horizon",
        {"week_mean_pct": ">= 99", "week_p5_pct": ">= 98.5", "week_overspend_max_usd": "<= 0"},
    ),
    Demand(12, "finite_horizon", {"day_mean_pct": ">= 97.5", "day_overspend_max_usd": "<= 0"}),
    Demand(
        13,
        "baselines",
        {"over_static_pct": ">= 10", "over_tuned_cap_pct": ">= 3", "over_greedy_ratio": ">= 2"},
    ),
    Demand(
        14,
        "planner_in_loop",
        {"oracle_pct": ">= 98.5", "cost_over_budget": "<= 1.01", "epochs": ">= 5000"},
        full_only=("epochs",),
    ),
    Demand(15, "robustness", {"speed_error_pct": ">= 95", "stale_state_pct": ">= 97"}),
    Demand(
        16,
        "reconfiguration",
        {"pause30_pct": ">= 95", "pause60_pct": ">= 93", "switches_per_h_max": "<= 4"},
    ),
    Demand(17, "frames", {"redrawn_pct": ">= 99.5", "wall_clock_pct": ">= 98.5"}),
    Demand(18, "infeasible", {"first_alarm_windows": "<= 1", "false_share_0p98_pct": "<= 5"}),
)


def measured(name: str, *, quick: bool, seed: int) -> dict[str, object]:
    """What a benchmark prints; its ``error`` when it prints nothing of use."""
    printed, arguments = io.StringIO(), sys.argv
    sys.argv = [name, "--json", "--seed", str(seed), *(["--quick"] * quick)]
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it was imported before: as it should
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit:
        pass
    except Exception as error:  # whatever went wrong, the others are measured
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        sys.argv = arguments
    try:
        report: dict[str, object] = json.loads(printed.getvalue())
    except ValueError:
        return {"error": f"printed no JSON: {printed.getvalue()[:200]!r}"}
    return {"error": report["skipped"]} if "skipped" in report else report


def judged(demand: Demand, report: dict[str, object], *, quick: bool) -> list[Figure]:
    """The figures of a demand, named ``number.key``, against the bars of this module."""
    figures = report.get("figures", [])
    assert isinstance(figures, list)
    values = {figure["name"]: figure for figure in figures}
    found = []
    for key, wanted in demand.keys.items():
        name = f"{demand.number}.{demand.benchmark}.{key}"
        bar = "" if quick and key in demand.full_only else wanted
        if key not in values and quick and key in demand.full_only:
            continue
        if key not in values:
            found.append(Figure(name, -1.0, MISSING, "== 0"))
            continue
        value = float(values[key]["value"])
        if bar.startswith("||"):
            value, bar = abs(value), bar.replace("||", "<=")
        found.append(Figure(name, value, values[key]["unit"], bar))
    return found


def run(options: argparse.Namespace) -> Result:
    """Every benchmark once, then figure by figure."""
    names = list(dict.fromkeys(demand.benchmark for demand in DEMANDS))
    reports = {name: measured(name, quick=options.quick, seed=options.seed) for name in names}
    figures = [
        figure
        for demand in DEMANDS
        for figure in judged(demand, reports[demand.benchmark], quick=options.quick)
    ]
    table = [
        {"benchmark": name, "cpu_s": report.get("cpu_s", 0.0), "error": report.get("error", "")}
        for name, report in reports.items()
    ]
    return Result(tuple(figures), tuple(table))


if __name__ == "__main__":
    main("acceptance", run)
