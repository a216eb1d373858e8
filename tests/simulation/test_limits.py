"""The user's limits in a closed loop: priced in the search, named where nothing obeys them."""

from dataclasses import replace

import pytest

from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.errors import InfeasibleError
from orchestrator.simulation.traces import TraceEvent
from tests.simulation.closed_loop import PER_HOUR, Rehearsal, demo_cluster, rehearsal

RICH = BudgetOptions(average_per_hour_usd=100.0, horizon_hours=2.0)


def spent_in(run: Rehearsal, pool: str) -> list[float]:
    """Dollars per hour of a pool's devices, by the plan of each slot that followed."""
    return [
        sum(PER_HOUR[pool] for d in record.next_plan.device_ids if d.startswith(pool))
        for record in run.records
    ]


def test_limit_that_the_first_search_breaks_is_priced_and_kept() -> None:
    """One fast and one mid device fit 4.6 $/h of their zone; free, the plan uses all four."""
    limits = (LimitOptions(zone="z1", max_per_hour_usd=4.6),)
    run = rehearsal(budget=replace(RICH, limits=limits)).run(max_slots=4)
    pairs = zip(spent_in(run, "fast"), spent_in(run, "mid"), strict=True)
    spent = [fast + mid for fast, mid in pairs]
    assert max(spent) <= 4.6
    assert min(spent) > 0.9  # a fast device is had, not a mid one alone


def test_marginal_values_of_a_slot_are_in_its_record() -> None:
    limits = (LimitOptions(zone="z1", max_per_hour_usd=4.6),)
    run = rehearsal(budget=replace(RICH, limits=limits)).run(max_slots=2)
    values = dict(run.records[-1].marginal_values)
    assert values["budget_samples_per_s"] == 0.0  # 100 $/h are more than everything costs
    assert values["device_samples_per_s.slow"] > 0
    assert values["device_samples_per_s.mid"] == 0.0  # its zone has no dollar left for it
    assert "device_break_even_per_hour_usd.slow" not in values


def test_limits_that_no_plan_obeys_end_the_run_by_name_and_amount() -> None:
    limits = tuple(LimitOptions(zone=zone, max_per_hour_usd=0.01) for zone in ("z1", "z2"))
    with pytest.raises(InfeasibleError, match=r"comes nearest breaks zone z2: 35 times its limit"):
        rehearsal(budget=replace(RICH, limits=limits)).run(max_slots=2)


def test_limit_that_a_price_makes_impossible_idles_and_says_by_how_much() -> None:
    limits = (
        LimitOptions(zone="z1", max_per_hour_usd=1.0),
        LimitOptions(zone="z2", max_per_hour_usd=0.0),
    )
    dearer = TraceEvent(at_s=150.0, pool="mid", price_usd_per_s=2.0 / 3600)
    run = rehearsal(budget=replace(RICH, limits=limits), events=[dearer]).run(max_slots=6)
    assert run.records[0].next_plan.device_ids[0].startswith("mid")
    last = run.records[-1]
    assert last.decision == "idle"
    assert last.reason.startswith("user_rows_infeasible: ")
    assert "zone z1: 2 times its limit" in last.reason


def test_demo_cluster_is_as_the_limits_above_assume() -> None:
    prices = {o.pool: round(3600 * o.price_usd_per_s, 2) for o in demo_cluster().offers}
    assert prices == {"fast": 3.67, "mid": 0.9, "slow": 0.35}
