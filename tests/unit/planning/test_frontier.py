import numpy as np
import pytest
from scipy.optimize import linprog

from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, StepEstimate
from orchestrator.planning.frontier import budget_value, fastest_within


def plan(cost: float, rate: float) -> StepEstimate:
    return StepEstimate(step_s=1.0, samples_per_s=rate, cost_usd_per_s=cost)


def test_between_two_plans_the_price_is_the_slope_from_one_to_the_other() -> None:
    value = budget_value([[IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 16.0)]], 2.0)
    assert value.price_of_money_samples_per_usd == pytest.approx(3.0)  # 6 samples for 2 $
    assert value.samples_per_s == pytest.approx(13.0)


def test_below_the_thriftiest_plan_it_takes_turns_with_idling() -> None:
    value = budget_value([[IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 16.0)]], 0.25)
    assert (value.price_of_money_samples_per_usd, value.samples_per_s) == (10.0, 2.5)


@pytest.mark.parametrize("rounding", [-1e-12, 0.0, 1e-12])
def test_a_budget_for_the_fastest_plan_to_the_last_digit_does_not_bind(rounding: float) -> None:
    value = budget_value([[IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 16.0)]], 3.0 + rounding)
    assert value.price_of_money_samples_per_usd == 0.0
    assert value.samples_per_s == pytest.approx(16.0)


def test_a_plan_that_is_faster_by_rounding_alone_is_worth_no_dollar() -> None:
    value = budget_value([[IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 10.0 + 1e-13)]], 2.0)
    assert value.price_of_money_samples_per_usd == 0.0


def test_the_fastest_plan_within_a_cost_runs_and_costs_no_more() -> None:
    plans = [
        Candidate(Plan(0, "1f1b"), e) for e in (IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 16.0))
    ]
    assert fastest_within(plans, 3.0 - 1e-12) is plans[2]
    assert fastest_within(plans, 2.0) is plans[1]
    assert fastest_within(plans, 0.5) is None


def test_money_is_worth_nothing_more_where_the_fastest_plan_is_within_the_budget() -> None:
    value = budget_value([[IDLE_ESTIMATE, plan(1.0, 10.0), plan(3.0, 16.0)]], 3.5)
    assert (value.price_of_money_samples_per_usd, value.samples_per_s) == (0.0, 16.0)


def test_a_plan_below_the_line_between_two_others_is_never_used() -> None:
    plans = [IDLE_ESTIMATE, plan(1.0, 10.0), plan(2.0, 12.0), plan(3.0, 16.0)]
    assert budget_value([plans], 2.0).samples_per_s == pytest.approx(13.0)


def test_money_goes_to_the_state_in_which_it_brings_most() -> None:
    """Half of the time a dollar brings 10 samples, half of the time 2."""
    states = [[IDLE_ESTIMATE, plan(1.0, 10.0)], [IDLE_ESTIMATE, plan(1.0, 2.0)]]
    value = budget_value(states, 0.5)
    assert value.samples_per_s == pytest.approx(5.0)
    assert budget_value(states, 0.75).price_of_money_samples_per_usd == pytest.approx(2.0)


def test_a_state_without_plans_is_refused() -> None:
    with pytest.raises(ValueError, match="without any plan"):
        budget_value([[]], 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_rate_and_price_are_those_of_the_linear_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(3))
    states = [
        [IDLE_ESTIMATE, *(plan(*rng.uniform(0.1, 5.0, 2)) for _ in range(rng.integers(1, 8)))]
        for _ in range(3)
    ]
    budget = float(rng.uniform(0.05, 3.0))
    value = budget_value(states, budget, shares=list(shares))
    weighted = [(s, e) for s, state in enumerate(states) for e in state]
    found = linprog(
        [-shares[s] * e.samples_per_s for s, e in weighted],
        A_ub=[[shares[s] * e.cost_usd_per_s for s, e in weighted]],
        b_ub=[budget],
        A_eq=[[float(s == state) for s, _ in weighted] for state in range(3)],
        b_eq=[1.0] * 3,
    )
    assert value.samples_per_s == pytest.approx(-found.fun, rel=1e-9)
    price = -found.ineqlin.marginals[0]
    assert value.price_of_money_samples_per_usd == pytest.approx(price, rel=1e-7, abs=1e-9)
