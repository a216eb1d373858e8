"""Scenarios where things change: the closed loop of the simulation, strategy by strategy.

Every strategy lives in the same world, once for every seed or trace offset. Rates are at equal
cost: who spends more than the budget is counted at b/c of the rate.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import reference_data
from benchmarks.scenarios.files import Case, ScenarioFile
from benchmarks.scenarios.rivals import (
    Fallback,
    KeepFirst,
    LookAhead,
    Reorder,
    Restart,
    SingleKind,
    Spy,
    Told,
)
from benchmarks.scenarios.rows import MORE_TIME, OURS, SEVERAL_SEARCHES, Role, Row
from orchestrator.config import RunConfig
from orchestrator.strategies.registry import Strategy, make_strategy
from orchestrator.whatif.rehearsal import Rehearsal, rehearse
from orchestrator.whatif.scenario import Scenario, load_scenario

HOURS_A_DAY = 24.0


def run(file: ScenarioFile, options: argparse.Namespace) -> list[Row]:
    """All cases."""
    return [row for case in file.cases(quick=options.quick) for row in run_case(case, options)]


def run_case(case: Case, options: argparse.Namespace) -> list[Row]:
    """Ours, the strategies and the strong rivals that the file names, over all runs."""
    runs = case.get("runs") or [{"seed": seed} for seed in range(int(case.get("seeds", 5)))]
    if options.quick:
        runs = runs[: int(case.get("quick_runs", 1))]
    worlds = [_world(case, row, options.seed) for row in runs]
    stage = _Stage(case, options.quick)
    contenders: list[tuple[str, Role, Mapping[str, Any]]] = [(OURS, "ours", {})]
    names = case.get("quick_strategies" if options.quick else "strategies")
    contenders += [(name, "same" if _is_ours(case, name) else "baseline", {}) for name in names]
    for rival in case.get("strong", ()):
        if options.quick and rival.get("full_only", False):
            continue
        role: Role = "reference" if rival.get("reference", False) else "strong"
        contenders.append((str(rival["name"]), role, rival))
    return [_row(stage, contender, worlds) for contender in contenders]


def _is_ours(case: Case, name: str) -> bool:
    """Whether a strategy without spot devices is ours, as there are none."""
    return name == "on-demand" and not any(o.spot for o in case.config.cluster.offers)


@dataclass(frozen=True)
class _Stage:
    """A case, in its long or its short form."""

    case: Case
    quick: bool

    def config(self, strategy: str) -> RunConfig:
        """The run, with the deadline of the form and of what plans."""
        config = self.case.config
        limit_s = config.control.plan_deadline_s
        if self.quick:
            limit_s = float(self.case.get("quick_deadline_s", limit_s))
        limit_s *= MORE_TIME if strategy in SEVERAL_SEARCHES else 1.0
        control = replace(config.control, plan_deadline_s=limit_s)
        # The money is meant for just this run: what is left at its end is of no use.
        budget = replace(config.budget, horizon_hours=self.hours)
        return config.model_copy(update={"control": control, "budget": budget})

    @property
    def hours(self) -> float:
        """How long it goes on."""
        hours = self.case.get("hours")
        return float(self.case.get("quick_hours", hours) if self.quick else hours)


def _row(
    stage: _Stage, contender: tuple[str, Role, Mapping[str, Any]], worlds: list[Scenario]
) -> Row:
    case, (name, role, rival) = stage.case, contender
    found = [_fare(stage, name, rival, world) for world in worlds]
    rates = [r.samples_per_s_at_budget or 0.0 for r in found]
    hours = sum(r.hours for r in found) or 1.0
    problems = [r.problem for r in found if r.problem]
    return Row(
        scenario=case.file.name,
        case=case.name,
        strategy=name,
        role=role,
        samples_per_s=sum(rates) / len(rates),
        low=min(rates),
        high=max(rates),
        usd_per_hour=sum(r.spent_usd for r in found) / hours,
        duty=sum(r.duty_ratio for r in found) / len(found),
        note=problems[0][:80] if problems else _note(found),
    )


def _note(found: list[Rehearsal]) -> str:
    runs = len(found)
    lost, redone = sum(r.lost for r in found), sum(r.redone for r in found)
    idle = 100.0 * sum(r.idle_ratio for r in found) / runs
    replans = sum(r.replans for r in found) / runs
    return (
        f"{runs} runs; {lost} lost, {redone} steps redone, {replans:.1f} replans, idle {idle:.0f} %"
    )


def _fare(stage: _Stage, name: str, rival: Mapping[str, Any], world: Scenario) -> Rehearsal:
    """One strategy in one world."""
    strategy: str | Strategy = name
    if rival:
        spy = Spy()
        strategy = RIVALS[rival["rival"]](rival, spy)
        world = Scenario((*world.streams, spy), world.seed)
    return rehearse(
        stage.config(str(rival.get("strategy", name))),
        stage.case.profile,
        days=stage.hours / HOURS_A_DAY,
        strategy=strategy,
        scenario=world,
        stopwatch=time.process_time,
    )


RIVALS: Mapping[str, Callable[[Mapping[str, Any], Spy], Strategy]] = {
    "look-ahead": lambda row, spy: LookAhead(float(row["losses_per_hour"])),
    "restart": lambda row, spy: Restart(float(row["down_s"])),
    "told-restart": lambda row, spy: Restart(float(row["down_s"]), Told(spy)),
    "told": lambda row, spy: Told(spy),
    "fallback": lambda row, spy: Fallback(str(row["first"]), str(row["second"])),
    "single-kind": lambda row, spy: SingleKind(),
    "keep-first": lambda row, spy: KeepFirst(make_strategy(str(row["strategy"]))),
    "reorder": lambda row, spy: Reorder(spy),
}
"""What ``rival`` of a file's row stands for."""


def _world(case: Case, row: Mapping[str, Any], seed: int) -> Scenario:
    """The file's world for one run, its traces taken from the measured data when they are there."""
    told = dict(case.get("world") or {})
    if "trace" in row:
        if reference_data.TRACES.is_dir():
            told["preemptions"] = [
                {
                    "pool": row.get("pool", "spot"),
                    "path": str(reference_data.TRACES / row["trace"]),
                    "start_hour": float(row.get("start_hour", 0.0)),
                }
            ]
        else:
            told |= case.get("world_without_traces")
    told["seed"] = 1000 * seed + int(row.get("seed", 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{case.file.name}.yaml"
        path.write_text(yaml.safe_dump(told), "utf-8")
        return load_scenario(str(path), pools=[o.pool for o in case.config.cluster.offers])
