from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.ledger import Ledger
from orchestrator.control.treasury import Treasury
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.slot import IDLE_ESTIMATE, StepEstimate
from orchestrator.planning.frontier import BudgetValue
from orchestrator.planning.lyapunov import ControlOptions

BUDGET = BudgetOptions(average_per_hour_usd=3.6, horizon_hours=10.0)  # b = 0.001 $/s, H = 36000 s
CONTROL = ControlOptions(slot_s=60.0)
CLUSTER = make_cluster([make_device("gpu-0")], price_usd_per_s=0.01)


def running(samples_per_s: float, cost_usd_per_s: float, step_s: float = 1.0) -> StepEstimate:
    return StepEstimate(step_s, samples_per_s, cost_usd_per_s)


def test_the_weight_follows_from_kappa_budget_horizon_and_the_best_ratio() -> None:
    """V = kappa b H / (1.2 rho): 0.05 x 0.001 x 36000 / (1.2 x 1000)."""
    treasury = Treasury(BUDGET, CONTROL)
    assert treasury.learn([running(10.0, 0.01), running(5.0, 0.05), IDLE_ESTIMATE])
    assert treasury.best_ratio_samples_per_usd == pytest.approx(1000.0)
    assert treasury.penalty_weight == pytest.approx(1.8 / 1200)
    assert treasury.line_usd == pytest.approx(1.8)


def test_a_better_ratio_moves_weight_and_backlog_but_not_the_price_of_money() -> None:
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    later = replace(CLUSTER, now_s=60.0)
    treasury.charge(0.6, CLUSTER, later, running(10.0, 0.01))
    price = treasury.queues.backlog_usd / treasury.penalty_weight
    assert not treasury.learn([running(9.0, 0.01)])
    assert treasury.learn([running(20.0, 0.01)])
    assert treasury.queues.backlog_usd / treasury.penalty_weight == pytest.approx(price)
    assert treasury.line_usd == pytest.approx(1.8)


def test_a_slot_is_charged_its_bill_less_the_budget_of_its_real_length() -> None:
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    treasury.charge(0.25, CLUSTER, replace(CLUSTER, now_s=20.0), running(10.0, 0.01))
    assert treasury.queues.backlog_usd == pytest.approx(0.25 - 0.001 * 20)


def test_the_bound_grows_with_the_dearest_slot_seen_and_never_shrinks() -> None:
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    before = treasury.overspend_bound_usd
    treasury.charge(0.6, CLUSTER, replace(CLUSTER, now_s=60.0), running(10.0, 0.01))
    first = treasury.overspend_bound_usd
    # The line, and one device held for 60 s, 2 steps of overrun and a block of 1 s, less b D.
    assert first == pytest.approx(1.8 + 0.01 * 63 - 0.001 * 60)
    assert first > before
    dear = replace(CLUSTER, now_s=120.0, offers=(replace(CLUSTER.offers[0], price_usd_per_s=0.02),))
    treasury.charge(1.2, replace(CLUSTER, now_s=60.0), dear, running(10.0, 0.01))
    assert treasury.overspend_bound_usd == pytest.approx(1.8 + 0.02 * 63 - 0.001 * 60)
    treasury.charge(0.0, dear, replace(CLUSTER, now_s=180.0), IDLE_ESTIMATE)
    assert treasury.overspend_bound_usd == pytest.approx(1.8 + 0.02 * 63 - 0.001 * 60)


def test_nothing_is_promised_where_idling_is_forbidden() -> None:
    treasury = Treasury(replace(BUDGET, allow_idle=False), CONTROL)
    assert treasury.overspend_bound_usd == float("inf")


def test_under_a_hard_cap_the_last_checkpoint_is_kept_paid_for() -> None:
    treasury, ledger = Treasury(replace(BUDGET, total_usd=5.0), CONTROL), Ledger(spent_usd=1.0)
    view = treasury.view(ledger, replace(CLUSTER, now_s=100), IDLE_ESTIMATE)
    assert view.budget_usd == pytest.approx(0.1)
    assert view.reserve_usd == pytest.approx(0.02)
    assert view.left_usd == pytest.approx(3.98)


def test_a_second_of_the_run_has_the_budget_of_so_many_billed_ones() -> None:
    treasury = Treasury(BUDGET, CONTROL, billing_speedup=60.0)
    assert treasury.budget_usd_per_s == pytest.approx(0.06)
    treasury.learn([running(10.0, 0.01)])
    assert treasury.line_usd == pytest.approx(1.8)


def test_the_backlog_opens_at_the_estimated_price_and_leaves_kappa_b_h_to_overspend() -> None:
    """V = kappa b H / (1.2 rho - lambda), Q_0 = V lambda."""
    treasury = Treasury(BUDGET, replace(CONTROL, kappa=0.2))
    treasury.learn([running(10.0, 0.01)])  # rho 1000
    treasury.open(BudgetValue(400.0, 3.0))
    assert treasury.penalty_weight == pytest.approx(7.2 / 800)
    assert treasury.queues.backlog_usd == treasury.placeholder_usd == pytest.approx(3.6)
    assert treasury.price_of_money_samples_per_usd == pytest.approx(400.0)
    assert treasury.time_constant_s == pytest.approx(3600.0)  # V lambda / b
    assert treasury.line_usd == pytest.approx(7.2)


def test_by_default_the_price_of_money_follows_within_a_twentieth_of_the_horizon() -> None:
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 3.0))
    assert treasury.time_constant_s == pytest.approx(1800.0)
    assert treasury.line_usd == pytest.approx(3.6)  # of the 7.2 $ of kappa 0.2
    treasury.open(BudgetValue(100.0, 3.0))
    assert treasury.line_usd == pytest.approx(7.2)


def test_the_line_stands_when_a_better_ratio_moves_weight_and_place_holder() -> None:
    treasury = Treasury(BUDGET, replace(CONTROL, kappa=0.2))
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 3.0))
    treasury.learn([running(20.0, 0.01)])
    assert treasury.line_usd == pytest.approx(7.2)
    assert treasury.price_of_money_samples_per_usd == pytest.approx(400.0)


def test_a_price_above_every_ratio_opens_at_the_best_ratio() -> None:
    treasury = Treasury(replace(BUDGET, allow_idle=False), CONTROL)
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(9e9, 3.0))
    assert treasury.price_of_money_samples_per_usd == pytest.approx(1000.0)


@pytest.mark.parametrize(("kappa", "line_usd", "wanted_usd"), [(0.2, 7.2, 3.6), ("auto", 4.9, 1.8)])
def test_a_cap_below_the_opening_backlog_is_where_it_opens_and_forgives_nothing(
    kappa: float, line_usd: float, wanted_usd: float
) -> None:
    """V = (kappa b H + 0.5 $) / (1.2 rho), at most 4.5e-3 with auto: 5.4 $ of V rho less 0.5 $."""
    treasury = Treasury(replace(BUDGET, queue_cap=0.5), replace(CONTROL, kappa=kappa))
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 3.0))
    assert treasury.queues.backlog_usd == treasury.placeholder_usd == pytest.approx(0.5)
    assert treasury.queues.forgiven_usd == 0
    assert treasury.estimated_backlog_usd == pytest.approx(wanted_usd)
    assert treasury.line_usd == pytest.approx(line_usd)
    treasury.learn([running(12.0, 0.01)])
    assert treasury.queues.backlog_usd <= 0.5


def test_the_backlog_opens_where_renting_anew_pays_and_v_follows_the_long_run() -> None:
    """tau_V is half an hour at 400 samples/$, and so a quarter of it at the first 100."""
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 3.0), first_samples_per_usd=100.0)
    assert treasury.price_of_money_samples_per_usd == pytest.approx(100.0)
    assert treasury.time_constant_s == pytest.approx(450.0)


def test_missing_samples_raise_the_weight_and_with_it_the_line_for_good() -> None:
    """omega_z = b / r_ref = 0.001 / 4: 60 s at 3 samples/s short of 5 are 0.03 $."""
    treasury = Treasury(replace(BUDGET, min_samples_per_s=5.0), replace(CONTROL, kappa=0.2))
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 4.0))
    before = treasury.line_usd
    later = replace(CLUSTER, now_s=60.0)
    treasury.charge(0.06, CLUSTER, later, running(2.0, 0.001), samples=120)
    short_usd = 0.001 / 4 * 180
    assert treasury.queues.progress_usd == pytest.approx(short_usd)
    raised = treasury.penalty_weight + 0.001 / 4 * short_usd
    assert treasury.floored_weight == pytest.approx(raised)
    assert treasury.price_of_money_samples_per_usd == pytest.approx(3.6 / raised)
    raised_line = treasury.line_usd
    assert raised_line > before
    treasury.charge(0.06, later, replace(CLUSTER, now_s=120.0), IDLE_ESTIMATE, samples=10_000)
    assert treasury.queues.progress_usd == 0
    assert treasury.line_usd == raised_line


def test_plans_are_scored_with_the_part_of_the_time_that_makes_samples() -> None:
    """Steps take 48 of 60 s for a thousand slots: V' loses a fifth, V and Q nothing."""
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    weight = treasury.penalty_weight
    for slot in range(1000):
        then = replace(CLUSTER, now_s=60.0 * slot)
        later = replace(CLUSTER, now_s=60.0 * (slot + 1))
        treasury.charge(0.06, then, later, running(10.0, 0.01), working_s=48.0)
    assert treasury.scored_weight == pytest.approx(0.8 * weight)
    assert treasury.penalty_weight == weight


def test_time_paid_ahead_counts_as_free_up_to_the_top_of_the_backlog_only() -> None:
    """V rho_hat = 1.8 $."""
    treasury = Treasury(BUDGET, CONTROL)
    treasury.learn([running(10.0, 0.01)])
    later = replace(CLUSTER, now_s=60.0)
    treasury.charge(1.8, CLUSTER, later, running(10.0, 0.01))
    assert treasury.trusts_prepaid
    treasury.charge(0.2, later, replace(CLUSTER, now_s=120.0), running(10.0, 0.01))
    assert not treasury.trusts_prepaid


def opened() -> Treasury:
    """V = 7.2 / 800 $^2/sample, Q = Q_0 = 3.6 $, line 7.2 $."""
    treasury = Treasury(BUDGET, replace(CONTROL, kappa=0.2))
    treasury.learn([running(10.0, 0.01)])
    treasury.open(BudgetValue(400.0, 3.0))
    return treasury


def charged(treasury: Treasury, bill_usd: float, from_s: float, to_s: float) -> None:
    since, now = replace(CLUSTER, now_s=from_s), replace(CLUSTER, now_s=to_s)
    treasury.charge(bill_usd, since, now, running(10.0, 0.01))


def test_what_was_allowed_before_a_change_stays_allowed() -> None:
    treasury = opened()
    treasury.change(replace(BUDGET, average_per_hour_usd=7.2), 1000.0, 1.0)
    treasury.change(replace(BUDGET, average_per_hour_usd=1.8), 1500.0, 2.0)
    assert treasury.allowance.at(2500.0) == pytest.approx(1.0 + 0.002 * 500 + 0.0005 * 1000)


def test_what_was_overspent_is_owed_on_top_of_a_place_holder_that_follows_v() -> None:
    """Twice b: V and Q_0 double, 0.5 $ stay 0.5 $; then lambda_hat 200: V = 14.4 / 1000."""
    treasury = opened()
    charged(treasury, 0.56, 0.0, 60.0)
    assert treasury.queues.backlog_usd == pytest.approx(4.1)
    treasury.change(replace(BUDGET, average_per_hour_usd=7.2), 60.0, 0.56)
    assert not treasury.is_priced
    assert treasury.queues.backlog_usd == pytest.approx(7.7)
    assert treasury.line_usd == pytest.approx(14.4)
    treasury.open(BudgetValue(200.0, 5.0))
    assert treasury.is_priced
    assert treasury.queues.backlog_usd == pytest.approx(2.88 + 0.5)
    assert treasury.line_usd == pytest.approx(14.4)


def test_the_bound_after_a_cut_is_what_was_overspent_until_that_is_paid_back() -> None:
    """A tenth of b: the line falls from 7.2 $ to 0.72 $, and 4.94 $ are overspent."""
    treasury = opened()
    charged(treasury, 5.0, 0.0, 60.0)
    treasury.change(replace(BUDGET, average_per_hour_usd=0.36), 60.0, 5.0)
    assert treasury.line_usd == pytest.approx(0.72)
    assert treasury.overspend_bound_usd == pytest.approx(4.94)
    for minute in range(1, 5):
        charged(treasury, 0.0, 60.0 * minute, 60.0 * minute + 60.0)
    assert treasury.overspend_bound_usd == pytest.approx(4.94 - 0.0001 * 240)
    charged(treasury, 0.0, 300.0, 300.0 + 43_000.0)
    slack_usd = 0.72 + treasury.slot_bill_max_usd - 0.0001 * 60
    assert treasury.overspend_bound_usd == pytest.approx(slack_usd)


def test_samples_that_a_floor_misses_stay_missing_at_another_weight() -> None:
    """omega = b / r_ref: 0.001 / 3 $ a sample, then 0.002 / 3."""
    treasury = opened()
    floored = replace(BUDGET, min_samples_per_s=2.0)
    treasury.change(floored, 0.0, 0.0)
    charged(treasury, 0.06, 0.0, 60.0)
    assert treasury.queues.progress_usd == pytest.approx(120 * 0.001 / 3)
    treasury.change(replace(floored, average_per_hour_usd=7.2), 60.0, 0.06)
    assert treasury.queues.progress_usd == pytest.approx(120 * 0.002 / 3)
    treasury.change(BUDGET, 60.0, 0.06)
    assert treasury.queues.progress_usd == treasury.queues.progress_max_usd == 0.0


def test_the_price_of_money_is_not_looked_for_anew_where_only_the_hard_cap_moves() -> None:
    treasury = opened()
    treasury.change(replace(BUDGET, total_usd=9.0, on_exhausted="stop"), 60.0, 0.06)
    assert treasury.is_priced
    assert treasury.queues.backlog_usd == pytest.approx(3.6)
