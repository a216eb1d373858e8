"""What a file would lead to in its first slot: the chosen plan and the baselines beside it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.config import RunConfig
from orchestrator.control.pools import run_figures
from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem, first_problem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import timeline
from orchestrator.reports.plan_page import Timeline
from orchestrator.reports.tables import PlanRow, make_row, row_data
from orchestrator.storage import Json
from orchestrator.strategies.registry import make_strategy

PLAN_BASELINES = ("even-split", "proportional", "balanced-pipeline")
"""What ``lyray plan`` shows beside the chosen strategy."""

_PRICE_ROUNDS = 8
"""Bisections that look for the price of money at which a plan fits the average budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Candidates for one file, in the order they are shown; the first is what would run."""

    problem: PlanningProblem
    rows: tuple[PlanRow, ...]
    timelines: tuple[Timeline, ...]  # of the first row's groups
    notes: tuple[str, ...]

    @property
    def chosen(self) -> PlanRow:
        """The plan that would run first."""
        return self.rows[0]


def figures_of(config: RunConfig, measured: ModelProfile) -> tuple[ClusterState, ModelProfile]:
    """Cluster and profile of a file in seconds of the run, as if its workers ran on this machine.

    Args:
        config: The whole file.
        measured: As measured or read, unscaled.

    Raises:
        ConfigError: If the profile does not serve the cluster.
    """
    return run_figures(
        config.cluster,
        config.emulation,
        config.training,
        measured,
        num_cores=len(os.sched_getaffinity(0)),
    )


def what_if(config: RunConfig, measured: ModelProfile) -> WhatIf:
    """Plan the first slot with the file's strategy and with the baselines beside it.

    Raises:
        InfeasibleError: If the file's own strategy finds no plan that fits.
        ConfigError: If the profile does not serve the cluster.
    """
    cluster, model = figures_of(config, measured)
    speedup = config.emulation.billing_speedup
    problem = first_problem(
        cluster,
        model,
        config.training,
        budget_usd_per_s=config.budget.average_per_hour_usd / 3600 * speedup,
        seed=config.run.seed,
    )
    strategy = config.control.strategy
    best = _first_running(strategy, problem)
    rows = [replace(_row(strategy, best, cluster, speedup), chosen=True)]
    affordable = _within_budget(strategy, problem, best)
    if affordable is not None:
        rows.append(_row(f"{strategy} in budget", affordable, cluster, speedup))
    for name in PLAN_BASELINES:
        if name == strategy:
            continue
        try:
            rows.append(_row(name, _first_running(name, problem), cluster, speedup))
        except InfeasibleError as error:
            rows.append(_refused(name, str(error)))
    cost = CostModel(problem)
    return WhatIf(
        problem=problem,
        rows=tuple(rows),
        timelines=tuple(timeline(cost, g, best.plan.schedule) for g in best.plan.groups),
        notes=tuple(_notes(config, problem, rows)),
    )


def what_if_data(config: RunConfig, found: WhatIf) -> dict[str, Json]:
    """What ``lyray plan --json`` prints: seconds of the run's clock, dollars per billed hour."""
    cluster = found.problem.cluster
    return {
        "run": config.run.name,
        "global_batch": config.training.global_batch,
        "budget_per_hour_usd": config.budget.average_per_hour_usd,
        "billing_speedup": config.emulation.billing_speedup,
        "chosen": found.chosen.strategy,
        "candidates": [row_data(row, cluster) for row in found.rows],
        "notes": list(found.notes),
    }


def _first_running(strategy: str, problem: PlanningProblem) -> Candidate:
    """A strategy's best candidate; idle only where it has nothing else."""
    found = make_strategy(strategy).propose(problem, out_of_time=_never)
    return next((c for c in found if not c.plan.is_idle), found[0])


def _within_budget(strategy: str, problem: PlanningProblem, best: Candidate) -> Candidate | None:
    """The fastest plan at or below the average budget, None when the best one is."""
    budget = problem.budget_usd_per_s
    if best.estimate.cost_usd_per_s <= budget:
        return None
    proposer = make_strategy(strategy)
    low, high = 0.0, best.estimate.samples_per_usd
    found: Candidate | None = None
    for _ in range(_PRICE_ROUNDS):
        price = high if found is None else (low + high) / 2
        candidates = proposer.propose(replace(problem, backlog_usd=price), out_of_time=_never)
        fitting = [c for c in candidates if 0 < c.estimate.cost_usd_per_s <= budget]
        fitting = [c for c in fitting if not c.plan.is_idle]
        if fitting:
            fastest = max(fitting, key=lambda c: c.estimate.samples_per_s)
            if found is None or fastest.estimate.samples_per_s > found.estimate.samples_per_s:
                found = fastest
            high = price
        else:
            low, high = price, high if found else 2 * high
    return found


def _row(name: str, candidate: Candidate, cluster: ClusterState, speedup: float) -> PlanRow:
    return make_row(name, candidate.plan, candidate.estimate, cluster, speedup)


def _refused(name: str, problem: str) -> PlanRow:
    return PlanRow(name, Plan(0, ""), IDLE_ESTIMATE, 0.0, None, problem=problem)


def _never() -> bool:
    return False


def _notes(config: RunConfig, problem: PlanningProblem, rows: Sequence[PlanRow]) -> list[str]:
    """What a reader must know about the figures."""
    notes = []
    priced = sorted({t.kind for t in problem.model.times if t.estimated})
    if priced:
        notes.append(
            f"Times of {', '.join(priced)} are priced from FLOP and the catalogue, not measured."
        )
    if any(row.estimate.interpolated for row in rows):
        notes.append("Some times are interpolated between measured microbatch sizes.")
    budget = config.budget.average_per_hour_usd
    chosen = rows[0]
    if chosen.cost_per_hour_usd > budget:
        share = budget / chosen.cost_per_hour_usd
        notes.append(
            f"The budget is ${budget:,.2f}/h on average: at ${chosen.cost_per_hour_usd:,.2f}/h the "
            f"chosen plan may run {share:.0%} of the time, or alternate with a cheaper one."
        )
    if config.cluster.source == "emulated":
        notes.append(
            "Devices are emulated: one second of the run is billed as "
            f"{config.emulation.billing_speedup:g} s; dollars per sample follow the bill."
        )
    return notes
