"""The control law when every change of plan pauses the work: 30 and 60 s, with hysteresis."""

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.control_law import reference_setting
from benchmarks.result import Figure, Result, main
from orchestrator.simulation.table import run_table

TAU_RELAXATIONS = 16.0
PAUSES_S = (0.0, 30.0, 60.0)


def run(options: argparse.Namespace) -> Result:
    """Figure 16 of ``benchmarks.acceptance``: shares of an oracle that never pauses."""
    setting, rng = reference_setting(), np.random.default_rng(options.seed)
    state_T = setting.world.environment.walk(60_000 if options.quick else 300_000, rng)
    law = setting.control(setting.weight(TAU_RELAXATIONS * setting.relaxation_slots))
    pct, rows, switches = {}, [], 0.0
    for pause_s in PAUSES_S:
        control = replace(law, pause_s=pause_s)
        run = run_table(setting.table, state_T, control)
        pct[pause_s] = 100.0 - setting.gap_pct(run, state_T, control)
        if pause_s:
            switches = max(switches, run.switches_per_hour)
        rows.append(
            {
                "pause_s": pause_s,
                "oracle_pct": pct[pause_s],
                "switches_per_h": run.switches_per_hour,
                "cost_over_budget": run.cost_usd_per_s / control.budget_usd_per_s,
            }
        )
    figures = (
        Figure("pause30_pct", pct[30.0], "%", ">= 95"),
        Figure("pause60_pct", pct[60.0], "%", ">= 93"),
        Figure("switches_per_h_max", switches, "1/h", "<= 4"),
    )
    return Result(figures, tuple(rows))


if __name__ == "__main__":
    main("reconfiguration", run)
