"""The control law with wrong figures: every device's speed off by 10 %, a state one slot old."""

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.control_law import Setting, reference_setting
from benchmarks.reference_world import all_states, price_plans
from benchmarks.result import Figure, Result, main
from orchestrator.core.cluster import ClusterState
from orchestrator.simulation.environments import IntArray
from orchestrator.simulation.table import PlanTable, run_table

SPEED_ERROR = 0.10
"""Standard deviation of the logarithm of believed over true speed, of every device by itself."""

TAU_RELAXATIONS = 16.0


def misjudged(cluster: ClusterState, error: dict[str, float]) -> ClusterState:
    """The cluster as a controller sees it that misjudges every device by a lasting factor."""
    devices = tuple(
        replace(device, slowdown=device.slowdown * error[device.device_id])
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def believed(setting: Setting, rng: np.random.Generator) -> PlanTable:
    """Rates and costs of the library's plans with misjudged speeds."""
    world = setting.world
    error = {
        d.device_id: float(np.exp(rng.normal(0.0, SPEED_ERROR))) for d in world.cluster.devices
    }
    clusters = [misjudged(cluster, error) for cluster in all_states(world)]
    return price_plans(world, setting.plan_library.plans, clusters)


def share_pct(
    setting: Setting,
    state_T: IntArray,
    thought: PlanTable | None,
    seen_T: IntArray | None,
) -> tuple[float, float]:
    """Percent of the oracle that knows everything, at what was spent; and cost over budget."""
    control = setting.control(setting.weight(TAU_RELAXATIONS * setting.relaxation_slots))
    run = run_table(setting.plan_library.fixed, state_T, control, believed=thought, seen_T=seen_T)
    pct = 100.0 - setting.gap_pct(run, state_T, control)
    return pct, run.cost_usd_per_s / control.budget_usd_per_s


def run(options: argparse.Namespace) -> Result:
    """Figure 15 of ``benchmarks.acceptance``."""
    setting, rng = reference_setting(), np.random.default_rng(options.seed)
    num_slots, num_draws = (20_000, 10) if options.quick else (50_000, 40)
    rows: list[dict[str, object]] = []
    for draw in range(num_draws):
        state_T = setting.world.environment.walk(num_slots, rng)
        pct, cost = share_pct(setting, state_T, believed(setting, rng), None)
        rows.append({"case": "speed", "draw": draw, "oracle_pct": pct, "cost_over_budget": cost})
        stale_T = np.concatenate([state_T[:1], state_T[:-1]])
        pct, cost = share_pct(setting, state_T, None, stale_T)
        rows.append({"case": "stale", "draw": draw, "oracle_pct": pct, "cost_over_budget": cost})

    def mean(case: str) -> float:
        return float(np.mean([float(str(r["oracle_pct"])) for r in rows if r["case"] == case]))

    figures = (
        Figure("speed_error_pct", mean("speed"), "%", ">= 95"),
        Figure("stale_state_pct", mean("stale"), "%", ">= 97"),
    )
    return Result(figures, tuple(rows))


if __name__ == "__main__":
    main("robustness", run)
