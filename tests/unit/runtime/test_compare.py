"""Strategies are compared on their plans, at any cost and at the same cost."""

from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_problem
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Candidate, PlanningProblem, StepEstimate, StepReport
from orchestrator.runtime.compare import entries, measure

A, B = make_device("a-0"), make_device("b-0")
BOTH = make_plan(make_group((A,), (0, 4), (3,)), make_group((B,), (0, 4), (3,)))
ALONE = make_plan(make_group((A,), (0, 4), (6,)))
IDLE = Candidate(make_plan(), StepEstimate(0.0, 0.0, 0.0))


def candidate(plan: Plan, step_s: float, cost_usd_per_s: float) -> Candidate:
    return Candidate(plan, StepEstimate(step_s, 6.0 / step_s, cost_usd_per_s))


FAST, CHEAP = candidate(BOTH, 1.0, 2.0), candidate(ALONE, 1.5, 1.0)
BASELINES = {
    "even-split": (candidate(BOTH, 3.0, 2.0), IDLE),
    "cheapest": (candidate(ALONE, 2.0, 1.0), IDLE),
    "do-nothing": (IDLE,),
}


def propose(name: str, problem: PlanningProblem) -> tuple[Candidate, ...]:
    if name != "joint":
        return BASELINES[name]
    return (CHEAP, IDLE) if problem.backlog_usd > 1.0 else (FAST, IDLE)


def test_joint_meets_each_other_strategy_at_no_more_than_its_cost() -> None:
    problem = make_problem(make_cluster((A, B)), penalty_weight=1.0)
    found = entries(problem, tuple(BASELINES), propose)
    assert [(e.strategy, e.at_cost_of) for e in found] == [
        ("joint", ""),
        ("even-split", ""),
        ("cheapest", ""),
        ("joint", "even-split"),
        ("joint", "cheapest"),
    ]
    assert [e.candidate for e in found[3:]] == [FAST, CHEAP]


def test_a_plan_is_run_once_and_its_first_steps_are_not_counted() -> None:
    runs: list[Plan] = []

    def run(plan: Plan, num_steps: int) -> list[StepReport]:
        runs.append(plan)
        times = [9.0, 9.0, *([1.25] * (num_steps - 2))]
        return [
            StepReport(0, step, device_id, 0, 6, 0.0, 0.0, step_s=seconds, compute_s=0.0)
            for step, seconds in enumerate(times)
            for device_id in plan.device_ids
        ]

    problem = make_problem(make_cluster((A, B)), penalty_weight=1.0)
    rows = measure(entries(problem, ("even-split",), propose), run, num_steps=6, per_hour=3600.0)
    assert len(runs) == 1  # even-split happens to want the same plan
    assert [row.measured_step_s for row in rows] == [1.25] * 3
    assert rows[0].samples_per_s == pytest.approx(6 / 1.25)
    assert rows[1].predicted_step_s == 3.0
    assert rows[0].cost_per_hour_usd == pytest.approx(7200.0)


def test_a_plan_that_cannot_run_any_more_is_left_out() -> None:
    def run(plan: Plan, num_steps: int) -> list[StepReport]:
        lost = "b-0" in plan.device_ids
        return [] if lost else [StepReport(0, 0, "a-0", 0, 6, 0.0, 0.0, 1.0, 0.0)]

    problem = make_problem(make_cluster((A, B)), penalty_weight=1.0)
    rows = measure(entries(problem, ("cheapest",), propose), run, num_steps=3, per_hour=1.0)
    assert [(row.strategy, row.plan) for row in rows] == [("cheapest", ALONE), ("joint", ALONE)]


def test_plans_that_differ_get_generations_of_their_own() -> None:
    seen: list[int] = []

    def run(plan: Plan, num_steps: int) -> list[StepReport]:
        seen.append(plan.generation)
        return [StepReport(0, s, "a-0", 0, 6, 0.0, 0.0, 1.0, 0.0) for s in range(num_steps)]

    problem = replace(make_problem(make_cluster((A, B))), penalty_weight=1.0)
    measure(entries(problem, ("cheapest",), propose), run, num_steps=3, per_hour=1.0)
    assert seen == [0, 1]
