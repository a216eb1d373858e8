from dataclasses import replace

import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.budget import LimitOptions
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem
from orchestrator.planning.constraints import Breach, Row, broken, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.pricing import is_held_back, nearest_breach, price_rows, search_within
from orchestrator.strategies.joint import Joint

IDLE = Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)
NEAR = [make_device(f"near-{i}", zone="z1", kind="slow") for i in range(2)]
FAR = [make_device(f"far-{i}", zone="z2", kind="fast") for i in range(4)]


def a_problem(**rest: object) -> PlanningProblem:
    """Two slow devices here, four fast ones in a zone that egress leads to."""
    cluster = make_cluster(
        [*NEAR, *FAR], price_usd_per_s={"near": 1e-3, "far": 2e-3}, egress_usd_per_byte=1e-12
    )
    profile = make_profile({"slow": [0.02] * 4, "fast": [0.01] * 4}, param_bytes=1e4)
    problem = make_problem(cluster, profile, batch_samples=48)
    return replace(problem, **rest)  # type: ignore[arg-type]  # fields of the problem


def as_candidate(problem: PlanningProblem, plan: Plan) -> Candidate:
    cost = CostModel(problem)
    estimate = cost.evaluate(plan.groups, plan.schedule)
    return Candidate(plan, estimate, cost.score(estimate))


def everyone(problem: PlanningProblem) -> Candidate:
    counts = [*[4] * 2, *[10] * 4]
    groups = [make_group([d], (0, 4), (1,) * n) for d, n in zip([*NEAR, *FAR], counts, strict=True)]
    return as_candidate(problem, make_plan(*groups))


@pytest.mark.parametrize("backlog_usd", [0.0, 300.0])
def test_price_of_a_zone_is_added_to_the_score_and_nothing_else_moves(backlog_usd: float) -> None:
    problem = a_problem(penalty_weight=2.0, backlog_usd=backlog_usd)
    row = Row("zone", "z2", 4e-3)
    rate = 30.0
    priced = price_rows(problem, (Breach(row, 8e-3),), rate)
    before, after = CostModel(problem), CostModel(priced)
    for devices in (NEAR, FAR[:1], FAR[:2], FAR):
        groups = [make_group([d], (0, 4), (1,) * (48 // len(devices))) for d in devices]
        use = 2e-3 * sum(d.zone == "z2" for d in devices)
        expected = before.score(before.evaluate(groups, "1f1b")) - 2.0 * rate * use / 4e-3
        assert after.score(after.evaluate(groups, "1f1b")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("limit", [0.2, 0.6])
def test_price_of_a_share_is_paid_by_samples_that_enter_elsewhere(limit: float) -> None:
    problem = a_problem(penalty_weight=2.0, backlog_usd=300.0)
    priced = price_rows(problem, (Breach(Row("share", "near", limit), 0.0),), 30.0, factor=0.5)
    before, after = CostModel(problem), CostModel(priced)
    through = make_group([NEAR[0], FAR[0]], (0, 2, 4), (1,) * 36)
    elsewhere = make_group([FAR[1]], (0, 4), (1,) * 12)
    estimate = before.evaluate([through, elsewhere], "1f1b")
    price = 0.5 / (1 - limit)
    expected = before.score(estimate) - 2.0 * price * 0.25 * estimate.samples_per_s
    assert after.score(after.evaluate([through, elsewhere], "1f1b")) == pytest.approx(expected)


def test_samples_that_must_enter_on_slow_devices_go_on_on_fast_ones() -> None:
    """A plan on the slow devices alone would keep the limit, at a fraction of the rate."""
    problem = a_problem()
    cost, rows = CostModel(problem), make_rows([LimitOptions(pool="near", min_share=1.0)])
    again = search_within(
        lambda p: Joint().propose(p, out_of_time=lambda: False),
        cost,
        rows,
        [everyone(problem), IDLE],
        lambda: False,
    )
    best = max((c for c in again if broken(cost, rows, c) is None), key=lambda c: c.score)
    alone = [make_group([d], (0, 4), (1,) * 24) for d in NEAR]
    assert best.score > 1.5 * cost.score(cost.evaluate(alone, "1f1b"))


def test_plan_above_the_limit_is_worth_less_than_idle_at_the_price_of_its_row() -> None:
    problem = a_problem()
    candidate = everyone(problem)
    row = Row("zone", "z2", 5e-3)  # two of the four far devices, of 2e-3 each
    rate = candidate.estimate.samples_per_s
    cost = CostModel(price_rows(problem, (Breach(row, 8e-3),), rate))
    assert cost.score(cost.evaluate(candidate.plan.groups, "1f1b")) < 0


@pytest.mark.parametrize(
    "limit",
    [
        LimitOptions(zone="z2", max_per_hour_usd=0.0),
        LimitOptions(zone="z2", max_per_hour_usd=3600 * 4.5e-3),
        LimitOptions(pool="near", min_share=1.0),
        LimitOptions(egress=True, max_per_hour_usd=0.0),
    ],
)
def test_search_with_priced_rows_finds_a_plan_that_obeys(limit: LimitOptions) -> None:
    problem = a_problem()
    cost, rows = CostModel(problem), make_rows([limit])
    found = [everyone(problem), IDLE]
    assert broken(cost, rows, found[0]) is not None
    again = search_within(
        lambda p: Joint().propose(p, out_of_time=lambda: False), cost, rows, found, lambda: False
    )
    obedient = [c for c in again if broken(cost, rows, c) is None]
    assert obedient
    best = max(obedient, key=lambda c: c.score)
    true = cost.evaluate(best.plan.groups, best.plan.schedule)
    assert best.estimate.cost_usd_per_s == pytest.approx(true.cost_usd_per_s)  # not as priced


def test_limits_hold_back_where_the_best_breaks_them_and_is_worth_its_price() -> None:
    problem = a_problem()
    cost, best = CostModel(problem), everyone(problem)
    poor = as_candidate(problem, make_plan(make_group(NEAR[:1], (0, 4), (1,) * 48)))
    assert is_held_back(cost, [best, poor, IDLE], [poor])
    assert is_held_back(cost, [best, IDLE], [IDLE])
    assert not is_held_back(cost, [best, poor, IDLE], [best, poor])
    assert not is_held_back(cost, [IDLE], [IDLE])
    dear = CostModel(replace(problem, backlog_usd=1e6))
    assert not is_held_back(dear, [best, poor, IDLE], [poor])


def test_nearest_candidate_says_what_is_missing() -> None:
    problem = a_problem()
    rows = make_rows([LimitOptions(zone="z2", max_per_hour_usd=3600 * 5e-3)])
    three = make_plan(*(make_group([d], (0, 4), (1,) * 16) for d in FAR[:3]))
    text = nearest_breach(
        CostModel(problem), rows, [everyone(problem), as_candidate(problem, three), IDLE]
    )
    assert text is not None
    assert text.startswith("zone z2: 1.2")  # three devices of 2e-3 $/s, and egress there is none
    assert text.endswith("times its limit")
