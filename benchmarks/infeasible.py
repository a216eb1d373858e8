"""The alarm of a budget and a progress floor that cannot both be kept, and its false alarms."""

import argparse
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.control_law import Setting, reference_setting
from benchmarks.reference_world import HOUR_S, oracle, path_shares
from benchmarks.result import Figure, Result, main
from orchestrator.core.durable import AlarmMark
from orchestrator.planning.alarm import CHECKS_PER_WINDOW, InfeasibilityAlarm, alarm_window_s
from orchestrator.simulation.environments import IntArray
from orchestrator.simulation.table import run_table

TAU_RELAXATIONS = 16.0
SHORT_SLOTS, LONG_SLOTS = 3 * 1440, 20 * 1440
NEVER_WINDOWS = 99.0
IMPOSSIBLE, POSSIBLE = 1.05, 0.98
"""Progress floors, in units of the most that the budget buys on the path."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What the alarm said along a path."""

    first_windows: float  # when it first fired, in windows; infinite: never
    share: float  # of the checks that had a whole window behind them


def watch(setting: Setting, state_T: IntArray, floor_ratio: float) -> Watch:
    """Run the law with a floor, and show the alarm the end of every slot."""
    budget, slot_s = setting.world.budget_usd_per_s, setting.world.slot_s
    shares = path_shares(state_T, len(setting.table.rates))
    reachable = oracle(setting.table, shares, budget).rate_samples_per_s
    control = replace(
        setting.control(setting.weight(TAU_RELAXATIONS * setting.relaxation_slots)),
        floor_samples_per_s=floor_ratio * reachable,
        progress_weight=budget / reachable,
    )
    run = run_table(setting.table, state_T, control)
    alarm = InfeasibilityAlarm(alarm_window_s(slot_s, HOUR_S), budget, control.floor_samples_per_s)
    spent_T, samples_T = np.cumsum(run.bills_usd), np.cumsum(run.samples)
    fired: list[float] = []
    alarm, _ = alarm.look(AlarmMark(0.0, control.backlog_usd, 0.0, control.penalty_weight, 0.0, 0))
    checks, known = 0, alarm.marks
    for slot in range(len(state_T)):
        mark = AlarmMark(
            time_s=(slot + 1) * slot_s,
            backlog_usd=float(run.backlogs_usd[slot]),
            progress_usd=float(run.progress_usd[slot]),
            penalty_weight=control.penalty_weight,
            spent_usd=float(spent_T[slot]),
            samples=round(float(samples_T[slot])),
        )
        alarm, shortage = alarm.look(mark)
        checks += alarm.marks != known and len(alarm.marks) > CHECKS_PER_WINDOW
        known = alarm.marks
        if shortage:
            fired.append(mark.time_s)
    first = fired[0] / alarm.window_s if fired else float("inf")
    return Watch(first, len(fired) / max(1, checks))


def run(options: argparse.Namespace) -> Result:
    """Figure 18 of ``benchmarks.acceptance``.

    How soon the alarm fires is seen on short paths, how often it is wrong on long ones.
    """
    setting, rng = reference_setting(), np.random.default_rng(options.seed)
    scale = 1 if options.quick else 5
    rows: list[dict[str, object]] = []
    for ratio, num_paths, num_slots in (
        (IMPOSSIBLE, 30 * scale, SHORT_SLOTS),
        (POSSIBLE, 8 * scale, LONG_SLOTS),
    ):
        for _ in range(num_paths):
            state_T = setting.world.environment.walk(num_slots, rng)
            seen = watch(setting, state_T, ratio)
            rows.append(
                {
                    "floor_ratio": ratio,
                    "slots": num_slots,
                    "first_alarm_windows": min(seen.first_windows, NEVER_WINDOWS),
                    "alarm_share_pct": 100.0 * seen.share,
                }
            )

    def column(ratio: float, name: str) -> list[float]:
        return [float(str(row[name])) for row in rows if row["floor_ratio"] == ratio]

    first = column(IMPOSSIBLE, "first_alarm_windows")
    figures = (
        Figure("first_alarm_windows", float(np.median(first)), "windows", "<= 1"),
        Figure("first_within_one_pct", 100.0 * float(np.mean(np.array(first) <= 1.0)), "%"),
        Figure("alarm_share_1p05_pct", float(np.mean(column(IMPOSSIBLE, "alarm_share_pct"))), "%"),
        Figure(
            "false_share_0p98_pct", float(np.mean(column(POSSIBLE, "alarm_share_pct"))), "%", "<= 5"
        ),
    )
    return Result(figures, tuple(rows[:8] + rows[-8:]))


if __name__ == "__main__":
    main("infeasible", run)
