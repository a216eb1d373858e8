"""The control law against what people do without it, in the reference world at equal cost.

Every baseline but ours takes a plan by the state alone, so its rate and cost on a path follow
from the path's shares of states. One that costs more than the budget is duty-cycled down to it:
its rate times b/c. A plan that lacks a device waits, and costs nothing meanwhile.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from benchmarks.control_law import Setting, reference_setting
from benchmarks.peers import FORMS, predicted_s
from benchmarks.reference_world import (
    HOUR_S,
    World,
    all_states,
    oracle,
    path_shares,
    price_plans,
)
from benchmarks.result import Figure, Result, main
from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import microbatch_sizes
from orchestrator.errors import InfeasibleError
from orchestrator.simulation.environments import FloatArray, IntArray
from orchestrator.simulation.table import PlanTable, run_table
from orchestrator.strategies.registry import make_strategy

RECIPES = ("even-split", "proportional", "even-pipeline", "balanced-pipeline")
"""Strategies that ask nothing of money: their plan of every state."""

TAU_RELAXATIONS = 16.0
"""Time constant of our own control law, as in ``benchmarks.control_law``."""


def policy(table: PlanTable, choose: Callable[[FloatArray, FloatArray], int]) -> FloatArray:
    """(r, c) of every state, of the plan chosen from rates (-inf: cannot run) and costs."""
    offered = table.offered_rates
    picks = [choose(offered[s], table.costs[s]) for s in range(len(offered))]
    return np.array([(table.rates[s, k], table.costs[s, k]) for s, k in enumerate(picks)])


def greedy(rate_K: FloatArray, cost_K: FloatArray) -> int:
    """The fastest plan."""
    return int(np.argmax(rate_K))


def cheapest(rate_K: FloatArray, cost_K: FloatArray) -> int:
    """The plan with most samples per dollar; idle where nothing runs."""
    ratio_K = np.where(cost_K > 0, rate_K / np.maximum(cost_K, 1e-300), 0.0)
    return int(np.argmax(ratio_K))


def below_rate(limit_usd_per_s: float) -> Callable[[FloatArray, FloatArray], int]:
    """The fastest plan that costs no more an hour."""
    return lambda rate_K, cost_K: int(
        np.argmax(np.where(cost_K <= limit_usd_per_s * (1 + 1e-9), rate_K, -1.0))
    )


def below_price(limit_usd_per_sample: float) -> Callable[[FloatArray, FloatArray], int]:
    """The fastest plan that costs no more a sample."""
    return lambda rate_K, cost_K: int(
        np.argmax(np.where(cost_K <= limit_usd_per_sample * rate_K * (1 + 1e-9), rate_K, 0.0))
    )


def at_price(price_samples_per_usd: float) -> Callable[[FloatArray, FloatArray], int]:
    """The best plan at one price of money for ever."""
    return lambda rate_K, cost_K: int(np.argmax(rate_K - price_samples_per_usd * cost_K))


def recipe(setting: Setting, name: str) -> FloatArray:
    """(r, c) of every state, of a strategy's own plan; idle where it has none."""
    return np.array([_recipe_in(setting.world, name, c) for c in all_states(setting.world)])


def _recipe_in(world: World, name: str, cluster: ClusterState) -> tuple[float, float]:
    """With the largest microbatch that fits its memory, as its user would find by trying."""
    for size in microbatch_sizes(world.microbatch_samples):
        problem = replace(world.problem(cluster), microbatch_samples=size)
        try:
            found = make_strategy(name).propose(problem, out_of_time=lambda: False)
        except InfeasibleError:
            continue
        plan = next(c.plan for c in found if not c.plan.is_idle)
        table = price_plans(world, [plan], [cluster])
        return float(table.rates[0, 1]), float(table.costs[0, 1])
    return 0.0, 0.0


def static(table: PlanTable) -> list[FloatArray]:
    """(r, c) of every state, of every plan that never changes."""
    return [
        np.stack([table.runs[:, k] * table.rates[:, k], table.runs[:, k] * table.costs[:, k]], 1)
        for k in range(1, table.rates.shape[1])
    ]


def peers(setting: Setting) -> dict[str, list[FloatArray]]:
    """Policies of published planners: the plan that their own batch time makes the fastest."""
    table, world = setting.plan_library.fixed, setting.world
    found: dict[str, list[FloatArray]] = {}
    for name, form in FORMS.items():
        seconds = predicted_s(world, setting.plan_library.plans, form)
        rate = np.where(table.runs > 0, world.batch_samples / seconds, -1.0)
        found[name] = [_picked(table, rate.argmax(axis=1))]
        if name == "sailor":
            dollars = table.costs * np.where(np.isfinite(seconds), seconds, 0.0)
            found["sailor-tuned-cap"] = [
                _picked(table, np.where(dollars <= limit, rate, -0.5).argmax(axis=1))
                for limit in np.unique(dollars[dollars > 0])
            ]
    return found


def _picked(table: PlanTable, plan_S: IntArray) -> FloatArray:
    states = np.arange(len(plan_S))
    runs = table.runs[states, plan_S]
    return np.stack([runs * table.rates[states, plan_S], runs * table.costs[states, plan_S]], 1)


def firm(setting: Setting) -> PlanTable:
    """The table without plans that use a spot device."""
    pools = {offer.pool for offer in setting.world.cluster.offers if offer.spot}
    spot = {d.device_id for d in setting.world.cluster.devices if d.pool in pools}
    columns = [0] + [
        setting.plan_library.column_of[k]
        for k, plan in enumerate(setting.plan_library.plans, start=1)
        if not spot & set(plan.device_ids)
    ]
    kept = sorted(set(columns))
    table = setting.table
    return PlanTable(table.rates[:, kept], table.costs[:, kept], table.runs[:, kept])


def contenders(setting: Setting) -> dict[str, list[FloatArray]]:
    """Every baseline by name; several policies: the best one in hindsight counts."""
    table, world = setting.table, setting.world
    able = (table.runs > 0) & (table.costs > 0)
    prices = np.unique(table.costs[able] / table.rates[able])
    rates = np.unique(table.costs[able])
    found = {
        "greedy": [policy(table, greedy)],
        "cheapest": [policy(table, cheapest)],
        "slot-cap": [policy(table, below_rate(world.budget_usd_per_s))],
        "tuned-rate-cap": [policy(table, below_rate(limit)) for limit in rates],
        "tuned-price-cap": [policy(table, below_price(limit)) for limit in prices],
        "static": static(setting.plan_library.fixed),
        "static-rebalanced": static(table),
        "frozen-price": [policy(table, at_price(setting.best.price_of_money_samples_per_usd))],
        "do-nothing": [np.zeros((len(table.rates), 2))],
    }
    return {**found, **{name: [recipe(setting, name)] for name in RECIPES}, **peers(setting)}


def duty_cycled(policies: Iterable[FloatArray], shares: FloatArray, budget: float) -> FloatArray:
    """(rate at the budget, cost before, duty ratio) of the best policy."""
    best = np.zeros(3)
    for rates in policies:
        rate, cost = shares @ rates
        duty = min(1.0, budget / cost) if cost > 0 else 1.0
        if duty * rate >= best[0]:
            best = np.array([duty * rate, cost, duty])
    return best


def run(options: argparse.Namespace) -> Result:
    """Figure 13 of ``benchmarks.acceptance``."""
    setting = reference_setting()
    world, rng = setting.world, np.random.default_rng(options.seed)
    budget, relaxation = world.budget_usd_per_s, world.environment.relaxation_slots
    state_T = world.environment.walk(150_000 if options.quick else 500_000, rng)
    shares = path_shares(state_T, world.environment.num_states)
    control = setting.control(setting.weight(TAU_RELAXATIONS * relaxation))
    ours = run_table(setting.table, state_T, control)
    firm_table = firm(setting)
    reached = {
        "joint": np.array([ours.rate_samples_per_s, ours.cost_usd_per_s, 1.0]),
        "on-demand": np.array([oracle(firm_table, shares, budget).rate_samples_per_s, budget, 1.0]),
        **{
            name: duty_cycled(policies, shares, budget)
            for name, policies in contenders(setting).items()
        },
    }
    # What we spend above the budget at the end of the path is taken off our rate.
    reached["joint"][0] *= min(1.0, budget / ours.cost_usd_per_s)
    best = oracle(setting.table, shares, budget).rate_samples_per_s
    rate = {name: float(row[0]) for name, row in reached.items()}
    table = [
        {
            "strategy": name,
            "samples_per_s": float(row[0]),
            "oracle_pct": 100.0 * float(row[0]) / best,
            "cost_per_hour_usd": float(row[1]) * HOUR_S,
            "duty_pct": 100.0 * float(row[2]),
        }
        for name, row in sorted(reached.items(), key=lambda item: -item[1][0])
    ]
    best_static = max(rate["static"], rate["static-rebalanced"])
    figures = (
        Figure("over_static_pct", 100.0 * (rate["joint"] / best_static - 1), "%", ">= 10"),
        Figure(
            "over_tuned_cap_pct", 100.0 * (rate["joint"] / rate["tuned-price-cap"] - 1), "%", ">= 3"
        ),
        Figure("over_greedy_ratio", rate["joint"] / rate["greedy"], "1", ">= 2"),
    )
    return Result(figures, tuple(table))


if __name__ == "__main__":
    main("baselines", run)
