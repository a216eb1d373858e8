"""A budget that is edited while the run goes on, in a closed loop on a virtual clock."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import fsum, inf

import numpy as np
import pytest

from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.core.edits import BudgetChanged, BudgetNews
from orchestrator.simulation.traces import TraceEvent
from tests.simulation.closed_loop import PER_HOUR, Menu, Rehearsal, demo_cluster, rehearsal
from tests.simulation.test_restart import read_back

TIGHT = BudgetOptions(average_per_hour_usd=2.0, horizon_hours=4)
NUM_SLOTS = 24


def at(edits: dict[int, BudgetOptions], run: Callable[[], Rehearsal]) -> Callable[[], BudgetNews]:
    """Tells of each edit at the edge that ends the slot of that number."""

    def news() -> BudgetNews:
        wanted = edits.get(len(run().records))
        return BudgetNews(wanted, "config.yaml" if wanted else "")

    return news


def edited(edits: dict[int, BudgetOptions], **choices: object) -> Rehearsal:
    run = rehearsal(budget=TIGHT, strategy=Menu(), **choices)  # type: ignore[arg-type]
    run.loop.news_of_budget = at(edits, lambda: run)
    return run


def changes(run: Rehearsal) -> list[BudgetChanged]:
    return [event for event in run.events if isinstance(event, BudgetChanged)]


def cost_per_hour(run: Rehearsal, first: int) -> float:
    kept = run.records[first:]
    return 3600 * (kept[-1].spent_usd - kept[0].spent_usd) / (kept[-1].time_s - kept[0].time_s)


def test_a_raised_average_is_spent_from_the_next_slot_on() -> None:
    run = edited({30: replace(TIGHT, average_per_hour_usd=6.0)}).run(max_slots=90)
    assert cost_per_hour(run, 0) > 2.0
    assert cost_per_hour(run, 31) == pytest.approx(6.0, rel=0.08)
    (event,) = changes(run)
    assert (event.slot, event.time_s) == (30, run.records[30].time_s)
    assert (event.key, event.old, event.new) == ("budget.average_per_hour_usd", 2.0, 6.0)
    assert (event.source, event.detail) == (
        "config.yaml",
        "budget.average_per_hour_usd: 2 -> 6 (config.yaml)",
    )
    followed = next(r for r in run.records[30:] if r.decision != "keep")
    assert followed.slot <= 40
    assert followed.reason.startswith(f"{followed.decision}: the budget changed; new plan takes ")
    assert [r.budget.average_per_hour_usd for r in run.records[29:31] if r.budget] == [2.0, 6.0]


def test_a_lowered_average_is_kept_and_what_was_overspent_stays_owed() -> None:
    run = edited({30: replace(TIGHT, average_per_hour_usd=0.5)}).run(max_slots=120)
    assert cost_per_hour(run, 60) == pytest.approx(0.5, rel=0.15)
    last = run.records[-1]
    spent_usd = fsum(entry.usd + entry.egress_usd for entry in run.ledger)
    allowed_usd = (
        2.0 * run.records[30].time_s + 0.5 * (last.time_s - run.records[30].time_s)
    ) / 3600
    assert last.budget_usd == pytest.approx(allowed_usd)
    assert spent_usd <= allowed_usd + last.overspend_bound_usd


def test_a_total_below_what_is_spent_ends_the_run_at_once_as_on_exhausted_says() -> None:
    for word in ("pause", "stop"):
        wanted = replace(TIGHT, total_usd=0.1, on_exhausted=word)  # type: ignore[arg-type]
        run = edited({10: wanted}).run(max_slots=20)
        assert len(run.records) == 11
        assert run.records[9].spent_usd > 0.1
        assert run.loop.outcome is not None
        assert run.loop.outcome.status == "budget"
        assert run.loop.outcome.reason.startswith("budget_cap_reached: ")
        assert run.loop.outcome.reason.endswith(" $ of 0.1 $ are spent")
        assert run.loop.outcome.resumable == (word == "pause")


def test_a_raised_total_is_spent_up_to_the_new_one_and_no_further() -> None:
    capped = replace(TIGHT, total_usd=0.3)
    run = edited({2: capped, 4: replace(TIGHT, total_usd=0.6)}).run(max_slots=200)
    assert run.loop.outcome is not None
    assert 0.5 < run.records[-1].spent_usd <= 0.6


def test_a_limit_that_is_added_is_obeyed_from_the_next_slot_on() -> None:
    wanted = replace(
        TIGHT, average_per_hour_usd=9.0, limits=(LimitOptions(zone="z1", max_per_hour_usd=0.0),)
    )
    run = edited({10: wanted}).run(max_slots=16)
    zones = {d.device_id: d.zone for d in demo_cluster().devices}
    used = {zones[d] for r in run.records[10:] for d in r.next_plan.device_ids}
    assert used == {"z2"}
    assert changes(run)[1].detail == ("budget.limits: none -> zone z1 at most 0 $/h (config.yaml)")


def test_a_floor_that_is_taken_away_is_owed_nothing_more() -> None:
    floored = replace(TIGHT, min_samples_per_s=3.0)
    run = edited({2: floored, 30: TIGHT}).run(max_slots=40)
    assert run.records[29].progress_backlog_usd > 0
    assert run.records[30].progress_backlog_usd == 0


def test_an_average_that_present_devices_exceed_when_idle_is_refused_and_the_old_one_stays() -> (
    None
):
    run = rehearsal(
        budget=replace(TIGHT, average_per_hour_usd=11.0),
        strategy=Menu(),
        cluster=demo_cluster(billed="while_present"),
    )
    run.loop.news_of_budget = at({3: TIGHT}, lambda: run)
    run.run(max_slots=6)
    assert not changes(run)
    (warning,) = [e.detail for e in run.events if e.kind == "warning" and "budget_" in e.detail]
    assert warning.startswith(
        "budget_refused: config.yaml: the devices that are billed while present cost 4.92 times "
    )
    assert run.records[-1].budget is not None
    assert run.records[-1].budget.average_per_hour_usd == 11.0


def random_budget(rng: np.random.Generator) -> BudgetOptions:
    """Any section but one that forbids idling: nothing bounds what such a run overspends."""
    caps = ("off", "auto", 0.05)
    return BudgetOptions(
        average_per_hour_usd=float(rng.uniform(0.2, 8.0)),
        horizon_hours=float(rng.uniform(0.5, 40.0)),
        total_usd=float(rng.uniform(0.3, 2.0)) if rng.random() < 0.4 else None,
        queue_cap=caps[int(rng.integers(3))],  # type: ignore[arg-type]
        min_samples_per_s=float(rng.choice([0.0, 0.8])),
    )


@pytest.mark.parametrize("seed", range(8))
def test_figures_of_the_budget_are_right_in_every_slot_whatever_is_edited(seed: int) -> None:
    """Edits at random slots, prices that move, and lives that end between them.

    The oracle sums up the average of every slot by itself.
    """
    rng = np.random.default_rng(seed)
    events = [
        TraceEvent(
            at_s=float(rng.uniform(60.0, 60.0 * NUM_SLOTS)),
            pool=str(pool),
            price_usd_per_s=PER_HOUR[str(pool)] * float(rng.uniform(0.3, 3.0)) / 3600,
        )
        for pool in rng.choice(list(PER_HOUR), 4)
    ]
    edits = {int(k): random_budget(rng) for k in rng.integers(0, NUM_SLOTS, 6)}
    ends = {int(k) for k in rng.integers(2, NUM_SLOTS, 3)}
    run = edited(edits, events=sorted(events, key=lambda e: e.at_s))
    backend, ledger_usd = run.backend, 0.0
    in_force, before_usd = TIGHT, 0.0
    averages = [(0.0, TIGHT.average_per_hour_usd)]
    for num in range(NUM_SLOTS):
        run.loop.news_of_budget = partial(BudgetNews, edits.get(num), "config.yaml")
        num_before = len(changes(run))
        record = run.loop.tick()
        averages += [
            (event.time_s, float(str(event.new)))
            for event in changes(run)[num_before:]
            if event.key == "budget.average_per_hour_usd"
        ]
        assert record.budget_usd == pytest.approx(allowed_usd(averages, record.time_s), rel=1e-9)
        assert record.spent_usd <= record.budget_usd + record.overspend_bound_usd + 1e-9
        spent_usd = ledger_usd + fsum(e.usd + e.egress_usd for e in run.ledger)
        assert record.spent_usd == pytest.approx(spent_usd, abs=1e-9)
        total_usd = in_force.total_usd or inf
        assert record.spent_usd <= total_usd or before_usd >= total_usd  # lowered below that
        in_force, before_usd = edits.get(num, in_force), record.spent_usd
        assert record.budget == in_force
        if run.loop.outcome is not None:
            assert run.loop.outcome.status == "budget"
            break
        if num in ends:
            ledger_usd, state = spent_usd, read_back(run.states[-1])
            run = rehearsal(budget=in_force, strategy=Menu(), state=state, backend=backend)
    assert len(averages) > 1


def allowed_usd(averages: list[tuple[float, float]], until_s: float) -> float:
    """Each average times the hours for which it held."""
    ends_s = [*(start_s for start_s, _ in averages[1:]), until_s]
    return sum(
        per_hour * (end_s - start_s) / 3600
        for (start_s, per_hour), end_s in zip(averages, ends_s, strict=True)
    )


def test_a_run_that_ended_for_its_total_goes_on_with_a_raised_one_and_says_so() -> None:
    capped = replace(TIGHT, total_usd=0.3)
    first = rehearsal(budget=capped, strategy=Menu()).run(max_slots=40)
    assert first.loop.outcome is not None
    assert first.loop.outcome.resumable
    state = read_back(first.states[-1])
    raised = replace(capped, total_usd=0.6)
    again = rehearsal(budget=raised, strategy=Menu(), state=state).run(max_slots=40)
    (event,) = changes(again)
    assert event.detail == "budget.total_usd: 0.3 -> 0.6 (start)"
    assert event.time_s == first.records[-1].time_s
    assert 0.5 < again.records[-1].spent_usd <= 0.6
