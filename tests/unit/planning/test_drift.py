import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slot import StepEstimate
from orchestrator.planning.drift import Drift, Lead
from orchestrator.planning.queues import Queues


def plan(cost: float, rate: float) -> StepEstimate:
    return StepEstimate(step_s=1.0, samples_per_s=rate, cost_usd_per_s=cost)


@given(st.floats(0, 100), st.floats(0, 3), st.floats(0, 10))
def test_the_slot_score_is_penalty_less_the_drift_of_the_queue_itself(
    backlog: float, cost: float, rate: float
) -> None:
    drift = Drift(penalty_weight=2.0, backlog_usd=backlog, budget_usd_per_s=1.0, slot_s=10.0)
    after = Queues(backlog).update(cost * 10.0, 1.0, 10.0).backlog_usd
    expected = 2.0 * rate - (after**2 - backlog**2) / 2 / 10.0
    assert drift.slot_score(plan(cost, rate)) == pytest.approx(expected, abs=1e-9)


def test_a_large_backlog_ranks_as_the_score_does() -> None:
    cheap, dear = plan(0.5, 10.0), plan(1.5, 11.0)
    for backlog, better in ((0.9e6, dear), (1.1e6, cheap)):  # J ties at Q = V
        drift = Drift(1e6, backlog, budget_usd_per_s=1.0, slot_s=10.0)
        assert max((cheap, dear), key=drift.slot_score) is better


def test_a_slot_that_would_overshoot_ranks_below_one_that_keeps_the_price() -> None:
    """J = r - Q c prefers the dear plan at Q = 0; it would owe 90 $ after one slot."""
    steady, dear = plan(1.0, 10.0), plan(10.0, 50.0)
    drift = Drift(1.0, 0.0, budget_usd_per_s=1.0, slot_s=10.0)
    assert drift.slot_score(steady) > drift.slot_score(dear)


def test_nothing_is_gained_by_saving_what_is_not_owed() -> None:
    drift = Drift(1.0, 0.0, budget_usd_per_s=1.0, slot_s=10.0)
    assert drift.slot_score(plan(0.1, 5.0)) == drift.slot_score(plan(1.0, 5.0)) == 5.0


def test_a_lead_that_lasts_counts_for_the_whole_horizon() -> None:
    assert Lead(2.0).gain_usd2(100.0) == 200.0
    assert Lead(2.0, fading_usd2_per_s2=-1.0).gain_usd2(100.0) == 200.0


def test_a_lead_that_its_own_spending_ends_counts_until_then() -> None:
    # 2 - 0.1 t reaches 0 after 20 s: the triangle has 20 $^2
    assert Lead(2.0, fading_usd2_per_s2=0.1).gain_usd2(100.0) == pytest.approx(20.0)


def test_a_plan_is_held_for_a_slot_even_when_its_lead_ends_before() -> None:
    lead = Lead(2.0, fading_usd2_per_s2=0.1, least_s=40.0)
    assert lead.gain_usd2(100.0) == pytest.approx(2.0 * 40 - 0.1 * 40**2 / 2)


def test_the_lead_is_what_the_middle_of_the_next_slot_will_show() -> None:
    """Until then the dear incumbent has added half of its slot to the backlog."""
    drift = Drift(1.0, 4.0, budget_usd_per_s=1.0, slot_s=10.0)
    lead = drift.lead(plan(0.5, 3.0), plan(1.4, 8.0))
    assert lead.usd2_per_s == pytest.approx(1.0 * (3 - 8) - (4 + 0.4 * 10 / 2) * (0.5 - 1.4))
    assert lead.fading_usd2_per_s2 == pytest.approx((0.5 - 1.4) * (0.5 - 1.0))


def test_waiting_ends_where_nothing_is_owed_however_small_the_weight() -> None:
    """A slot of the plan owes 90 $ at a weight of a millionth: it runs all the same."""
    drift = Drift(1e-6, 0.0, budget_usd_per_s=1.0, slot_s=10.0)
    assert drift.lead(plan(10.0, 50.0), plan(0.0, 0.0)).gain_usd2(100.0) == pytest.approx(5e-3)


def test_two_plans_around_the_budget_take_turns_more_rarely_the_longer_the_pause() -> None:
    """The dwelling time grows with the square root of the pause."""

    def num_changes(pause_s: float) -> int:
        plans = (plan(0.6, 10.0), plan(1.8, 16.0))  # the price that ties them: 5
        weight, backlog, running, changes = 1000.0, 5000.0, 0, 0
        for _ in range(20_000):
            drift = Drift(weight, backlog, budget_usd_per_s=1.0, slot_s=1.0)
            gain = drift.lead(plans[1 - running], plans[running]).gain_usd2(600.0)
            if gain > pause_s * weight * 16.0:
                running, changes = 1 - running, changes + 1
            backlog = drift.backlog_after_usd(plans[running].cost_usd_per_s)
        return changes

    few, many = num_changes(16.0), num_changes(1.0)
    assert many / few == pytest.approx(4.0, rel=0.15)
