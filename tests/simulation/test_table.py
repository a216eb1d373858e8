"""The control law on a table of plans."""

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.simulation.table import PlanTable, TableControl, run_table

# Plan 1 is slow and cheap, plan 2 fast and dear; in state 1 neither is there.
RATES = np.array([[0.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
COSTS = np.array([[0.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
RUNS = np.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
TABLE = PlanTable(RATES, COSTS, RUNS)
LAW = TableControl(penalty_weight=50.0, budget_usd_per_s=2.5, slot_s=1.0, backlog_usd=33.0)
STEADY = np.zeros(4000, dtype=np.int64)


def test_two_plans_are_mixed_to_spend_exactly_the_budget() -> None:
    """Half the time each: c = 2.5 and r = 2; the price of money is 2/3 samples a dollar."""
    run = run_table(TABLE, STEADY, LAW)
    assert run.cost_usd_per_s == pytest.approx(2.5, abs=0.01)
    assert run.rate_samples_per_s == pytest.approx(2.0, abs=0.01)
    assert run.backlogs_usd[-1] / LAW.penalty_weight == pytest.approx(2 / 3, abs=0.05)


def test_the_hard_cap_is_never_exceeded() -> None:
    run = run_table(TABLE, STEADY, replace(LAW, total_usd=1000.0))
    assert 995.0 < run.bills_usd.sum() <= 1000.0


def test_above_the_ledger_guards_line_only_idling_is_allowed() -> None:
    run = run_table(TABLE, STEADY, replace(LAW, backlog_usd=0.0, line_usd=5.0))
    over_T = np.cumsum(run.bills_usd) - 2.5 * np.arange(1, len(STEADY) + 1)
    assert over_T.max() <= 5.0 + (4.0 - 2.5)


def test_a_pause_makes_changes_rare() -> None:
    free = run_table(TABLE, STEADY, replace(LAW, least_pause_slots=0.0))
    dear = run_table(TABLE, STEADY, replace(LAW, pause_s=0.5))
    changes = [int((np.diff(run.plans) != 0).sum()) for run in (free, dear)]
    assert changes[1] < changes[0] / 3
    assert dear.paused.sum() >= changes[1]


def test_a_plan_chosen_for_a_state_that_has_passed_gives_nothing() -> None:
    state_T = np.array([0, 0, 1, 1])
    run = run_table(TABLE, state_T, replace(LAW, backlog_usd=0.0), seen_T=np.array([0, 0, 0, 1]))
    assert run.samples.tolist() == [3.0, 3.0, 0.0, 0.0]
    assert run.plans.tolist() == [2, 2, 2, 0]


def test_a_floor_that_the_budget_cannot_pay_raises_both_backlogs() -> None:
    law = replace(LAW, floor_samples_per_s=2.5, progress_weight=1.0)
    run = run_table(TABLE, STEADY, law)
    assert run.progress_usd[-1] > 100.0
    assert run.backlogs_usd[-1] > 100.0


def test_idle_is_plan_0() -> None:
    with pytest.raises(ValueError, match="plan 0 of a table is idle"):
        PlanTable(RATES + 1.0, COSTS, RUNS)
