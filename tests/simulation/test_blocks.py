"""Billing by blocks in a closed loop on a virtual clock: what is paid ahead is used."""

from math import fsum

import pytest

from orchestrator.core.budget import BudgetOptions
from tests.simulation.closed_loop import SLOT_S, Menu, Rehearsal, demo_cluster, rehearsal

BLOCKS = {"minute 20": (1200.0, 1200.0), "hour": (3600.0, 3600.0), "first hour": (3600.0, 1.0)}


def billed_by_blocks(name: str, budget_per_hour_usd: float) -> Rehearsal:
    minimum_s, quantum_s = BLOCKS[name]
    return rehearsal(
        budget=BudgetOptions(average_per_hour_usd=budget_per_hour_usd),
        cluster=demo_cluster(minimum_s=minimum_s, quantum_s=quantum_s),
        num_samples=10**6,
        strategy=Menu(),
    ).run(max_slots=150)


@pytest.mark.parametrize("budget_per_hour_usd", [0.5, 2.0])
@pytest.mark.parametrize("name", BLOCKS)
def test_devices_work_through_the_blocks_they_are_paid_for(
    name: str, budget_per_hour_usd: float
) -> None:
    """A score that sees seconds only gives them back after a slot or two of 20 and of 60."""
    run = billed_by_blocks(name, budget_per_hour_usd)
    end_s = run.records[-1].time_s
    paid_s = fsum(min(e.to_s, end_s) - e.from_s for e in run.ledger if e.usd)
    used_s = SLOT_S * sum(len(r.plan.device_ids) for r in run.records)
    assert used_s >= 0.9 * paid_s
    for record in run.records:
        over_usd = record.spent_usd - record.budget_usd
        assert over_usd <= record.overspend_bound_usd + 1e-12, f"slot {record.slot}"


def test_a_run_that_bills_by_blocks_starts_at_the_price_at_which_beginning_them_pays() -> None:
    """From the price of the long run it would wait until the backlog has fallen sixfold."""
    run = billed_by_blocks("hour", 2.0)
    first = next(r.slot for r in run.records if not r.next_plan.is_idle)
    assert first <= 5
