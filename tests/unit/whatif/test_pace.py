from benchmarks.builders import make_cluster, make_device, make_group, make_plan, make_problem
from orchestrator.config import RunConfig
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, StepEstimate
from orchestrator.whatif.pace import pace_notes
from tests.unit.whatif.test_plans import TEXT


def candidate(rate: float, per_hour_usd: float) -> Candidate:
    plan = make_plan(make_group([make_device("d-0")], (0, 4), (8,)))
    return Candidate(plan, StepEstimate(1.0, rate, per_hour_usd / 3600))


def notes(budget_per_hour: float) -> list[str]:
    config = RunConfig.parse(TEXT, [f"budget.average_per_hour_usd={budget_per_hour}"])
    problem = make_problem(
        make_cluster([make_device("d-0")]), budget_usd_per_s=budget_per_hour / 3600
    )
    plans = [candidate(10.0, 1.0), candidate(16.0, 4.0), Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)]
    return pace_notes(config, problem, plans)


def test_between_two_plans_the_price_of_money_is_what_the_next_dollar_brings() -> None:
    """6 samples/s for 3 $/h, a fifth of rho; V = 0.2 b 48 h / (1.2 rho - lambda)."""
    (note,) = notes(2.5)
    assert "one more dollar is worth 7,200 samples" in note
    assert "on average 13.0 samples/s can be had" in note
    assert "follows within 115 min" in note  # V lambda / b = 9.6 h / 5
    assert "at most $24.00 and the bill of a slot" in note  # 0.2 x 2.5 $/h x 48 h


def test_a_budget_that_does_not_bind_needs_no_note() -> None:
    assert notes(5.0) == []
