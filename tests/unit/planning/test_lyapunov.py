from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.cluster import PRICE_JUMP, Offer
from orchestrator.core.plan import Migration, Plan
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    Candidate,
    Decision,
    PlanningProblem,
    StepEstimate,
)
from orchestrator.planning.cost import CostModel
from orchestrator.planning.guards import OVERRUN_STEPS, LedgerView, slot_bill_usd
from orchestrator.planning.lyapunov import ControlOptions, Incumbent, StragglerOptions, decide
from orchestrator.planning.queues import (
    Queues,
    overspend_bound_usd,
    penalty_weight,
)

SLOT_S = 10.0
OPTIONS = ControlOptions(slot_s=SLOT_S, hysteresis_slots=10)
RICH = LedgerView(spent_usd=0.0, budget_usd=100.0, line_usd=10.0)
DEVICES = [make_device(f"d-{i}") for i in range(4)]


def candidate(*indices: int, rate: float, dollars: float, generation: int = 0) -> Candidate:
    """Data parallel on some devices with invented figures: what counts is their trade-off."""
    groups = [make_group([DEVICES[i]], (0, 4), (1,) * (8 // len(indices))) for i in indices]
    estimate = StepEstimate(
        step_s=8 / rate, samples_per_s=rate, cost_usd_per_s=dollars, group_s=(8 / rate,)
    )
    return Candidate(make_plan(*groups, generation=generation), estimate)


def problem_of(
    *, backlog_usd: float = 0.0, incumbent: Plan | None = None, weight: float = 1.0, **rest: object
) -> PlanningProblem:
    cluster = make_cluster(DEVICES, price_usd_per_s=1e-3)
    problem = make_problem(
        cluster, backlog_usd=backlog_usd, penalty_weight=weight, incumbent=incumbent
    )
    return replace(problem, **rest)  # type: ignore[arg-type]  # fields of the problem


def choose(
    problem: PlanningProblem,
    *candidates: Candidate,
    running: Candidate | None = None,
    ledger: LedgerView = RICH,
    options: ControlOptions = OPTIONS,
    expected: StepEstimate | None = None,
) -> Decision:
    return decide(
        problem=problem,
        candidates=candidates,
        cost=CostModel(problem),
        running=Incumbent(running.estimate if running else None, expected),
        ledger=ledger,
        options=options,
    )


def test_first_plan_is_the_one_of_best_score() -> None:
    slow, fast = candidate(0, rate=1.0, dollars=0.001), candidate(1, rate=2.0, dollars=0.002)
    decision = choose(problem_of(), slow, fast)
    assert (decision.kind, decision.plan.device_ids) == ("switch", ("d-1",))
    assert decision.reason.startswith("switch: first plan")


def test_idle_wins_when_every_plan_costs_more_than_it_is_worth() -> None:
    # J = 1 x 2 - 3000 x 0.001 < 0
    decision = choose(problem_of(backlog_usd=3000.0), candidate(0, rate=2.0, dollars=0.001))
    assert decision.kind == "idle"
    assert decision.reason.startswith("budget_wait: ")
    assert decision.predicted == IDLE_ESTIMATE


def test_a_running_plan_below_zero_is_not_kept() -> None:
    running = candidate(0, rate=2.0, dollars=0.001, generation=7)
    problem = problem_of(backlog_usd=3000.0, incumbent=running.plan)
    decision = choose(problem, running=running)
    assert decision.kind == "idle"
    assert decision.plan.generation == 8


def test_standing_costs_do_not_count_against_work() -> None:
    # Everything is billed while present: idling saves nothing, so any work is worth it.
    cluster = make_cluster(DEVICES)
    offers = tuple(replace(o, billed="while_present") for o in cluster.offers)
    problem = problem_of(backlog_usd=1e6, cluster=replace(cluster, offers=offers))
    plan = candidate(0, rate=1.0, dollars=4e-3)
    assert choose(problem, plan).kind == "switch"


def test_above_the_line_only_idle_is_allowed() -> None:
    ledger = LedgerView(spent_usd=15.0, budget_usd=4.0, line_usd=10.0)
    decision = choose(problem_of(), candidate(0, rate=2.0, dollars=0.001), ledger=ledger)
    assert decision.kind == "idle"
    assert decision.reason.startswith("budget_wait: 11 $ more than the average allows")


def test_where_idling_is_forbidden_only_the_hard_cap_stops_work() -> None:
    ledger = LedgerView(spent_usd=15.0, budget_usd=4.0, line_usd=10.0, allow_idle=False)
    plan = candidate(0, rate=2.0, dollars=0.001)
    assert choose(problem_of(backlog_usd=1e6), plan, ledger=ledger).kind == "switch"
    broke = replace(ledger, total_usd=15.0)
    assert choose(problem_of(), plan, ledger=broke).reason.startswith("budget_cap_reached: ")


def test_nothing_to_run_is_said() -> None:
    assert choose(problem_of()).reason.startswith("no_feasible_plan: ")


def test_small_gain_does_not_pay_for_a_pause() -> None:
    running = candidate(0, rate=2.0, dollars=0.001, generation=3)
    problem = problem_of(incumbent=running.plan)
    # gain 10 slots x 10 s x 0.001 samples/s = 0.1 samples; the pause alone costs 0.2
    decision = choose(problem, candidate(1, rate=2.001, dollars=0.001), running=running)
    assert decision.kind == "keep"
    assert decision.plan.generation == 3
    assert "would not earn its pause" in decision.reason


def test_large_gain_pays_for_a_pause() -> None:
    running = candidate(0, rate=2.0, dollars=0.001, generation=3)
    problem = problem_of(incumbent=running.plan)
    decision = choose(problem, candidate(1, rate=3.0, dollars=0.001), running=running)
    assert (decision.kind, decision.plan.generation) == ("switch", 4)
    assert decision.migration.moves
    assert decision.migration.pause_s > 0


def test_keep_says_so_when_nothing_is_better() -> None:
    running = candidate(0, rate=2.0, dollars=0.001)
    decision = choose(
        problem_of(incumbent=running.plan), candidate(1, rate=1.0, dollars=0.1), running=running
    )
    assert decision.reason == "keep: no other plan is better"


def test_dollars_of_the_moves_weigh_against_a_switch() -> None:
    running = candidate(0, rate=2.0, dollars=0.001)
    far = [replace(d, zone="z2" if d.device_id == "d-1" else "z1") for d in DEVICES]
    dear = make_cluster(far, price_usd_per_s=1e-3, egress_usd_per_byte=1e-6)
    free = make_cluster(far, price_usd_per_s=1e-3)
    better = candidate(1, rate=2.5, dollars=0.001)
    problem = problem_of(incumbent=running.plan, backlog_usd=10.0)
    # 12 MB of state at 1 $/MB and 10 samples/$ cost more than 100 s x 0.5 samples/s bring
    assert choose(replace(problem, cluster=dear), better, running=running).kind == "keep"
    assert choose(replace(problem, cluster=free), better, running=running).kind == "switch"


def test_a_device_lost_or_under_notice_forces_the_best_plan_whatever_its_pause() -> None:
    running = candidate(0, rate=2.0, dollars=0.001, generation=3)
    problem = problem_of(incumbent=running.plan, cluster=make_cluster(DEVICES[1:]))
    decision = choose(problem, candidate(1, rate=1e-3, dollars=1e-6))
    assert decision.kind == "switch"
    assert "d-0 is gone" in decision.reason
    told = choose(
        replace(problem, under_notice=frozenset({"d-0"})), candidate(1, rate=1e-3, dollars=1e-6)
    )
    assert "d-0 is under notice" in told.reason


def test_change_of_shares_alone_is_a_reassignment() -> None:
    old = make_plan(
        make_group([DEVICES[0]], (0, 4), (1,) * 4), make_group([DEVICES[1]], (0, 4), (1,) * 4)
    )
    new = make_plan(
        make_group([DEVICES[0]], (0, 4), (1,) * 5), make_group([DEVICES[1]], (0, 4), (1,) * 3)
    )
    slow = StepEstimate(8.0, 1.0, 1e-3, group_s=(8.0, 8.0))
    fast = StepEstimate(4.0, 2.0, 1e-3, group_s=(4.0, 4.0))
    running = Candidate(old, slow)
    decision = choose(problem_of(incumbent=old), Candidate(new, fast), running=running)
    assert decision.kind == "reassign"
    assert decision.reason == (
        "reassign: new plan takes 4 s a step instead of 8 s (+100.0 % samples/s, +0.0 % $/h)"
    )


def test_a_slower_plan_is_taken_for_cheaper_samples_and_the_reason_says_so() -> None:
    fast, thrifty = candidate(0, rate=4.0, dollars=0.004), candidate(1, rate=2.0, dollars=0.001)
    # J = 4 - 1900 x 0.004 < 0 < 2 - 1900 x 0.001
    problem = problem_of(backlog_usd=1900.0, incumbent=fast.plan)
    decision = choose(problem, thrifty, running=fast)
    assert decision.reason == (
        "switch: new plan takes 4 s a step instead of 2 s "
        "(-50.0 % samples/s, -75.0 % $/h, -50.0 % $/sample)"
    )


@pytest.mark.parametrize(
    ("expected_s", "cause"),
    [(2.0, "d-0 runs 2.5x slower than predicted; "), (5.0, "")],
    ids=["news", "known"],
)
def test_straggler_is_the_cause_while_it_is_news(expected_s: float, cause: str) -> None:
    running = candidate(0, rate=2.0, dollars=0.001)
    now = replace(running.estimate, compute_s=(("d-0", 5.0),))
    decision = choose(
        problem_of(incumbent=running.plan),
        candidate(1, rate=3.0, dollars=0.001),
        running=Candidate(running.plan, now),
        expected=replace(now, compute_s=(("d-0", expected_s),)),
    )
    assert decision.reason.startswith(f"switch: {cause}new plan takes ")


def test_incumbent_wins_a_tie() -> None:
    running = candidate(0, rate=2.0, dollars=0.001)
    twin = candidate(1, rate=2.0, dollars=0.001)
    decision = choose(problem_of(incumbent=running.plan), twin, running=running)
    assert decision.kind == "keep"


# The hard cap ------------------------------------------------------------------------


def test_slot_closes_early_when_only_part_of_it_can_be_paid() -> None:
    plan = candidate(0, rate=8.0, dollars=1e-3)  # a step a second
    ledger = replace(RICH, total_usd=1.0, spent_usd=0.9, reserve_usd=0.085)
    decision = choose(problem_of(), plan, ledger=ledger)
    assert decision.kind == "switch"
    assert decision.run_until_s is not None
    # two steps more may be needed, in which the price may jump fivefold; seconds are billed whole
    worst_usd = (decision.run_until_s + 2) * 1e-3 + 2 * 4e-3
    assert 0.015 - 1e-3 - 1e-5 <= worst_usd <= 0.015


def test_whole_slot_needs_no_early_end() -> None:
    ledger = replace(RICH, total_usd=1.0)
    decision = choose(problem_of(), candidate(0, rate=8.0, dollars=1e-3), ledger=ledger)
    assert decision.run_until_s is None


def test_cap_is_reached_when_not_even_a_step_fits() -> None:
    ledger = replace(RICH, total_usd=1.0, spent_usd=0.99)
    decision = choose(problem_of(), candidate(0, rate=8.0, dollars=1e-3), ledger=ledger)
    assert decision.kind == "idle"
    assert decision.reason.startswith("budget_cap_reached: 0.99 $ of 1 $ are spent")


def test_near_the_cap_a_cheaper_plan_takes_over() -> None:
    dear, cheap = candidate(0, 1, rate=0.8, dollars=2e-3), candidate(2, rate=8.0, dollars=1e-3)
    ledger = replace(RICH, total_usd=1.0, spent_usd=0.98)
    best_first = choose(problem_of(), replace_rate(dear, 9.0), cheap, ledger=ledger)
    assert best_first.plan.device_ids == ("d-2",)
    assert "budget_cap_near" in best_first.reason


def replace_rate(plan: Candidate, rate: float) -> Candidate:
    """A plan whose steps are long although its rate is high: a batch of its own size."""
    return replace(plan, estimate=replace(plan.estimate, samples_per_s=rate))


def paid(until_s: dict[str, float]) -> LedgerView:
    return replace(RICH, paid_until_s=until_s, running_step_s=3.0)


def test_bill_counts_minimum_blocks_and_highest_prices() -> None:
    cluster = make_cluster(DEVICES)
    offer = Offer(
        pool="d", kind="gpu", zone="z1", price_usd_per_s=1e-3, minimum_s=60.0, quantum_s=60.0,
        max_price_usd_per_s=2e-3,
    )  # fmt: skip
    plan = candidate(0, rate=8.0, dollars=1e-3)
    fresh = problem_of(cluster=replace(cluster, offers=(offer,)))
    assert slot_bill_usd(fresh, plan, 10.0, ledger=RICH) == pytest.approx(2e-3 * 60)
    for paid_s, blocks in ((0.0, 1), (5.0, 1), (12.0, 0)):  # held for 10 s and two steps of 1 s
        bill_usd = slot_bill_usd(fresh, plan, 10.0, ledger=paid({"d-0": paid_s}))
        assert bill_usd == pytest.approx(2e-3 * 60 * blocks)


def test_bill_counts_devices_that_are_held_until_they_have_handed_over() -> None:
    plan = candidate(0, rate=8.0, dollars=1e-3)
    problem, migration = problem_of(), Migration(pause_s=5.0)
    alone = slot_bill_usd(problem, plan, 10.0, migration, ledger=paid({"d-0": 0.0}))
    both = slot_bill_usd(problem, plan, 10.0, migration, ledger=paid({"d-0": 0.0, "d-1": 0.0}))
    foreseen, jumped = 1e-3 * (5.0 + 6.0), (PRICE_JUMP - 1) * 1e-3 * 6.0  # two steps of 3 s
    assert both - alone == pytest.approx(foreseen + jumped)


def test_bill_counts_the_blocks_that_follow_a_fresh_devices_minimum() -> None:
    offer = Offer(
        pool="d", kind="gpu", zone="z1", price_usd_per_s=1e-3, minimum_s=100.0, quantum_s=60.0,
        max_price_usd_per_s=1e-3,
    )  # fmt: skip
    fresh = problem_of(cluster=replace(make_cluster(DEVICES), offers=(offer,)))
    plan = candidate(0, rate=8.0, dollars=1e-3)
    assert slot_bill_usd(fresh, plan, 90.0, ledger=RICH) == pytest.approx(1e-3 * 100)
    assert slot_bill_usd(fresh, plan, 110.0, ledger=RICH) == pytest.approx(1e-3 * 160)


def test_bill_counts_the_blocks_of_devices_that_are_present_and_unused() -> None:
    offer = Offer(
        pool="d", kind="gpu", zone="z1", price_usd_per_s=1e-3, minimum_s=600.0, quantum_s=60.0,
        billed="while_present", max_price_usd_per_s=1e-3,
    )  # fmt: skip
    fresh = problem_of(cluster=replace(make_cluster(DEVICES), offers=(offer,)))
    plan = candidate(0, rate=8.0, dollars=1e-3)
    held = {device.device_id: 0.0 for device in DEVICES}
    assert slot_bill_usd(fresh, plan, 10.0, ledger=RICH) == pytest.approx(4 * 1e-3 * 600)
    assert slot_bill_usd(fresh, plan, 10.0, ledger=paid(held)) == pytest.approx(4 * 1e-3 * 60)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"slot_s": 0.0}, "slot_s"),
        ({"kappa": -0.1}, "kappa"),
        ({"max_team": 9}, "max_team"),
        ({"hysteresis_slots": 0}, "hysteresis_slots"),
    ],
)
def test_impossible_control_is_refused_by_name(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ControlOptions(**wrong)  # type: ignore[arg-type]  # the wrong values are the point


def test_impossible_straggler_is_refused() -> None:
    with pytest.raises(ValueError, match="ratio"):
        StragglerOptions(ratio=1.0)
    with pytest.raises(ValueError, match="confirm_slots"):
        StragglerOptions(confirm_slots=0)


# Guarantees on every sample path -----------------------------------------------------


def adversarial_run(seed: int, *, total_usd: float | None, guesses: float) -> list[float]:
    """A loop in which plans, prices, slot lengths and V are chosen against the budget.

    The bill is what the plan costs at prices that jump inside the slot, for as long as the
    guards allow and two steps more. ``guesses`` spoils the predictions by up to that factor.
    Returns, per slot end, spending above ``b t`` less the printed slack; then the end's money.
    """
    rng = np.random.default_rng(seed)
    kappa, budget, horizon_s = 0.05, 2e-3, 5e3
    line = kappa * budget * horizon_s
    queues, spent, now, incumbent = Queues(), 0.0, 0.0, None
    slot_bill_max, used_s, over = 0.0, SLOT_S, []
    rho = 10.0 * rng.uniform(0.3, 1)
    for _ in range(60):
        rho *= float(rng.choice([1.0, 1.5]))  # a ratio that keeps growing moves V every time
        weight = penalty_weight(kappa, budget, horizon_s, rho)
        prices = {"d": float(rng.uniform(5e-4, 3e-3))}
        cluster = replace(make_cluster(DEVICES, price_usd_per_s=prices), now_s=now)
        problem = replace(
            problem_of(backlog_usd=queues.backlog_usd, weight=weight, incumbent=incumbent),
            cluster=cluster,
        )
        count = int(rng.integers(1, 5))
        dollars = count * prices["d"]
        plan = candidate(
            *range(4)[:count] if count != 3 else (0, 1),
            rate=float(rng.uniform(0.5, 8)),
            dollars=dollars * float(rng.uniform(1 / guesses, guesses)),
        )
        view = LedgerView(
            spent_usd=spent, budget_usd=budget * now, line_usd=line, total_usd=total_usd
        )
        running = Candidate(incumbent, plan.estimate) if incumbent else None
        decision = choose(problem, plan, running=running, ledger=view)
        elapsed = SLOT_S * float(rng.uniform(0.3, 1))
        bill = 0.0
        if decision.kind != "idle":
            chosen = Candidate(decision.plan, decision.predicted)
            step_s = decision.predicted.step_s
            if decision.run_until_s is not None:
                elapsed = min(elapsed, decision.run_until_s - now)
            held_s = elapsed + OVERRUN_STEPS * step_s
            rate = len(decision.plan.device_ids) * prices["d"]
            # the price jumps fivefold at once when the slot is closed
            bill = rate * elapsed + 5 * rate * OVERRUN_STEPS * step_s
            slot_bill_max = max(slot_bill_max, slot_bill_usd(problem, chosen, elapsed, ledger=RICH))
            elapsed = held_s
            used_s = min(used_s, elapsed)
        queues = queues.update(bill, budget, elapsed)
        spent, now = spent + bill, now + elapsed
        incumbent = decision.plan
        bound = overspend_bound_usd(line, budget, slot_bill_max_usd=slot_bill_max, slot_s=used_s)
        over.append(spent - budget * now - bound)
    return [*over, spent]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 3.0, 20.0]))
def test_spending_never_leaves_the_printed_bound(seed: int, guesses: float) -> None:
    *over, _ = adversarial_run(seed, total_usd=None, guesses=guesses)
    assert max(over) <= 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 2.0), st.sampled_from([1.0, 20.0]))
def test_hard_cap_is_never_exceeded(seed: int, total_usd: float, guesses: float) -> None:
    *_, spent = adversarial_run(seed, total_usd=total_usd, guesses=guesses)
    assert spent <= total_usd * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_backlog_stays_below_v_rho_and_one_bill(seed: int) -> None:
    # G1 by the queue alone: no guard, right predictions, prices and slot lengths at will
    rng = np.random.default_rng(seed)
    weight, rho, budget = 1e-3, 4000.0, 1e-3
    queues, bill_max = Queues(), 0.0
    profile = make_profile()
    for _ in range(50):
        price = float(rng.uniform(5e-4, 5e-3))
        cluster = make_cluster(DEVICES, price_usd_per_s=price)
        problem = make_problem(
            cluster, profile, penalty_weight=weight, backlog_usd=queues.backlog_usd
        )
        rate = float(rng.uniform(0, rho * price))
        plan = candidate(0, rate=max(rate, 1e-3), dollars=price)
        free = LedgerView(spent_usd=0.0, budget_usd=0.0, line_usd=1e9)
        decision = choose(problem, plan, ledger=free)
        elapsed = float(rng.uniform(1, SLOT_S))
        bill = 0.0 if decision.kind == "idle" else price * elapsed
        bill_max = max(bill_max, bill)
        queues = queues.update(bill, budget, elapsed)
        assert queues.backlog_usd <= weight * rho + bill_max + 1e-12
