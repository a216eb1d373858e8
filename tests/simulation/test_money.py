"""Budget, progress floor and prices that are not known, in a closed loop on a virtual clock."""

import json
from dataclasses import replace
from math import fsum

import numpy as np
import pytest

from orchestrator.core.budget import BudgetOptions
from orchestrator.core.durable import ControlState
from orchestrator.core.slot import SlotRecord
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.storage import from_json, to_json
from tests.simulation.closed_loop import PER_HOUR, Menu, Rehearsal, demo_cluster, rehearsal

TIGHT = BudgetOptions(average_per_hour_usd=2.0, horizon_hours=4)
RICH = BudgetOptions(average_per_hour_usd=20.0, horizon_hours=4)


def of_menu(**choices: object) -> Rehearsal:
    """A rehearsal whose slots do not search: what money does with plans is the question here."""
    return rehearsal(strategy=Menu(), **choices)  # type: ignore[arg-type]


def assert_bound_kept(run: Rehearsal) -> None:
    for record in run.records:
        over_usd = record.spent_usd - record.budget_usd
        assert over_usd <= record.overspend_bound_usd + 1e-12, f"slot {record.slot}"


def rate(records: list[SlotRecord]) -> float:
    return (records[-1].samples - records[0].samples) / (records[-1].time_s - records[0].time_s)


def cost_per_hour(records: list[SlotRecord]) -> float:
    spent_usd = records[-1].spent_usd - records[0].spent_usd
    return 3600 * spent_usd / (records[-1].time_s - records[0].time_s)


def row(at_s: float, pool: str, per_hour: float) -> TraceEvent:
    """A row of a price feed."""
    return TraceEvent(at_s=at_s, pool=pool, price_usd_per_s=per_hour / 3600, read=True)


def test_a_run_starts_at_the_price_of_money_and_neither_idles_nor_runs_ahead() -> None:
    """From an empty backlog the first slot of all devices alone would cost 0.13 $ too much."""
    run = of_menu(budget=TIGHT).run(max_slots=60)
    prices = [r.price_of_money_samples_per_usd for r in run.records]
    assert max(prices) <= 1.35 * prices[0]
    assert min(prices) >= 0.65 * prices[0]
    assert max(r.spent_usd - r.budget_usd for r in run.records) <= 0.1
    assert "idle" not in {r.decision for r in run.records}
    assert_bound_kept(run)


@pytest.mark.parametrize("kappa", [0.02, 0.2])
def test_plans_between_which_the_budget_lies_take_turns_rarely(kappa: float) -> None:
    control = ControlOptions(slot_s=60.0, kappa=kappa)
    run = of_menu(budget=replace(TIGHT, horizon_hours=24), control=control).run(max_slots=150)
    changes = sum(r.decision == "switch" for r in run.records[30:])
    assert changes <= 2 * {0.02: 12, 0.2: 4}[kappa]  # of two hours
    assert cost_per_hour(run.records[30:]) == pytest.approx(2.0, rel=0.06)
    assert_bound_kept(run)


def test_a_floor_that_the_budget_allows_is_met_and_the_average_kept() -> None:
    """At 2 $/h about 1.45 samples/s can be had."""
    run = of_menu(budget=replace(TIGHT, min_samples_per_s=1.3)).run(max_slots=120)
    assert rate(run.records) >= 1.3
    assert cost_per_hour(run.records) <= 2.0 * 1.03
    assert run.records[-1].progress_backlog_usd < 0.2
    assert_bound_kept(run)


def test_a_floor_above_what_the_budget_allows_takes_from_both_and_is_called_infeasible() -> None:
    budget = replace(TIGHT, min_samples_per_s=3.0)
    control = ControlOptions(slot_s=1440.0)  # a day, the alarm's window, has 60 of them
    run = of_menu(budget=budget, control=control, num_samples=10**6).run(max_slots=63)
    alarms = [e.detail for e in run.events if e.kind == "alarm"]
    assert alarms
    assert alarms[0].startswith("budget_infeasible: over 24 h the run cost ")
    assert "% below the budget.min_samples_per_s of 3;" in alarms[0]
    assert 1.45 < rate(run.records) < 3.0
    assert cost_per_hour(run.records) > 2.0
    assert run.records[-1].progress_backlog_usd > run.records[30].progress_backlog_usd
    assert_bound_kept(run)


def test_the_hard_cap_holds_whatever_the_floor_asks() -> None:
    budget = replace(TIGHT, min_samples_per_s=5.0, total_usd=1.0)
    run = of_menu(budget=budget).run(max_slots=500)
    assert run.loop.outcome is not None
    assert run.loop.outcome.status == "budget"
    assert max(r.spent_usd for r in run.records) <= 1.0


def test_queues_place_holder_and_alarm_survive_a_restart() -> None:
    budget = replace(TIGHT, min_samples_per_s=1.6)
    first = of_menu(budget=budget).run(max_slots=30)
    state = from_json(ControlState, json.loads(json.dumps(to_json(first.states[-1]))))
    assert state == first.states[-1]
    assert state.progress_backlog_usd > 0
    assert state.placeholder_usd
    assert state.alarm_marks
    assert state.held_s >= state.working_s > 0
    second = of_menu(budget=budget, state=state, backend=first.backend)
    record = second.loop.tick()
    bounds = [r.overspend_bound_usd for r in (first.records[-1], record)]
    assert bounds[1] == pytest.approx(bounds[0], rel=0.02)  # Z may have grown by a slot
    assert second.states[-1].placeholder_usd == state.placeholder_usd


@pytest.mark.parametrize("floor", [0.0, 1.3])
def test_a_cap_of_the_backlog_forgives_and_a_low_one_is_warned_of(floor: float) -> None:
    budget = replace(TIGHT, queue_cap=0.02, min_samples_per_s=floor)
    run = of_menu(budget=budget).run(max_slots=12)
    (warning,) = [e.detail for e in run.events if e.kind == "warning"]
    assert warning.startswith("queue_cap: 0.02 $ lies below the backlog of ")
    assert run.records[-1].forgiven_usd > 0
    assert max(r.backlog_usd for r in run.records) <= 0.02  # the first slot's among them
    assert_bound_kept(run)


def test_a_price_that_jumps_is_doubted_by_its_pool_until_two_more_readings_agree() -> None:
    events = [TraceEvent(at_s=90.0, pool="mid", price_usd_per_s=9.0 / 3600)]
    run = of_menu(budget=TIGHT, events=events).run(max_slots=8)
    doubted = [r.fallbacks for r in run.records if r.fallbacks]
    assert len(doubted) == 2
    assert doubted[0] == (
        "price: pool mid: a sudden 9 $/h is not believed yet; it counts at 0.9 $/h",
    )
    prices = [e.detail for e in run.events if e.kind == "price"]
    assert prices[0].startswith("pool mid: a sudden 9 $/h is not believed yet")
    assert prices[1] == "pool mid: 0.9 -> 9 $/h"
    guessed = [e for e in run.ledger if e.estimated]
    assert {e.pool for e in guessed} <= {"mid"}


def test_a_pool_whose_feed_fell_silent_counts_at_its_upper_price_and_takes_no_devices() -> None:
    """The last row is 5 minutes old at 420 s: five times 0.3 $/h from then on.

    skypilot-org/skypilot#1437, #1438, #976: decisions on spot prices of last week.
    """
    events = [row(120.0, "mid", 0.3)]
    run = of_menu(budget=TIGHT, events=events, price_max_age_s=300.0).run(max_slots=20)
    before = [r for r in run.records if r.time_s <= 420.0]
    after = [r for r in run.records if r.time_s > 420.0]
    assert not any(r.fallbacks for r in before)
    for record in after:
        (text,) = record.fallbacks
        assert text.startswith("price: pool mid: last read ")
        assert "it counts at 1.5 $/h, its upper price, and takes no devices" in text
    (event,) = [e for e in run.events if e.kind == "price" and "max_age_s" in e.detail]
    assert event.time_s == after[0].time_s
    held = {d for r in before for d in r.next_plan.device_ids if d.startswith("mid")}
    for record in after:
        taken = {d for d in record.next_plan.device_ids if d.startswith("mid")}
        assert taken <= held  # what was in use may stay, none is added
        held = taken
    bills = {round(e.price_per_hour, 9) for e in run.ledger if e.pool == "mid" and e.estimated}
    assert bills <= {1.5}
    assert_bound_kept(run)


def test_a_pool_above_its_maximum_is_given_up_and_taken_again_below_it() -> None:
    """The step under way ends at the price that rose in it; no other is begun."""
    dear, cheap = 120.0, 900.0
    events = [
        TraceEvent(at_s=dear, pool="mid", price_usd_per_s=1.5 / 3600),
        TraceEvent(at_s=cheap, pool="mid", price_usd_per_s=0.3 / 3600),
    ]
    offers = tuple(
        replace(o, max_price_usd_per_s=1.0 / 3600) if o.pool == "mid" else o
        for o in demo_cluster().offers
    )
    run = of_menu(budget=RICH, events=events, cluster=replace(demo_cluster(), offers=offers)).run(
        max_slots=25
    )

    def uses_mid(record: SlotRecord) -> bool:
        return any(d.startswith("mid") for d in record.next_plan.device_ids)

    assert all(uses_mid(r) for r in run.records if r.time_s < dear)
    assert not any(uses_mid(r) for r in run.records if dear <= r.time_s < cheap)
    assert any(uses_mid(r) for r in run.records if r.time_s >= cheap)
    assert any("mid-0 costs more than its max_price_per_hour" in r.reason for r in run.records)
    billed = {round(e.price_per_hour, 6) for e in run.ledger if e.pool == "mid"}
    assert billed <= {0.9, 1.5, 0.3}
    at_most_usd = 2 * 1.5 / 3600 * 10.0  # both devices, until they have handed over
    assert fsum(e.usd for e in run.ledger if e.pool == "mid" and e.price_per_hour > 1) < at_most_usd


def test_where_every_pool_is_above_its_maximum_the_run_waits_and_says_so() -> None:
    offers = tuple(replace(o, max_price_usd_per_s=o.price_usd_per_s) for o in demo_cluster().offers)
    events = [
        TraceEvent(at_s=at_s, pool=pool, price_usd_per_s=ratio * price / 3600)
        for at_s, ratio in ((120.0, 1.5), (600.0, 1.0))
        for pool, price in PER_HOUR.items()
    ]
    run = of_menu(budget=RICH, events=events, cluster=replace(demo_cluster(), offers=offers)).run(
        max_slots=15
    )
    waits = [r for r in run.records if r.reason.startswith("price_limit: ")]
    assert [r.next_plan.is_idle for r in waits] == [True] * len(waits)
    assert {r.time_s for r in waits} >= {180.0, 240.0}
    assert run.records[-1].next_plan.device_ids


def test_a_row_that_repeats_the_price_keeps_it_known() -> None:
    events = [row(120.0 * k, "mid", 0.9) for k in range(1, 12)]
    run = of_menu(budget=TIGHT, events=events, price_max_age_s=300.0).run(max_slots=20)
    assert not any(r.fallbacks for r in run.records if r.time_s <= 1320.0 + 300.0)
    ages = [dict(r.price_age_s) for r in run.records if r.time_s > 120]
    assert max(age["mid"] for age in ages[:18]) <= 120.0
    assert {age["fast"] for age in ages} == {0.0}


def test_where_no_price_is_known_the_run_waits_and_says_so() -> None:
    """All pools fall silent while it waits for money; the rows that follow let it go on."""
    pools = list(PER_HOUR.items())
    silent = [row(0.0, pool, price) for pool, price in pools]
    again = [row(3000.0, pool, price) for pool, price in pools]
    budget = BudgetOptions(average_per_hour_usd=0.05, horizon_hours=1)
    run = of_menu(
        budget=budget, events=[*silent, *again], price_max_age_s=300.0, num_samples=10**6
    ).run(max_slots=80)
    reasons = {r.reason.split(":")[0] for r in run.records if 400 < r.time_s < 3000}
    assert "price_unknown" in reasons
    assert any(r.decision == "switch" for r in run.records if r.time_s >= 3000)
    assert_bound_kept(run)


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_holds_with_floors_caps_blocks_silent_and_jumping_feeds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offers = tuple(
        replace(
            offer,
            billed=str(rng.choice(["while_used", "while_used", "while_present"])),
            minimum_s=float(rng.choice([0.0, 60.0, 600.0, 3600.0])),
            quantum_s=float(rng.choice([0.0, 1.0, 60.0, 1200.0])),
        )
        for offer in demo_cluster().offers
    )
    budget = BudgetOptions(
        average_per_hour_usd=float(rng.choice([11.0, 14.0])),
        horizon_hours=float(rng.choice([1.0, 24.0])),
        min_samples_per_s=float(rng.choice([0.0, 2.0, 6.0])),
        queue_cap=str(rng.choice(["off", "auto"])),  # type: ignore[arg-type]
        total_usd=float(rng.choice([0.3, 2.0, 50.0])),
    )
    pool = str(rng.choice(list(PER_HOUR)))
    events = [
        row(float(at_s), pool, PER_HOUR[pool] * float(rng.choice([0.2, 1.0, 4.0, 30.0])))
        for at_s in np.sort(rng.uniform(0, 1800, 6))
    ]
    run = rehearsal(
        strategy="joint" if seed == 0 else Menu(),
        budget=budget,
        cluster=replace(demo_cluster(), offers=offers),
        events=[*events, TraceEvent(at_s=200.0, device="mid-0", speed_ratio=0.4)],
        price_max_age_s=float(rng.choice([120.0, 600.0])),
    ).run(max_slots=40)
    assert_bound_kept(run)
    assert budget.total_usd is not None
    assert max(r.spent_usd for r in run.records) <= budget.total_usd
    booked_usd = fsum(entry.usd + entry.egress_usd for entry in run.ledger)
    assert run.records[-1].spent_usd == pytest.approx(booked_usd, rel=1e-12)
