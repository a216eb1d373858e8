"""The reference world of the control benchmarks: cluster, states, plan library and LP oracle.

Everything that is written down stands in scenarios/reference.yaml. The plans of
scenarios/reference_plans.json are what the joint strategy proposed at several prices of money in
every state (``python -m benchmarks.reference_world`` searches them anew); the cost model says
what they give and cost in all of them. Shape letters: S states, K plans (0 is idle).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import linprog

from orchestrator.core.cluster import ClusterState, Device, Link, Offer
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.plan import Plan
from orchestrator.core.slot import PlanningProblem, StepEstimate
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.simulation.environments import (
    Environment,
    FloatArray,
    IntArray,
    environment_from,
)
from orchestrator.simulation.table import PlanTable
from orchestrator.storage import from_json, to_json
from orchestrator.strategies.registry import make_strategy

FILE = Path(__file__).parent / "scenarios" / "reference.yaml"
PLANS_FILE = FILE.with_name("reference_plans.json")
HOUR_S = 3600.0
NUM_PRICES = 6
"""Prices of money at which the library's plans are searched in every state."""

NUM_STATIC = 8
"""Plans kept because they are the best that never change."""


@dataclass(frozen=True, slots=True)
class World:
    """What the file says, as nouns."""

    cluster: ClusterState  # every chain at its first level
    model: ModelProfile
    environment: Environment
    budget_usd_per_s: float
    slot_s: float
    batch_samples: int
    microbatch_samples: int
    schedules: tuple[str, ...]

    def problem(
        self, cluster: ClusterState, *, price_of_money_samples_per_usd: float = 0.0
    ) -> PlanningProblem:
        """The planning problem of a slot."""
        return PlanningProblem(
            cluster=cluster,
            model=self.model,
            batch_samples=self.batch_samples,
            microbatch_samples=self.microbatch_samples,
            schedules=self.schedules,
            max_team=1,
            overlap=False,
            penalty_weight=1.0,
            backlog_usd=price_of_money_samples_per_usd,
            budget_usd_per_s=self.budget_usd_per_s,
            incumbent=None,
        )

    def state(self, state: int) -> ClusterState:
        """The cluster in a state of the environment."""
        return self.environment.apply(self.cluster, state)


@cache
def reference_world() -> World:
    """The world of scenarios/reference.yaml."""
    data = yaml.safe_load(FILE.read_text("utf-8"))
    training = data["training"]
    return World(
        cluster=_cluster(data["cluster"]),
        model=_model(data["model"], data["cluster"]["offers"], int(training["microbatch"])),
        environment=environment_from(data["environment"]),
        budget_usd_per_s=float(data["budget_per_hour_usd"]) / HOUR_S,
        slot_s=float(data["slot_s"]),
        batch_samples=int(training["global_batch"]),
        microbatch_samples=int(training["microbatch"]),
        schedules=(str(training["schedule"]),),
    )


def _cluster(data: Mapping[str, Any]) -> ClusterState:
    devices, offers = [], []
    for row in data["offers"]:
        pool, zone = str(row["pool"]), str(row["zone"])
        offers.append(
            Offer(pool, pool, zone, row["price_per_hour"] / HOUR_S, spot=row.get("spot", False))
        )
        devices += [
            Device(f"{pool}-{i}", pool, pool, f"{pool}-node{i}", zone, row["memory_gib"] * 2**30)
            for i in range(row["count"])
        ]
    zones = sorted({device.zone for device in devices})
    links = []
    for rule in data["links"]:
        ends = (
            [(zone, zone) for zone in zones]
            if rule.get("within")
            else permutations(rule["between"], 2)
        )
        links += [
            Link(
                source,
                target,
                rule["latency_s"],
                rule["bandwidth_gbytes_per_s"] * 1e9,
                rule.get("egress_usd_per_gb", 0.0) / 1e9,
            )
            for source, target in ends
        ]
    return ClusterState(0.0, tuple(devices), tuple(links), tuple(offers))


def _model(
    data: Mapping[str, Any], offers: Sequence[Mapping[str, Any]], microbatch: int
) -> ModelProfile:
    layers = [row for row in data["layers"] for _ in range(row["count"])]

    def column(name: str) -> tuple[float, ...]:
        return tuple(float(row[name]) for row in layers)

    flop, params = column("forward_flop"), column("param_bytes")
    optimizer = float(data["optimizer_bytes_per_param_byte"])
    times = [
        LayerTimes(
            kind=offer["pool"],
            team_size=1,
            microbatch=size,
            forward_s=tuple(size * f / offer["flop_per_s"] for f in flop),
            backward_s=tuple(
                data["backward_over_forward"] * size * f / offer["flop_per_s"] for f in flop
            ),
            update_s=tuple(
                (1 + 2 * optimizer) * p / (offer["memory_gbytes_per_s"] * 1e9) for p in params
            ),
        )
        for offer in offers
        for size in microbatch_sizes(microbatch)
    ]
    return ModelProfile(
        model="reference",
        dtype="fp32",
        layers=tuple(f"{row['name']}{i}" for i, row in enumerate(layers)),
        sizes=(LayerSizes(1, params, column("boundary_bytes"), column("stash_bytes")),),
        times=tuple(times),
        forward_flop_per_sample=flop,
        optimizer_bytes_per_param_byte=optimizer,
        step_overhead_s=float(data["step_overhead_s"]),
    )


# Plan library ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Library:
    """Plans and what each gives and costs in every state; plan 0 is idle.

    ``table`` has one column for all plans that hold the same layers in the same places: which
    shares they deal is chosen anew in every state. ``fixed`` has one column a plan.
    """

    table: PlanTable
    fixed: PlanTable
    column_of: tuple[int, ...]  # of each plan of ``fixed``, its column of ``table``
    plans: tuple[Plan, ...]  # of ``fixed``, without idle


def search_plans(world: World, clusters: Iterable[ClusterState], num_prices: int) -> list[Plan]:
    """What the joint strategy proposes in these clusters, at prices of money from 0 upwards."""
    found: dict[object, Plan] = {}
    for cluster in clusters:
        strategy = make_strategy("joint")
        best_ratio = 0.0
        for index in range(num_prices):
            price = best_ratio * index / max(1, num_prices - 1)
            problem = world.problem(cluster, price_of_money_samples_per_usd=price)
            candidates = [
                c
                for c in strategy.propose(problem, out_of_time=lambda: False)
                if not c.plan.is_idle
            ]
            best_ratio = max([best_ratio, *(c.estimate.samples_per_usd for c in candidates)])
            for candidate in candidates:
                found.setdefault((candidate.plan.groups, candidate.plan.schedule), candidate.plan)
    return list(found.values())


def price_plans(world: World, plans: Sequence[Plan], clusters: Sequence[ClusterState]) -> PlanTable:
    """What plans give and cost in these clusters (rows), by the cost model's exact times.

    Clusters that differ in nothing but prices share their times.
    """
    shape = (len(clusters), len(plans) + 1)
    rates, costs, runs = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    runs[:, 0] = 1.0
    known: dict[object, list[StepEstimate | None]] = {}
    for s, cluster in enumerate(clusters):
        key = (cluster.devices, cluster.links)
        if key not in known:
            cost = CostModel(world.problem(cluster))
            known[key] = [_exact(cost, plan) for plan in plans]
        for k, (plan, estimate) in enumerate(zip(plans, known[key], strict=True), start=1):
            present = [d for d in plan.device_ids if cluster.has(d)]
            costs[s, k] = sum(cluster.price_usd_per_s(device) for device in present)
            if estimate is not None:
                runs[s, k], rates[s, k] = 1.0, estimate.samples_per_s
                costs[s, k] += estimate.egress_usd_per_s
    return PlanTable(rates, costs, runs)


def _exact(cost: CostModel, plan: Plan) -> StepEstimate | None:
    """Times of a plan, None where a device is gone or memory lacks."""
    if not all(map(cost.problem.cluster.has, plan.device_ids)):
        return None
    if cost.memory_error(plan.groups, plan.schedule) is not None:
        return None
    return retime(cost, plan.groups, plan.schedule)


def make_library(plans: Sequence[Plan], fixed: PlanTable) -> Library:
    """Plans of the same places become one column, which deals its shares anew in every state."""
    columns: dict[object, int] = {}
    column_of = [0]
    column_of += [
        columns.setdefault((plan.places, plan.schedule), len(columns) + 1) for plan in plans
    ]
    shape = (len(fixed.rates), len(columns) + 1)
    rates, costs, runs = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for k, column in enumerate(column_of):
        better = (fixed.rates[:, k] > rates[:, column]) | (runs[:, column] < fixed.runs[:, k])
        better |= runs[:, column] == 0
        rates[better, column] = fixed.rates[better, k]
        costs[better, column] = fixed.costs[better, k]
        runs[better, column] = fixed.runs[better, k]
    return Library(PlanTable(rates, costs, runs), fixed, tuple(column_of), tuple(plans))


@cache
def reference_library() -> Library:
    """The plans of scenarios/reference_plans.json, priced in every state."""
    world = reference_world()
    plans = [from_json(Plan, row) for row in json.loads(PLANS_FILE.read_text("utf-8"))]
    return make_library(plans, price_plans(world, plans, all_states(world)))


def all_states(world: World) -> list[ClusterState]:
    """The cluster in every state of its environment."""
    return [world.state(s) for s in range(world.environment.num_states)]


def on_hull(table: PlanTable) -> list[int]:
    """Plans that some price of money makes the best in some state, and the best static ones."""
    kept: set[int] = set()
    for s in range(len(table.rates)):
        able = np.flatnonzero(table.runs[s] > 0)
        rate, cost = table.rates[s, able], table.costs[s, able]
        ratios = [r / c for r, c in zip(rate, cost, strict=True) if c > 0]
        for price in np.linspace(0.0, max(ratios, default=0.0), 200):
            kept.add(int(able[np.argmax(rate - price * cost)]))
    return sorted(kept)


def write_library() -> None:
    """Search every state and keep the plans that are of use anywhere."""
    world = reference_world()
    clusters = all_states(world)
    plans = search_plans(world, clusters, NUM_PRICES)
    table = price_plans(world, plans, clusters)
    shares = world.environment.shares
    rate, cost = shares @ (table.runs * table.rates), shares @ (table.runs * table.costs)
    mean = rate * np.minimum(1.0, world.budget_usd_per_s / np.maximum(cost, 1e-12))
    static = np.argsort(-mean)[:NUM_STATIC]
    kept = [k for k in sorted({*on_hull(table), *static.tolist()}) if k > 0]
    rows = [json.dumps(to_json(plans[k - 1].with_generation(0))) for k in kept]
    PLANS_FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")


# Oracle ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Oracle:
    """Best long-term rate of any stationary randomised policy on a table, within a budget."""

    rate_samples_per_s: float
    price_of_money_samples_per_usd: float  # lambda*: what one more dollar would bring
    cost_usd_per_s: float


def oracle(table: PlanTable, share_S: FloatArray, budget_usd_per_s: float) -> Oracle:
    """Solve ``max sum pi_s r_sk y_sk`` with ``sum pi_s c_sk y_sk <= b`` and ``sum_k y_sk = 1``.

    Args:
        table: Plans and states.
        share_S: pi, share of the time in every state; of the long run, or of one sample path.
        budget_usd_per_s: b.

    Source: docs/model.md, sections 4.4 and 7.
    """
    able = table.runs > 0
    states, _ = np.nonzero(able)
    weight = share_S[states]
    cost = weight * table.costs[able]
    rows = np.zeros((len(share_S), len(states)))
    rows[states, np.arange(len(states))] = 1.0
    solved = linprog(
        -weight * table.rates[able], A_ub=cost[None, :] * HOUR_S, b_ub=[budget_usd_per_s * HOUR_S],
        A_eq=rows, b_eq=np.ones(len(share_S)), method="highs",
    )  # fmt: skip
    assert solved.status == 0, f"the oracle ended with {solved.message!r}"
    return Oracle(
        rate_samples_per_s=-float(solved.fun),
        price_of_money_samples_per_usd=-float(solved.ineqlin.marginals[0]) * HOUR_S,
        cost_usd_per_s=float(cost @ solved.x),
    )


def path_shares(state_T: IntArray, num_states: int) -> FloatArray:
    """Share of the slots of a path in every state."""
    found: FloatArray = np.bincount(state_T, minlength=num_states) / len(state_T)
    return found


if __name__ == "__main__":
    write_library()
