import pytest

from orchestrator.config import RunConfig
from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import IDLE_ESTIMATE, StepEstimate
from orchestrator.planning.frontier import budget_value
from orchestrator.whatif.pace import pace_notes
from tests.unit.whatif.run_file import TEXT

PLANS = [StepEstimate(1.0, 10.0, 1.0 / 3600), StepEstimate(1.0, 16.0, 4.0 / 3600)]


def notes(budget_per_hour: float) -> list[str]:
    config = RunConfig.parse(TEXT, [f"budget.average_per_hour_usd={budget_per_hour}"])
    treasury = Treasury(config.budget, config.control)
    treasury.learn(PLANS)
    treasury.open(budget_value([[*PLANS, IDLE_ESTIMATE]], budget_per_hour / 3600))
    return pace_notes(config, treasury, PLANS[1])


def test_between_two_plans_the_price_of_money_is_what_the_next_dollar_brings() -> None:
    """6 samples/s for 3 $/h, a fifth of rho; V = 0.2 b 48 h / (1.2 rho - lambda)."""
    (note,) = notes(2.5)
    assert "one more dollar is worth 7,200 samples" in note
    assert "The plan chosen makes 16.0 samples/s at $4.00/h" in note
    assert "13.0 samples/s can be had at the average budget" in note
    assert "follows what is spent within 115 min" in note  # V lambda / b = 9.6 h / 5
    assert "at most $24.00 and the bill of a slot" in note  # 0.2 x 2.5 $/h x 48 h


@pytest.mark.parametrize("budget_per_hour", [4.0, 5.0])
def test_a_budget_that_does_not_bind_needs_no_note(budget_per_hour: float) -> None:
    assert notes(budget_per_hour) == []
