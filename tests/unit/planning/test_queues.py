import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.planning.queues import Queues, overspend_bound_usd, penalty_weight, queue_cap_usd


def test_backlog_grows_by_what_was_billed_above_the_budget_of_the_real_length() -> None:
    queues = Queues(1.0).update(bill_usd=5.0, budget_usd_per_s=0.1, elapsed_s=30.0)
    assert queues.backlog_usd == 3.0  # 1 + 5 - 0.1 * 30


def test_backlog_never_falls_below_zero() -> None:
    assert Queues(1.0).update(0.0, 1.0, 10.0).backlog_usd == 0.0


def test_slot_closed_early_is_charged_with_its_real_length() -> None:
    # pitfall 3 of docs/model.md, section 8: the nominal length would grant 6 $ here
    assert Queues().update(2.0, 0.1, 12.0).backlog_usd == pytest.approx(0.8)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 100)), max_size=30), st.floats(0, 5))
def test_spending_is_at_most_budget_plus_backlog(
    slots: list[tuple[float, float]], budget: float
) -> None:
    queues, bills, seconds = Queues(), [], []
    for bill, elapsed in slots:
        queues = queues.update(bill, budget, elapsed)
        bills.append(bill)
        seconds.append(elapsed)
    assert math.fsum(bills) <= budget * math.fsum(seconds) + queues.backlog_usd + 1e-9


def test_cap_forgives_and_says_how_much() -> None:
    queues = Queues(4.0).update(3.0, 0.0, 1.0, cap_usd=5.0).update(1.0, 0.0, 1.0, cap_usd=5.0)
    assert queues == Queues(backlog_usd=5.0, forgiven_usd=3.0)


def test_weight_leaves_kappa_b_h_above_the_opening_backlog() -> None:
    weight = penalty_weight(0.05, 2.0, 100.0, 1000.0, opening_samples_per_usd=400.0)
    assert weight * (1.2 * 1000.0 - 400.0) == pytest.approx(0.05 * 2.0 * 100.0)


def test_time_constant_is_at_most_what_was_asked() -> None:
    """Where idling and the thriftiest plan take turns, kappa alone would make it the horizon."""
    weight = penalty_weight(0.2, 2.0, 100.0, 1000.0, 1000.0, largest=0.01)
    assert weight * 1000.0 / 2.0 == pytest.approx(5.0)  # tau_V = V lambda / b


def test_automatic_cap_lies_above_every_price_of_money() -> None:
    options = BudgetOptions(average_per_hour_usd=4.0, queue_cap="auto")
    weight = penalty_weight(0.05, 0.001, 3600.0, rho_samples_per_usd=1000.0)
    cap = queue_cap_usd(options, weight * 1.2 * 1000.0)
    assert cap is not None
    assert cap / weight == pytest.approx(1.5 * 1.2 * 1000.0)


def test_without_a_cap_nothing_is_forgiven() -> None:
    options = BudgetOptions(average_per_hour_usd=4.0)
    assert queue_cap_usd(options, 1.0) is None


def test_rescaling_keeps_the_price_of_money() -> None:
    queues = Queues(6.0, forgiven_usd=1.0).rescaled(old_weight=2.0, new_weight=1.0)
    assert queues == Queues(3.0, forgiven_usd=1.0)
    assert queues.backlog_usd / 1.0 == 6.0 / 2.0


def test_weight_puts_the_largest_price_of_money_at_the_overspend_line() -> None:
    # at Q = kappa b H the price Q/V is 1.2 rho: no plan seen so far is worth it
    weight = penalty_weight(0.05, 0.001, 3600.0, rho_samples_per_usd=500.0)
    line_usd = 0.05 * 0.001 * 3600.0
    assert line_usd / weight == pytest.approx(1.2 * 500.0)


@pytest.mark.parametrize(
    "wrong", [(0, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (math.nan, 1, 1, 1)]
)
def test_weight_needs_positive_figures(wrong: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        penalty_weight(*wrong)


def test_slack_is_the_line_and_the_dearest_slot_above_its_own_budget() -> None:
    bound = overspend_bound_usd(2.0, 0.1, slot_bill_max_usd=9.0, slot_s=60.0)
    assert bound == pytest.approx(2.0 + (9.0 - 6.0))


def test_cheap_slots_need_no_slack_of_their_own() -> None:
    assert overspend_bound_usd(2.0, 0.1, slot_bill_max_usd=1.0, slot_s=60.0) == 2.0


def test_a_bare_off_of_yaml_means_no_cap() -> None:
    assert BudgetOptions(average_per_hour_usd=1.0, queue_cap=False).queue_cap == "off"


def test_weight_horizon_is_at_most_a_week() -> None:
    month = BudgetOptions(average_per_hour_usd=1.0, horizon_hours=720.0)
    assert month.weight_horizon_hours == 168.0
    assert BudgetOptions(average_per_hour_usd=1.0, horizon_hours=5.0).weight_horizon_hours == 5.0


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"average_per_hour_usd": 0.0}, "average_per_hour_usd"),
        ({"average_per_hour_usd": 1.0, "total_usd": -3.0}, "total_usd"),
        ({"average_per_hour_usd": 1.0, "horizon_hours": 0.0}, "horizon_hours"),
        ({"average_per_hour_usd": 1.0, "queue_cap": -1.0}, "queue_cap"),
        ({"average_per_hour_usd": 1.0, "min_samples_per_s": -5.0}, "min_samples_per_s is -5"),
    ],
)
def test_impossible_budget_is_refused_by_name(section: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BudgetOptions(**section)


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"zone": "z1"},
        {"zone": "z1", "pool": "fast", "min_share": 0.5},
        {"zone": "z1", "max_per_hour_usd": 1.0, "min_share": 0.5},
        {"pool": "fast", "max_per_hour_usd": 1.0},
        {"pool": "fast", "min_share": 1.5},
        {"egress": True, "max_per_hour_usd": -1.0},
    ],
)
def test_limit_that_says_nothing_clear_is_refused(limit: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"limit|min_share|max_per_hour_usd"):
        LimitOptions(**limit)  # type: ignore[arg-type]  # the wrong types are the point
