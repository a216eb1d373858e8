"""One week and one day under a hard cap, against the best that hindsight could have done."""

import argparse
from math import fsum

import numpy as np

from benchmarks.control_law import Setting, reference_setting
from benchmarks.reference_world import HOUR_S, oracle, path_shares
from benchmarks.result import Figure, Result, main
from orchestrator.planning.lyapunov import DEFAULT_KAPPA
from orchestrator.planning.queues import RATIO_HEADROOM, penalty_weight
from orchestrator.simulation.table import TableControl, run_table

DAY_HOURS = 24.0
WEEK_HOURS = 7 * DAY_HOURS


def law_of(setting: Setting, hours: float) -> TableControl:
    """The law of a run of so many hours: V from kappa, Q_0 = V lambda, ledger guard, hard cap."""
    world, horizon_s = setting.world, hours * HOUR_S
    rho = setting.table.best_ratio_samples_per_usd
    price = setting.best.price_of_money_samples_per_usd
    weight = penalty_weight(DEFAULT_KAPPA, world.budget_usd_per_s, horizon_s, rho, price)
    return TableControl(
        penalty_weight=weight,
        budget_usd_per_s=world.budget_usd_per_s,
        slot_s=world.slot_s,
        backlog_usd=weight * price,
        line_usd=weight * (RATIO_HEADROOM * rho - price),
        total_usd=world.budget_usd_per_s * horizon_s,
    )


def measure(
    setting: Setting, hours: float, num_paths: int, rng: np.random.Generator
) -> list[dict[str, float]]:
    """Sample paths of one length: share of hindsight, and dollars above the cap."""
    control = law_of(setting, hours)
    num_slots = round(hours * HOUR_S / control.slot_s)
    rows = []
    for path in range(num_paths):
        state_T = setting.world.environment.walk(num_slots, rng)
        run = run_table(setting.table, state_T, control)
        shares = path_shares(state_T, len(setting.table.rates))
        best = oracle(setting.table, shares, control.budget_usd_per_s)
        rows.append(
            {
                "hours": hours,
                "path": path,
                "hindsight_pct": 100.0 * run.rate_samples_per_s / best.rate_samples_per_s,
                "spent_over_cap": fsum(run.bills_usd) / control.total_usd,
                "overspend_usd": max(0.0, fsum(run.bills_usd) - control.total_usd),
            }
        )
    return rows


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    """A column of the table as numbers."""
    return [row[name] for row in rows]


def run(options: argparse.Namespace) -> Result:
    """Figures 11 and 12 of ``benchmarks.acceptance``."""
    setting, rng = reference_setting(), np.random.default_rng(options.seed)
    weeks = measure(setting, WEEK_HOURS, 12 if options.quick else 100, rng)
    days = measure(setting, DAY_HOURS, 60 if options.quick else 400, rng)
    week_pct, day_pct = column(weeks, "hindsight_pct"), column(days, "hindsight_pct")
    figures = (
        Figure("week_mean_pct", float(np.mean(week_pct)), "%", ">= 99"),
        Figure("week_p5_pct", float(np.percentile(week_pct, 5)), "%", ">= 98.5"),
        Figure("week_overspend_max_usd", max(column(weeks, "overspend_usd")), "$", "<= 0"),
        Figure("day_mean_pct", float(np.mean(day_pct)), "%", ">= 97.5"),
        Figure("day_overspend_max_usd", max(column(days, "overspend_usd")), "$", "<= 0"),
        Figure("day_p5_pct", float(np.percentile(day_pct, 5)), "%"),
    )
    return Result(figures, (*weeks[:10], *days[:10]))


if __name__ == "__main__":
    main("finite_horizon", run)
