"""The control law in the reference world: sample-path bound, budget, gap against the weight V."""

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.reference_world import (
    Library,
    Oracle,
    World,
    oracle,
    path_shares,
    reference_library,
    reference_world,
)
from benchmarks.result import Figure, Result, main
from orchestrator.planning.queues import Queues, overspend_bound_usd
from orchestrator.simulation.environments import FloatArray, IntArray
from orchestrator.simulation.table import PlanTable, TableControl, TableRun, run_table

TAU_RELAXATIONS = 16.0
"""Time constant of the steady-state figures, in relaxation times of the environment: what
``kappa: auto`` gives a week of the reference world, H/20 of 168 h. The gap falls as 1/tau_V, so
less than about 10 miss the bar in this world; ``gap_at_8_pct`` shows the shortest one asked for."""

LEAST_RELAXATIONS = 8.0

SLOPE_TAUS = (16.0, 32.0, 64.0, 128.0)
"""Time constants of the slopes, in relaxation times; states drawn anew relax in one slot. Below
the first one the backlog swings over all prices of the frontier, and the law is flatter."""

FINEST_PCT = 0.1
"""The slopes are fitted down to this gap."""

NOISE_PCT = 0.01
"""Gaps below this are not told apart."""


@dataclass(frozen=True, slots=True)
class Setting:
    """World, table and long-run oracle, once."""

    world: World
    plan_library: Library
    best: Oracle

    @property
    def table(self) -> PlanTable:
        """Plans and states."""
        return self.plan_library.table

    @property
    def relaxation_slots(self) -> float:
        """Of the slowest chain of the environment."""
        return self.world.environment.relaxation_slots

    def weight(self, tau_slots: float) -> float:
        """V of a time constant: tau_V = V lambda / b."""
        world = self.world
        return (
            tau_slots
            * world.slot_s
            * world.budget_usd_per_s
            / self.best.price_of_money_samples_per_usd
        )

    def control(self, weight: float, *, price_ratio: float = 1.0) -> TableControl:
        """The law with this V and Q_0 = V lambda times a ratio; the ledger guard is off."""
        return TableControl(
            penalty_weight=weight,
            budget_usd_per_s=self.world.budget_usd_per_s,
            slot_s=self.world.slot_s,
            backlog_usd=price_ratio * weight * self.best.price_of_money_samples_per_usd,
        )

    def gap_pct(self, run: TableRun, state_T: IntArray, control: TableControl) -> float:
        """Below the oracle of this very path, which may spend what the queue owes more at the end.

        Without that, the gap would mostly tell where in its swing the queue happened to end.
        """
        owed_usd = float(run.backlogs_usd[-1]) - control.backlog_usd
        budget = control.budget_usd_per_s + owed_usd / (run.slot_s * len(run.plans))
        best = oracle(self.table, path_shares(state_T, len(self.table.rates)), budget)
        return 100.0 * (1.0 - run.rate_samples_per_s / best.rate_samples_per_s)


def reference_setting() -> Setting:
    """The reference world at its own budget."""
    world, library = reference_world(), reference_library()
    best = oracle(library.table, world.environment.shares, world.budget_usd_per_s)
    return Setting(world, library, best)


def bound_use(setting: Setting, run: TableRun, control: TableControl) -> tuple[int, float]:
    """Slots that broke the sample-path bound, and the largest share of it that was used.

    Source: docs/model.md, section 4.2 (G1).
    """
    bound_usd = (
        overspend_bound_usd(
            control.penalty_weight * setting.table.best_ratio_samples_per_usd,
            control.budget_usd_per_s,
            slot_bill_max_usd=float(setting.table.costs.max()) * control.slot_s,
            slot_s=control.slot_s,
        )
        - control.backlog_usd
    )
    allowed_T = control.budget_usd_per_s * control.slot_s * np.arange(1, len(run.bills_usd) + 1)
    over_T = np.cumsum(run.bills_usd) - allowed_T
    broken = int((over_T > bound_usd * (1 + 1e-12)).sum())
    return broken, 100.0 * float(over_T.max()) / bound_usd


def adversary(setting: Setting, num_slots: int, *, weight: float, pause_s: float) -> TableRun:
    """A search that returns the dearest plan of J >= 0, in whatever state makes it dearest."""
    table, world = setting.table, setting.world
    offered = table.offered_rates
    queues, slot_s = Queues(), world.slot_s
    plans, samples, bills, backlogs = [], [], [], []
    for _ in range(num_slots):
        score_SK = weight * offered - queues.backlog_usd * table.costs
        cost_SK = np.where(score_SK >= 0, table.costs, -1.0)
        state, plan = np.unravel_index(int(cost_SK.argmax()), cost_SK.shape)
        bill_usd = float(table.costs[state, plan]) * slot_s
        queues = queues.update(bill_usd, world.budget_usd_per_s, slot_s)
        plans.append(int(plan))
        samples.append(float(table.rates[state, plan]) * (slot_s - pause_s))
        bills.append(bill_usd)
        backlogs.append(queues.backlog_usd)
    return TableRun(
        slot_s, np.array(plans), np.array(samples), np.array(bills), np.array(backlogs)
    )  # fmt: skip


def slope(
    setting: Setting, state_T: IntArray, relaxation_slots: float, kind: str
) -> tuple[float, list[dict[str, object]]]:
    """Slope of log gap over log V, down to a gap of 0.1 %, and the points it is fitted to.

    Where every slot draws its state anew nothing that is kept pays for itself: there changes of
    plan count as free, as in the theory.
    """
    points: list[dict[str, object]] = []
    x, y = [], []
    for tau in SLOPE_TAUS:
        control = setting.control(setting.weight(tau * relaxation_slots))
        if relaxation_slots == 1:
            control = replace(control, least_pause_slots=0.0)
        run = run_table(setting.table, state_T, control)
        gap_pct = setting.gap_pct(run, state_T, control)
        points.append(
            {
                "states": kind,
                "tau_v_relaxations": tau,
                "v_usd2_per_sample": control.penalty_weight,
                "gap_pct": gap_pct,
                "cost_over_budget": run.cost_usd_per_s / control.budget_usd_per_s,
            }
        )
        x.append(np.log(control.penalty_weight))
        y.append(np.log(max(gap_pct, NOISE_PCT)))
        if gap_pct <= FINEST_PCT:
            break
    return float(np.polyfit(x, y, 1)[0]), points


def redrawn(shares: FloatArray, num_slots: int, rng: np.random.Generator) -> IntArray:
    """States drawn anew in every slot."""
    return rng.choice(len(shares), size=num_slots, p=shares)


def run(options: argparse.Namespace) -> Result:
    """Figures 7 to 10 of ``benchmarks.acceptance``."""
    setting = reference_setting()
    environment = setting.world.environment
    rng = np.random.default_rng(options.seed)
    num_slots = 100_000 if options.quick else 400_000
    tau_slots = TAU_RELAXATIONS * setting.relaxation_slots
    weight = setting.weight(tau_slots)
    state_T = environment.walk(num_slots, rng)
    control = setting.control(weight)
    started_s = time.process_time()
    steady = run_table(setting.table, state_T, control)
    slots_per_cpu_s = num_slots / (time.process_time() - started_s)
    short_control = setting.control(weight * LEAST_RELAXATIONS / TAU_RELAXATIONS)
    short = run_table(setting.table, state_T, short_control)
    cold_control = replace(control, backlog_usd=0.0)
    cold = run_table(setting.table, state_T[: num_slots // 3], cold_control)
    broken, use_pct = 0, 0.0
    for seen, law in ((steady, control), (cold, cold_control)):
        more, used_pct = bound_use(setting, seen, law)
        broken, use_pct = broken + more, max(use_pct, used_pct)
    worst_pct = 0.0
    for pause_s in (0.0, 30.0):
        fought = adversary(setting, num_slots // 30, weight=weight, pause_s=pause_s)
        more, used_pct = bound_use(setting, fought, cold_control)
        broken, worst_pct = broken + more, max(worst_pct, used_pct)
    slope_markov, points = slope(setting, state_T, setting.relaxation_slots, "markov")
    independent_T = redrawn(environment.shares, num_slots, rng)
    slope_iid, points_iid = slope(setting, independent_T, 1.0, "iid")
    figures = (
        Figure("violations", float(broken), "slots", "<= 0"),
        Figure("bound_use_max_pct", use_pct, "%"),
        Figure("adversary_bound_use_max_pct", worst_pct, "%", "<= 100"),
        Figure(
            "cost_over_budget", steady.cost_usd_per_s / setting.world.budget_usd_per_s, "1",
            "<= 1.001",
        ),
        Figure("gap_pct", setting.gap_pct(steady, state_T, control), "%", "<= 0.5"),
        Figure("gap_at_8_pct", setting.gap_pct(short, state_T, short_control), "%"),
        Figure("tau_v_relaxations", tau_slots / setting.relaxation_slots, "1", ">= 8"),
        Figure("slope_markov", slope_markov, "1", "<= -0.6"),
        Figure("slope_iid", slope_iid, "1", "<= -1"),
        Figure("slots_per_cpu_s", slots_per_cpu_s, "1/s", ">= 2000"),
        Figure("points", float(len(points) + len(points_iid)), ""),
    )  # fmt: skip
    return Result(figures, (*points, *points_iid))


if __name__ == "__main__":
    main("control_law", run)
