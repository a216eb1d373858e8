"""What a file would lead to in its first slot: the chosen plan and the baselines beside it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.config import RunConfig
from orchestrator.control.pools import run_figures
from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem, first_problem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.constraints import broken, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import timeline
from orchestrator.planning.pricing import is_held_back, nearest_breach, refusal, search_within
from orchestrator.planning.tables import LayerTables
from orchestrator.reports.plan_page import Timeline
from orchestrator.reports.tables import PlanRow, make_row, row_data
from orchestrator.reports.worth import Worth
from orchestrator.storage import Json
from orchestrator.strategies.registry import make_strategy
from orchestrator.whatif.pace import pace_notes
from orchestrator.whatif.worth import worth_beside

PLAN_BASELINES = ("even-split", "proportional", "balanced-pipeline")
"""What ``lyray plan`` shows beside the chosen strategy."""

MAX_TEAM = 1
"""What workers of this version run; a plan that none will run (``source: file``) may ask more."""

_SHOWN_GAPS = 4

_PRICE_ROUNDS = 8
"""Bisections that look for the price of money at which a plan fits the average budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Candidates for one file, in the order they are shown; the first is what would run."""

    problem: PlanningProblem
    rows: tuple[PlanRow, ...]
    timelines: tuple[Timeline, ...]  # of the first row's groups
    notes: tuple[str, ...]
    worth: Worth | None = None  # None: nothing runs

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


def what_if(config: RunConfig, measured: ModelProfile, *, stopwatch: Callable[[], float]) -> WhatIf:
    """Plan the first slot with the file's strategy and with the baselines beside it.

    Args:
        config: The whole file.
        measured: As measured or read, unscaled.
        stopwatch: Seconds from any start; every search ends after ``control.plan_deadline_s``.

    Raises:
        InfeasibleError: If the file's own strategy finds no plan that fits and obeys the limits.
        ConfigError: If the profile does not serve the cluster.
    """
    cluster, model = figures_of(config, measured)
    speedup = config.emulation.billing_speedup
    problem = first_problem(
        cluster,
        model,
        config.training,
        max_team=config.control.max_team if config.cluster.source == "file" else MAX_TEAM,
        budget_usd_per_s=config.budget.average_per_hour_usd / 3600 * speedup,
        seed=config.run.seed,
    )
    strategy = config.control.strategy
    search = _Search(config, problem, stopwatch)
    best = search.first_running(strategy)
    rows = [replace(_row(strategy, best, cluster, speedup), chosen=True)]
    affordable = search.within_budget(strategy, best)
    if affordable is not None:
        rows.append(_row(f"{strategy} in budget", affordable, cluster, speedup))
    for name in PLAN_BASELINES:
        if name == strategy:
            continue
        try:
            rows.append(_row(name, search.first_running(name), cluster, speedup))
        except InfeasibleError as error:
            rows.append(_refused(name, str(error)))
    cost = CostModel(problem)
    return WhatIf(
        problem=problem,
        rows=tuple(rows),
        timelines=tuple(timeline(cost, g, best.plan.schedule) for g in best.plan.groups),
        notes=(
            *_notes(config, problem, rows),
            *pace_notes(config, problem, [best, *search.seen]),
            *search.notes,
        ),
        worth=worth_beside(problem, [best, *search.seen], search.limits, billing_speedup=speedup),
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
        "marginal_values": dict(found.worth.values) if found.worth else {},
        "marginal_values_beside": found.worth.beside if found.worth else "",
        "notes": list(found.notes),
    }


class _Search:
    """Asks strategies for plans of one problem; each answer takes ``plan_deadline_s`` at most."""

    def __init__(
        self, config: RunConfig, problem: PlanningProblem, stopwatch: Callable[[], float]
    ) -> None:
        self._problem, self._stopwatch = problem, stopwatch
        self._deadline_s = config.control.plan_deadline_s
        self._strategy = config.control.strategy
        self.limits = make_rows(
            config.budget.limits, billing_speedup=config.emulation.billing_speedup
        )
        self.notes: list[str] = []
        self.seen: list[Candidate] = []  # of the file's own strategy, obeying the limits

    def first_running(self, strategy: str) -> Candidate:
        """A strategy's best candidate that obeys the limits; idle only where it has nothing else.

        Raises:
            InfeasibleError: If there is none.
        """
        out_of_time = self._deadline()
        proposer = make_strategy(strategy)
        found = proposer.propose(self._problem, out_of_time=out_of_time)
        if out_of_time():
            self.notes.append(
                f"The search of {strategy} was cut off after {self._deadline_s:g} s; "
                "control.plan_deadline_s allows more."
            )
        running = [c for c in found if not c.plan.is_idle]
        obedient = self._obedient(running)
        cost = CostModel(self._problem)
        if proposer.deals_shares and is_held_back(cost, running, obedient):
            out_of_time = self._deadline()

            def propose(priced: PlanningProblem) -> Sequence[Candidate]:
                return proposer.propose(priced, out_of_time=out_of_time)

            running += search_within(propose, cost, self.limits, running, out_of_time)
            obedient = sorted(self._obedient(running), key=lambda c: -c.score)
        if running and not obedient:
            raise refusal(nearest_breach(cost, self.limits, running))
        self.seen += obedient if strategy == self._strategy else ()
        return obedient[0] if obedient else found[0]

    def within_budget(self, strategy: str, best: Candidate) -> Candidate | None:
        """The fastest plan at or below the average budget, None when the best one is."""
        budget = self._problem.budget_usd_per_s
        if best.plan.is_idle or best.estimate.cost_usd_per_s <= budget:
            return None
        proposer, out_of_time = make_strategy(strategy), self._deadline()
        low, high = 0.0, best.estimate.samples_per_usd
        found: Candidate | None = None
        for _ in range(_PRICE_ROUNDS):
            price = high if found is None else (low + high) / 2
            priced = replace(self._problem, backlog_usd=price)
            candidates = self._obedient(proposer.propose(priced, out_of_time=out_of_time))
            self.seen += candidates
            fitting = [c for c in candidates if 0 < c.estimate.cost_usd_per_s <= budget]
            fitting = [c for c in fitting if not c.plan.is_idle]
            if fitting:
                fastest = max(fitting, key=lambda c: c.estimate.samples_per_s)
                if found is None or fastest.estimate.samples_per_s > found.estimate.samples_per_s:
                    found = fastest
                high = price
            else:
                low, high = price, high if found else 2 * high
            if out_of_time():
                break
        return found

    def _obedient(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        cost = CostModel(self._problem)
        return [c for c in candidates if broken(cost, self.limits, c) is None]

    def _deadline(self) -> Callable[[], bool]:
        end_s = self._stopwatch() + self._deadline_s
        return lambda: self._stopwatch() > end_s


def _row(name: str, candidate: Candidate, cluster: ClusterState, speedup: float) -> PlanRow:
    return make_row(name, candidate.plan, candidate.estimate, cluster, speedup)


def _refused(name: str, problem: str) -> PlanRow:
    return PlanRow(name, Plan(0, ""), IDLE_ESTIMATE, 0.0, None, problem=problem)


def _gap_notes(problem: PlanningProblem, rows: Sequence[PlanRow]) -> list[str]:
    """Which times of the plans shown were not measured, and from what they come."""
    tables = LayerTables(problem.model)
    used = {
        (stage.team.kind, stage.team.size, samples)
        for row in rows
        for group in row.plan.groups
        for stage in group.stages
        for samples in set(group.microbatches)
    }
    times = [tables.times(*key) for key in sorted(used)]
    inside = [t.gap for t in times if t.gap and not t.beyond]
    beyond = [t.gap for t in times if t.gap and t.beyond]
    notes = []
    if inside:
        notes.append(f"Times interpolated between measured ones: {_some(inside)}.")
    if beyond:
        notes.append(f"Times beyond the measured ones, in proportion or dearer: {_some(beyond)}.")
    return notes


def _some(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    rest = len(shown) - _SHOWN_GAPS
    return ", ".join(shown[:_SHOWN_GAPS]) + (f" and {rest} more" if rest > 0 else "")


def _notes(config: RunConfig, problem: PlanningProblem, rows: Sequence[PlanRow]) -> list[str]:
    """What a reader must know about the figures."""
    notes = []
    priced = sorted({t.kind for t in problem.model.times if t.estimated})
    if priced:
        notes.append(
            f"Times of {', '.join(priced)} are priced from FLOP and the catalogue, not measured."
        )
    notes += _gap_notes(problem, rows)
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
