"""The control loop against the simulated cluster: money, stragglers, prices, samples, restarts."""

import json
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from math import fsum

import numpy as np
import pytest

from orchestrator.control.loop import ControlLoop
from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.core.durable import ControlState
from orchestrator.core.slot import SlotRecord, first_problem
from orchestrator.errors import InfeasibleError, LostWorkerError
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.storage import from_json, to_json
from tests.simulation.closed_loop import (
    GLOBAL_BATCH,
    PER_HOUR,
    SLOT_S,
    Rehearsal,
    demo_cluster,
    rehearsal,
)

RICH = BudgetOptions(average_per_hour_usd=100.0, horizon_hours=4)
TIGHT = BudgetOptions(average_per_hour_usd=2.0, horizon_hours=4)


def assert_budget_kept(run: Rehearsal) -> None:
    """G1 at every slot, and dollars equal to the ledger."""
    for record in run.records:
        assert record.spent_usd <= record.budget_usd + record.overspend_bound_usd + 1e-12, (
            f"slot {record.slot}"
        )
    booked_usd = fsum(entry.usd + entry.egress_usd for entry in run.ledger)
    assert run.records[-1].spent_usd == pytest.approx(booked_usd, rel=1e-12)


def shown(record: SlotRecord) -> SlotRecord:
    """A record without what a restart changes: the order in which the same dollars were added."""
    return replace(record, spent_usd=round(record.spent_usd, 12))


def test_a_run_with_money_to_spare_finishes_all_steps_as_predicted() -> None:
    run = rehearsal(budget=RICH, num_samples=4800).run()
    assert run.loop.outcome is not None
    assert (run.loop.outcome.status, run.loop.outcome.resumable) == ("finished", False)
    assert run.records[-1].step == 300
    measured = [(r.measured.step_s, r.predicted.step_s) for r in run.records if r.measured.step_s]
    assert all(seen == pytest.approx(said, rel=0.05) for seen, said in measured)
    assert_budget_kept(run)


@pytest.mark.parametrize("chosen", ["never", "always"])
def test_every_slot_is_planned_with_what_the_file_says_of_training(chosen: str) -> None:
    run = rehearsal(budget=RICH)
    options = run.loop.options
    training = replace(options.training, activation_checkpointing=chosen)
    run.loop.options = replace(options, training=training)
    problem = run.loop.problem()
    assert problem.activation_checkpointing == chosen
    assert problem == replace(
        first_problem(problem.cluster, problem.model, training),
        penalty_weight=problem.penalty_weight,
        budget_usd_per_s=problem.budget_usd_per_s,
        incumbent=problem.incumbent,
    )
    run.run(max_slots=2)
    stages = [stage for group in run.records[-1].plan.groups for stage in group.stages]
    assert [stage.recompute for stage in stages] == [chosen == "always"] * len(stages) != []


def test_the_average_is_kept_by_planning_cheaper_and_the_samples_keep_coming() -> None:
    run = rehearsal(budget=TIGHT, num_samples=16_000).run(max_slots=160)
    last = run.records[-1]
    hours = last.time_s / 3600
    assert last.spent_usd / hours <= 2.0 * 1.06
    assert last.spent_usd / hours >= 2.0 * 0.9
    assert {"switch"} <= {r.decision for r in run.records}
    assert_budget_kept(run)


def test_the_bound_holds_although_blocks_are_paid_ahead_and_prices_jump() -> None:
    events = [
        TraceEvent(at_s=300.0 * k, pool=pool, price_usd_per_s=price / 3600)
        for k, (pool, price) in enumerate(
            [("fast", 9.0), ("mid", 3.0), ("fast", 2.0), ("slow", 1.5), ("mid", 0.7)], start=1
        )
    ]
    blocks = demo_cluster(minimum_s=120.0, quantum_s=60.0)
    run = rehearsal(budget=TIGHT, cluster=blocks, events=events).run(max_slots=60)
    assert_budget_kept(run)


def test_standing_costs_of_devices_billed_while_present_are_in_the_bill() -> None:
    present = demo_cluster(billed="while_present")
    budget = BudgetOptions(average_per_hour_usd=12.0, horizon_hours=4)
    run = rehearsal(budget=budget, cluster=present).run(max_slots=20)
    standing = fsum(2 * price for price in (3.67, 0.90, 0.35))
    assert run.records[5].measured.cost_per_hour_usd == pytest.approx(standing, rel=0.05)
    assert_budget_kept(run)


def test_the_bound_grows_by_what_presence_alone_costs_beyond_the_average() -> None:
    present = demo_cluster(billed="while_present")
    budget = BudgetOptions(average_per_hour_usd=12.0, horizon_hours=4)
    dearer = TraceEvent(at_s=200.0, pool="mid", price_usd_per_s=9 / 3600)  # idling costs 26 $/h
    run = rehearsal(budget=budget, cluster=present, events=[dearer]).run(max_slots=60)
    assert run.records[-1].spent_usd - run.records[-1].budget_usd > 5.0
    assert_budget_kept(run)


def test_standing_costs_above_the_average_are_refused_before_anything_is_spent() -> None:
    """Otherwise the run would wait for ever, and pay for it."""
    run = rehearsal(budget=TIGHT, cluster=demo_cluster(billed="while_present"))
    with pytest.raises(InfeasibleError, match=r"4\.92 times budget\.average_per_hour_usd"):
        run.run(max_slots=1)
    assert run.ledger == []


@pytest.mark.parametrize("total_usd", [0.05, 0.31, 1.0])
@pytest.mark.parametrize("block_s", [1.0, 60.0])
def test_total_usd_is_never_exceeded(total_usd: float, block_s: float) -> None:
    """skypilot-org/skypilot#8766: a hard limit in dollars, by not one cent."""
    budget = BudgetOptions(average_per_hour_usd=4.0, horizon_hours=4, total_usd=total_usd)
    run = rehearsal(budget=budget, cluster=demo_cluster(quantum_s=block_s)).run(max_slots=2000)
    assert run.loop.outcome is not None
    assert (run.loop.outcome.status, run.loop.outcome.resumable) == ("budget", True)
    assert "budget_cap_reached" in run.loop.outcome.reason
    assert max(record.spent_usd for record in run.records) <= total_usd
    assert_budget_kept(run)


@pytest.mark.parametrize("total_usd", [0.2, 0.31, 1.0])
@pytest.mark.parametrize("minimum_s", [0.0, 90.0, 600.0])
def test_total_usd_holds_although_unused_devices_pay_blocks_ahead(
    total_usd: float, minimum_s: float
) -> None:
    present = demo_cluster(billed="while_present", minimum_s=minimum_s, quantum_s=60.0)
    budget = BudgetOptions(average_per_hour_usd=12.0, horizon_hours=4, total_usd=total_usd)
    run = rehearsal(budget=budget, cluster=present).run(max_slots=200)
    assert run.loop.outcome is not None
    assert run.loop.outcome.status == "budget"
    assert run.records[-1].spent_usd <= total_usd


@pytest.mark.parametrize("seed", range(8))
def test_total_usd_holds_over_several_lives_whatever_is_billed_how(seed: int) -> None:
    """Blocks paid ahead, standing pools, jumping prices, stragglers, and resuming with no money."""
    rng = np.random.default_rng(seed)
    cluster = demo_cluster()
    offers = tuple(
        replace(
            offer,
            billed=str(rng.choice(["while_used", "while_present"])),
            minimum_s=float(rng.choice([0.0, 60.0, 600.0, 3600.0])),
            quantum_s=float(rng.choice([0.0, 1.0, 60.0, 600.0])),
        )
        for offer in cluster.offers
    )
    total_usd = float(rng.choice([0.02, 0.1, 0.5, 2.0]))
    budget = BudgetOptions(
        average_per_hour_usd=float(rng.choice([11.0, 30.0])), horizon_hours=4, total_usd=total_usd
    )
    state, booked_usd = None, 0.0
    for _ in range(4):
        from_s = state.time_s if state else 0.0
        events = [
            TraceEvent(
                at_s=from_s + float(rng.uniform(10, 600)),
                pool=pool,
                price_usd_per_s=float(rng.uniform(0.2, 5.0)) * PER_HOUR[pool] / 3600,
            )
            for pool in rng.choice(list(PER_HOUR), 2, replace=False)
        ]
        events.append(TraceEvent(at_s=from_s + 100.0, device="mid-0", speed_ratio=0.4))
        run = rehearsal(
            budget=budget, cluster=replace(cluster, offers=offers), events=events, state=state
        )
        run.run(max_slots=int(rng.integers(2, 30)))
        if run.loop.outcome is None:
            run.loop.end("stopped", "a new life follows")
        assert max(record.spent_usd for record in run.records) <= total_usd
        booked_usd += fsum(entry.usd + entry.egress_usd for entry in run.ledger)
        assert run.records[-1].spent_usd == pytest.approx(booked_usd, rel=1e-12)
        state = run.states[-1]


def test_most_of_the_total_is_used_before_the_run_stops_for_it() -> None:
    budget = BudgetOptions(average_per_hour_usd=4.0, horizon_hours=4, total_usd=1.0)
    run = rehearsal(budget=budget).run(max_slots=2000)
    assert run.records[-1].spent_usd >= 0.9


def test_near_the_total_a_smaller_plan_runs_where_the_best_one_no_longer_fits() -> None:
    """Ten minutes of every fast device cost more than is allowed; of a slow one they do not.

    skypilot-org/skypilot#7837: what happens when the budget ends: smaller first.
    """
    budget = BudgetOptions(average_per_hour_usd=20.0, horizon_hours=4, total_usd=0.2)
    run = rehearsal(budget=budget, cluster=demo_cluster(minimum_s=600.0)).run(max_slots=60)
    assert run.loop.outcome is not None
    assert run.records[0].decision == "switch"
    pools = [
        {d.rpartition("-")[0] for d in r.plan.device_ids} for r in run.records if r.plan.groups
    ]
    best = rehearsal(budget=RICH).run(2).records[-1].plan.device_ids
    assert pools
    assert all(used < {d.rpartition("-")[0] for d in best} for used in pools)
    assert len(run.steps) > 0
    assert 0.05 < run.records[-1].spent_usd <= 0.2


@pytest.mark.parametrize(
    ("average_usd", "total_usd", "cause"),
    [
        (0.2, None, "budget_wait"),
        (50.0, 0.3, "budget_cap_reached"),
        (0.2, 0.001, "budget_cap_reached"),
    ],
)
def test_the_record_says_whether_the_average_or_the_total_bound(
    average_usd: float, total_usd: float | None, cause: str
) -> None:
    """skypilot-org/skypilot#3103: a cap of which nobody knows that it was the cause."""
    budget = BudgetOptions(average_per_hour_usd=average_usd, horizon_hours=4, total_usd=total_usd)
    run = rehearsal(budget=budget).run(max_slots=60)
    told = [r.reason for r in run.records if r.decision == "idle"]
    assert any(cause in reason for reason in told)
    assert (run.loop.outcome is not None) == (cause == "budget_cap_reached")


def test_a_run_that_waits_says_so_once() -> None:
    run = rehearsal(budget=BudgetOptions(average_per_hour_usd=0.2, horizon_hours=4)).run(120)
    told = [e.detail.partition(":")[0] for e in run.events if e.kind == "replan"]
    waited = [r.decision for r in run.records].count("idle")
    assert waited > told.count("budget_wait") > 0
    assert all(pair != ("budget_wait", "budget_wait") for pair in pairwise(told))


def test_a_run_whose_devices_are_all_gone_waits_for_one_and_pays_for_none() -> None:
    """kubeflow/trainer#3316: the scheduler took the devices away, and the job stays dead."""
    gone = [TraceEvent(at_step=50, pool=pool, lost=True) for pool in PER_HOUR]
    back = TraceEvent(at_s=1200.0, pool="mid", joined=1)
    run = rehearsal(budget=RICH, events=[*gone, back], num_samples=1600).run()
    idle = [r for r in run.records if r.next_plan.is_idle]
    assert {r.reason for r in idle[:-1]} == {"no_device: none is there; the run waits for one"}
    lost_s = next(e.time_s for e in run.events if e.kind == "lost")
    assert not any(e.usd for e in run.ledger if lost_s + 1.0 < e.from_s < 1200.0)
    assert run.loop.outcome is not None
    assert run.loop.outcome.status == "finished"
    assert run.steps[-1].end_sample == 1600


def test_a_stop_at_the_total_cannot_be_resumed_where_the_file_says_so() -> None:
    """aws/karpenter-provider-aws#3244: what happens when the budget ends: a stop with a reason."""
    budget = BudgetOptions(average_per_hour_usd=4.0, total_usd=0.1, on_exhausted="stop")
    run = rehearsal(budget=budget).run(max_slots=2000)
    assert run.loop.outcome is not None
    assert not run.loop.outcome.resumable
    assert [e.kind for e in run.events][-2:] == ["checkpoint", "budget"]
    assert run.states[-1].checkpoint_step == run.steps[-1].step + 1
    assert run.loop.outcome.reason.startswith("budget_cap_reached: ")


def test_total_usd_holds_when_a_straggler_makes_every_step_longer_than_predicted() -> None:
    budget = BudgetOptions(average_per_hour_usd=50.0, horizon_hours=4, total_usd=0.2)
    events = [TraceEvent(at_s=70.0, pool="fast", speed_ratio=0.3)]
    run = rehearsal(budget=budget, events=events).run(max_slots=2000)
    assert run.loop.outcome is not None
    assert run.loop.outcome.status == "budget"
    assert run.records[-1].spent_usd <= 0.2


def test_a_straggler_is_named_and_replanned_at_the_end_of_the_slot_that_shows_it() -> None:
    run = rehearsal(
        budget=RICH, events=[TraceEvent(at_step=100, device="fast-0", speed_ratio=0.4)]
    ).run(max_slots=14)
    first = next(r for r in run.records if r.step > 100)
    assert first.stragglers == ("fast-0",)
    assert first.decision in ("switch", "reassign")
    assert first.reason.startswith(f"{first.decision}: fast-0 runs 2.5x slower than predicted")
    (view,) = (v for v in first.devices if v.device_id == "fast-0")
    assert (view.straggler, view.slowdown) == (True, pytest.approx(2.5))
    later = [r for r in run.records if r.slot > first.slot + 1 and r.measured.step_s]
    assert later
    for record in later:
        assert record.measured.step_s == pytest.approx(record.predicted.step_s, rel=0.10)
    named = [e for e in run.events if e.kind == "straggler"]
    assert (named[0].device, named[0].slot) == ("fast-0", first.slot)
    assert named[1].detail.startswith("lasting")


def test_the_new_plan_is_faster_than_staying_would_have_been() -> None:
    events = [TraceEvent(at_step=10, device="fast-0", speed_ratio=0.4)]
    adaptive = rehearsal(budget=RICH, events=events).run(max_slots=12)
    stuck = rehearsal(budget=RICH, events=events, strategy="static").run(max_slots=12)
    assert adaptive.records[-1].step > 1.15 * stuck.records[-1].step
    assert {r.next_plan for r in stuck.records} == {stuck.records[0].next_plan}


def test_idle_and_back_by_itself_when_only_the_average_binds() -> None:
    dear = BudgetOptions(average_per_hour_usd=0.2, horizon_hours=4)
    run = rehearsal(budget=dear).run(max_slots=120)
    decisions = [r.decision for r in run.records]
    assert "idle" in decisions
    waited = decisions.index("idle")
    assert any(d == "switch" for d in decisions[waited:])
    assert run.loop.outcome is None
    reasons = {r.reason.split(":")[0] for r in run.records if r.decision == "idle"}
    assert reasons == {"budget_wait"}
    assert_budget_kept(run)


def test_a_change_of_price_is_followed() -> None:
    before = rehearsal(budget=TIGHT).run(max_slots=40)
    dearer = [TraceEvent(at_s=0.0, pool="mid", price_usd_per_s=4.0 / 3600)]
    after = rehearsal(budget=TIGHT, events=dearer).run(max_slots=40)

    def dollars(run: Rehearsal, pool: str) -> float:
        return fsum(e.usd for e in run.ledger if e.pool == pool)

    assert dollars(after, "mid") < 0.5 * dollars(before, "mid")
    assert_budget_kept(after)


def test_a_new_price_ends_the_slot_and_is_billed_from_that_moment() -> None:
    events = [TraceEvent(at_s=90.0, pool="fast", price_usd_per_s=7.34 / 3600)]
    run = rehearsal(budget=RICH, events=events, cluster=demo_cluster(quantum_s=0.0)).run(5)
    assert 90.0 in [r.time_s for r in run.records]
    prices = {
        (round(e.price_per_hour, 9), e.from_s >= 90.0)
        for e in run.ledger
        if e.pool == "fast" and e.cause == "use"
    }
    assert prices == {(3.67, False), (7.34, True)}
    assert [e.detail for e in run.events if e.kind == "price"] == ["pool fast: 3.67 -> 7.34 $/h"]


@pytest.mark.parametrize(("num_samples", "dataset_samples"), [(3001, 1000), (2000, 333)])
def test_every_epoch_uses_every_sample_once_whatever_the_plans(
    num_samples: int, dataset_samples: int
) -> None:
    """horovod/horovod#3399, #3143: committed samples as a multiset equal each epoch.

    Devices go with and without notice, and come. horovod/horovod#2844: steps and epochs count on.
    """
    events = [
        TraceEvent(at_step=20, device="fast-0", speed_ratio=0.3),
        TraceEvent(at_step=35, device="slow-1", lost=True),
        TraceEvent(at_step=50, device="fast-1", notice_s=40.0),
        TraceEvent(at_step=60, device="fast-0", speed_ratio=1.0),
        TraceEvent(at_step=75, pool="fast", joined=2),
        TraceEvent(at_step=90, device="mid-1", speed_ratio=0.3),
    ]
    run = rehearsal(budget=RICH, events=events, num_samples=num_samples).run()
    used_by = [frozenset(r.plan.device_ids) for r in run.records if r.plan.groups]
    assert {"slow-1", "fast-1"} <= used_by[0] - used_by[-1]
    assert {"fast-2", "fast-3"} & (used_by[-1] - used_by[0])
    assert [step.step for step in run.steps] == list(range(len(run.steps)))
    used = Counter(p for step in run.steps for p in range(step.first_sample, step.end_sample))
    assert used == Counter(range(num_samples))
    epochs = Counter(p // dataset_samples for p in used)
    whole = num_samples // dataset_samples
    assert all(epochs[epoch] == dataset_samples for epoch in range(whole))
    assert [s.first_sample for s in run.steps][1:] == [s.end_sample for s in run.steps][:-1]
    assert {s.samples for s in run.steps[:-1]} == {GLOBAL_BATCH}


def test_a_loop_rebuilt_from_its_state_goes_on_as_if_nothing_had_happened() -> None:
    """The head dies while the cluster goes on: what it decides later is what it would have."""
    events = [TraceEvent(at_step=100, device="fast-0", speed_ratio=0.4)]
    unbroken = rehearsal(budget=TIGHT, events=events).run(max_slots=36)
    cut = next(r.slot + 1 for r in unbroken.records[15:] if r.decision == "keep")
    first = rehearsal(budget=TIGHT, events=events).run(max_slots=cut)
    state = from_json(ControlState, json.loads(json.dumps(to_json(first.states[-1]))))
    assert state == first.states[-1]
    second = rehearsal(budget=TIGHT, state=state, backend=first.backend)
    second.run(max_slots=36 - cut)
    assert [shown(r) for r in second.records] == [shown(r) for r in unbroken.records[cut:]]
    assert first.steps + second.steps == unbroken.steps
    assert first.ledger + second.ledger == unbroken.ledger


def test_a_run_resumed_in_a_new_process_keeps_its_plan_its_samples_and_its_money() -> None:
    """horovod/horovod#2844: counters are wrong after a change of size."""
    first = rehearsal(budget=TIGHT, num_samples=8000).run(max_slots=30)
    first.loop.end("stopped", "asked to")
    state = first.states[-1]
    second = rehearsal(budget=TIGHT, num_samples=8000, state=state)
    resumed = second.loop.tick()
    assert [run.events[0].kind for run in (first, second)] == ["started", "resumed"]
    assert resumed.slot == first.records[-1].slot + 1
    assert resumed.decision == "keep"
    assert resumed.next_plan == state.plan
    assert resumed.spent_usd == pytest.approx(first.records[-1].spent_usd, rel=1e-12)
    second.run()
    assert second.loop.outcome is not None
    assert second.loop.outcome.status == "finished"
    used = Counter(
        p for s in first.steps + second.steps for p in range(s.first_sample, s.end_sample)
    )
    assert used == Counter(range(8000))
    assert_budget_kept(replace(second, ledger=first.ledger + second.ledger))


def test_a_search_that_is_cut_off_is_named_in_the_record_and_the_events() -> None:
    looks = count()
    run = rehearsal(budget=RICH, stopwatch=lambda: 10.0 * next(looks)).run(max_slots=1)
    (fallback,) = run.records[0].fallbacks
    assert fallback.startswith("deadline: the best plan of 2 s of search")
    assert [e.detail for e in run.events if e.kind == "fallback"] == [fallback]


def test_a_stop_request_finishes_the_step_under_way_and_can_be_resumed() -> None:
    run = rehearsal(budget=RICH).run(max_slots=5)
    before = run.records[-1]
    record = run.loop.end("stopped", "interrupted")
    assert run.loop.outcome is not None
    assert (run.loop.outcome.status, run.loop.outcome.resumable) == ("stopped", True)
    assert record.step == before.step + 1
    assert record.reason == "stopped: interrupted"
    assert run.states[-1].checkpoint_step == record.step
    assert [e.kind for e in run.events][-2:] == ["checkpoint", "stopped"]


def test_a_lost_device_in_use_ends_the_run_by_its_name_and_forgets_no_dollar() -> None:
    events = [TraceEvent(at_step=50, device="fast-1", lost=True)]
    run = rehearsal(budget=RICH, events=events, max_failures=0)
    with pytest.raises(LostWorkerError, match="device fast-1 is gone"):
        run.run()
    booked_usd = fsum(entry.usd + entry.egress_usd for entry in run.ledger)
    assert run.states[-1].spent_usd == pytest.approx(booked_usd, rel=1e-12)
    assert run.states[-1].next_step == len(run.steps) == 50
    assert run.records[-1].spent_usd == pytest.approx(booked_usd, rel=1e-12)
    assert (run.records[-1].step, run.records[-1].reason) == (50, "too_few_workers")
    assert run.states[-1].slot == len(run.records)


@pytest.mark.parametrize("notice_s", [0.0, 30.0])
def test_work_moves_off_a_device_under_notice_before_it_goes(notice_s: float) -> None:
    """ray-project/ray#63968: up to an interval of checkpoints was lost although notice existed."""
    gone = TraceEvent(at_s=200.0, device="fast-0", notice_s=notice_s)
    run = rehearsal(budget=RICH, events=[gone], strategy="even-pipeline", max_failures=0).run(12)
    before = [r.next_plan for r in run.records if r.time_s < 200.0]
    after = [r.next_plan for r in run.records if r.time_s >= 200.0]
    assert all("fast-0" in plan.device_ids for plan in before)
    assert all("fast-0" not in plan.device_ids for plan in after)
    assert ("lost", "fast-0") in [(e.kind, e.device) for e in run.events]  # it is no failure
    assert (run.backend.num_redone == 0) == (notice_s > 0)


def test_losses_of_devices_in_use_are_survived_as_often_as_the_budget_of_failures_says() -> None:
    events = [TraceEvent(at_step=50 * i, device=f"fast-{2 - i}", lost=True) for i in (1, 2)]
    run = rehearsal(budget=RICH, events=events, max_failures=1)
    with pytest.raises(LostWorkerError, match="device fast-0 is gone"):
        run.run()
    assert [e.device for e in run.events if e.kind == "lost"] == ["fast-1", "fast-0"]
    assert run.states[-1].num_failures == 1


@pytest.mark.parametrize("where", ["apply", "checkpoint"])
def test_what_is_held_until_a_decision_fails_is_billed(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = rehearsal(budget=RICH).run(max_slots=5)
    backend = run.backend

    def breaks(*_: object) -> None:
        backend._pass_to(backend._now_s + 7.0)
        backend._plan = None  # as the contract says: no more time passes
        raise LostWorkerError("nobody is left")

    before_s = run.states[-1].time_s
    monkeypatch.setattr(backend, where, breaks)
    with pytest.raises(LostWorkerError, match="nobody is left"):
        run.loop.end("stopped", "asked to") if where == "checkpoint" else run.loop.tick()
    assert run.loop.is_billed
    state = run.states[-1]
    slot_s = SLOT_S if where == "apply" else 0.0
    assert state.time_s == pytest.approx(before_s + slot_s + 7.0)
    assert max(entry.to_s for entry in run.ledger) >= state.time_s
    assert state.num_ledger_entries == len(run.ledger)
    booked_usd = fsum(entry.usd + entry.egress_usd for entry in run.ledger)
    assert state.spent_usd == pytest.approx(booked_usd, rel=1e-12)
    assert run.records[-1].reason == "too_few_workers: nobody is left"
    assert state.slot == len(run.records)


def test_a_plan_that_cannot_be_made_forgets_no_dollar(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rehearsal(budget=RICH).run(max_slots=5)

    def breaks(*_: object, **__: object) -> None:
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr(run.loop, "_choose", breaks)
    with pytest.raises(InfeasibleError):
        run.loop.tick()
    assert run.states[-1].num_ledger_entries == len(run.ledger)
    assert run.records[-1].reason == "infeasible: nothing fits"


def test_a_last_checkpoint_that_fails_forgets_no_dollar_and_no_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> None:
        raise OSError("the disk is full")

    run = rehearsal(budget=RICH, num_samples=480)
    monkeypatch.setattr(run.backend, "checkpoint", full)
    with pytest.raises(OSError, match="full"):
        run.run()
    assert run.steps[-1].end_sample == 480
    assert run.states[-1].next_step == 30
    assert run.states[-1].num_ledger_entries == len(run.ledger)
    paid_until_s = max(entry.to_s for entry in run.ledger)  # a block of 1 s is paid ahead
    assert run.states[-1].time_s == pytest.approx(paid_until_s, abs=1.0)


def test_a_device_that_joins_is_planned_with() -> None:
    events = [TraceEvent(at_step=50, pool="fast", joined=1)]
    run = rehearsal(budget=RICH, events=events).run(max_slots=8)
    assert "fast-2" in run.records[-1].next_plan.device_ids
    assert any(e.kind == "joined" and e.device == "fast-2" for e in run.events)


def test_a_second_of_the_run_may_be_billed_as_sixty() -> None:
    """The same hour of money, a sixtieth of the time: prices and budget are true dollars."""
    cluster = demo_cluster(quantum_s=0.0)
    dearer = replace(
        cluster,
        offers=tuple(replace(o, price_usd_per_s=60 * o.price_usd_per_s) for o in cluster.offers),
    )
    run = rehearsal(budget=RICH, cluster=dearer, billing_speedup=60.0).run(max_slots=4)
    record = run.records[2]
    used = fsum(PER_HOUR[device_id.split("-")[0]] for device_id in record.plan.device_ids)
    assert record.time_s == pytest.approx(2 * SLOT_S * 60)
    assert record.measured.cost_per_hour_usd == pytest.approx(used, rel=0.01)
    assert record.predicted.cost_per_hour_usd == pytest.approx(used, rel=0.01)


def test_a_limit_on_a_zone_is_obeyed_in_every_slot() -> None:
    budget = replace(RICH, limits=(LimitOptions(zone="z2", max_per_hour_usd=0.4),))
    events = [TraceEvent(at_step=50, device="fast-0", speed_ratio=0.4)]
    free = rehearsal(budget=RICH, events=events).run(max_slots=10)
    bound = rehearsal(budget=budget, events=events).run(max_slots=10)

    def slow_devices(run: Rehearsal) -> set[int]:
        used = [r.next_plan.device_ids for r in run.records]
        return {sum(d.startswith("slow") for d in ids) for ids in used}

    assert max(slow_devices(free)) == 2
    assert max(slow_devices(bound)) <= 1


def test_a_model_that_fits_on_no_device_is_infeasible() -> None:
    small = demo_cluster()
    tiny = replace(small, devices=tuple(replace(d, memory_bytes=1000) for d in small.devices))
    with pytest.raises(InfeasibleError, match="memory"):
        rehearsal(budget=RICH, cluster=tiny).run(max_slots=1)


def test_without_a_deadline_the_same_seed_gives_the_same_run() -> None:
    events = [TraceEvent(at_step=100, device="fast-0", speed_ratio=0.4)]
    runs = [rehearsal(budget=TIGHT, events=events).run(max_slots=15) for _ in range(2)]
    assert runs[0].records == runs[1].records


def test_the_horizon_scales_how_far_spending_may_run_ahead() -> None:
    bounds = []
    for hours in (4.0, 40.0):
        budget = BudgetOptions(average_per_hour_usd=2.0, horizon_hours=hours)
        control = ControlOptions(slot_s=SLOT_S, kappa=0.1)
        run = rehearsal(budget=budget, control=control).run(max_slots=1)
        bounds.append(run.records[-1].overspend_bound_usd)
    assert bounds[1] - bounds[0] == pytest.approx(0.1 * 2.0 * 36.0, rel=1e-9)


def test_a_fixed_penalty_weight_is_left_alone() -> None:
    control = ControlOptions(slot_s=SLOT_S, penalty_weight=3e-5)
    run = rehearsal(budget=TIGHT, control=control).run(max_slots=20)
    assert {r.penalty_weight for r in run.records} == {3e-5}
    assert_budget_kept(run)


def test_the_loop_reads_no_clock_of_its_own() -> None:
    """Two stopwatches, same decisions: time is an argument."""
    ticking = iter(range(10**9))
    one, other = (rehearsal(budget=TIGHT) for _ in range(2))
    other.loop = replace_clock(other.loop, lambda: 1e-9 * next(ticking))
    assert [r.decision for r in one.run(10).records] == [r.decision for r in other.run(10).records]


def replace_clock(loop: ControlLoop, stopwatch: object) -> ControlLoop:
    loop.stopwatch = stopwatch  # type: ignore[assignment]
    loop.__post_init__()
    return loop
