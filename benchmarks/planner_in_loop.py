"""The real strategy in the loop: a search in every slot, against the oracle on the plan library.

States, money and queue are those of the reference world; the plan of every slot comes from the
joint strategy, which searches at the slot's price of money. A strategy is kept for every state of
the cluster, so that it remembers what it searched when it was last there. The short form draws
the state of every slot anew: a few hundred slots then see them all.
"""

import argparse
import time
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from benchmarks.control_law import Setting, reference_setting
from benchmarks.reference_world import oracle, path_shares
from benchmarks.result import Figure, Result, main
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.drift import Drift
from orchestrator.planning.queues import Queues
from orchestrator.simulation.environments import IntArray
from orchestrator.strategies.registry import Strategy, make_strategy

TAU_RELAXATIONS = 8.0
QUICK_TAU_SLOTS = 12.0
"""Time constant of the short form, whose states relax in one slot."""


@dataclass
class Planner:
    """One strategy a state, and what their searches took."""

    setting: Setting
    cpu_ms: list[float] = field(default_factory=list)

    @cached_property
    def _strategies(self) -> dict[int, Strategy]:
        states = range(self.setting.world.environment.num_states)
        return {state: make_strategy("joint") for state in states}

    def plan(
        self, state: int, weight: float, backlog_usd: float, incumbent: Plan | None
    ) -> Candidate | None:
        """The best plan of J >= 0; None: idle."""
        world = self.setting.world
        cluster = world.state(state)
        problem: PlanningProblem = replace(
            world.problem(cluster),
            penalty_weight=weight,
            backlog_usd=backlog_usd,
            incumbent=incumbent,
        )
        started_s = time.process_time()
        found = self._strategies[state].propose(problem, out_of_time=lambda: False)
        self.cpu_ms.append(1e3 * (time.process_time() - started_s))
        worthwhile = [c for c in found if not c.plan.is_idle and c.score >= 0]
        drift = Drift.of(problem, world.slot_s)
        return max(worthwhile, key=lambda c: drift.slot_score(c.estimate), default=None)


def measure(
    setting: Setting, state_T: IntArray, tau_slots: float
) -> tuple[dict[str, float], list[float]]:
    """Run the loop over the path; rate over the oracle's, cost over budget, CPU of the searches."""
    world, planner = setting.world, Planner(setting)
    control = setting.control(setting.weight(tau_slots))
    queues, incumbent = Queues(control.backlog_usd), None
    samples = dollars = 0.0
    for state in state_T.tolist():
        chosen = planner.plan(state, control.penalty_weight, queues.backlog_usd, incumbent)
        bill_usd = 0.0
        if chosen:
            samples += chosen.estimate.samples_per_s * world.slot_s
            bill_usd = chosen.estimate.cost_usd_per_s * world.slot_s
            incumbent = chosen.plan
        dollars += bill_usd
        queues = queues.update(bill_usd, world.budget_usd_per_s, world.slot_s)
    seconds = world.slot_s * len(state_T)
    owed = (queues.backlog_usd - control.backlog_usd) / seconds
    shares = path_shares(state_T, world.environment.num_states)
    best = oracle(setting.table, shares, world.budget_usd_per_s + owed)
    figures = {
        "oracle_pct": 100.0 * samples / seconds / best.rate_samples_per_s,
        "cost_over_budget": dollars / seconds / world.budget_usd_per_s,
    }
    return figures, planner.cpu_ms


def run(options: argparse.Namespace) -> Result:
    """Figure 14 of ``benchmarks.acceptance``."""
    setting, rng = reference_setting(), np.random.default_rng(options.seed)
    environment = setting.world.environment
    if options.quick:
        state_T = rng.choice(
            environment.num_states, size=options.slots or 200, p=environment.shares
        )
        tau_slots = QUICK_TAU_SLOTS
    else:
        state_T = environment.walk(options.slots or 5000, rng)
        tau_slots = TAU_RELAXATIONS * setting.relaxation_slots
    found, cpu_ms = measure(setting, state_T, tau_slots)
    warm_ms = cpu_ms[len(cpu_ms) // 10 :]
    figures = (
        Figure("oracle_pct", found["oracle_pct"], "%", ">= 98.5"),
        Figure("cost_over_budget", found["cost_over_budget"], "1", "<= 1.01"),
        Figure("epochs", float(len(state_T)), "slots", "" if options.quick else ">= 5000"),
        Figure("plan_cpu_ms_p95", float(np.percentile(warm_ms, 95)), "ms"),
        Figure("plan_cpu_ms_mean", float(np.mean(warm_ms)), "ms"),
    )
    return Result(figures)


if __name__ == "__main__":
    main("planner_in_loop", run, [("slots", 0, "slots to run; 0: as many as the figure asks")])
