from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.planning.constraints import broken, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.queues import LimitOptions
from orchestrator.planning.waterfill import water_fill
from tests.unit.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)

IDLE = Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)


def as_candidate(problem: PlanningProblem, plan: Plan) -> Candidate:
    cost = CostModel(problem)
    estimate = cost.evaluate(plan.groups, plan.schedule)
    return Candidate(plan, estimate, cost.score(estimate))


def data_parallel(
    speeds: Sequence[float], counts: Sequence[int], **rest: float
) -> tuple[PlanningProblem, Candidate]:
    """One device a kind, whole model on each, microbatches of one sample."""
    devices = [make_device(f"k{i}-0", kind=f"k{i}") for i in range(len(speeds))]
    profile = make_profile({f"k{i}": [0.01 / s] * 4 for i, s in enumerate(speeds)})
    problem = make_problem(make_cluster(devices), profile, batch_samples=sum(counts))
    problem = replace(problem, **rest)  # type: ignore[arg-type]  # fields of the problem
    groups = [make_group([d], (0, 4), (1,) * n) for d, n in zip(devices, counts, strict=True)]
    return problem, as_candidate(problem, make_plan(*groups))


@pytest.mark.parametrize("seed", range(8))
def test_without_rows_the_counts_are_those_of_water_filling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(0.2, 3.0, 4)
    problem, bad = data_parallel(speeds, (20, 2, 5, 5), backlog_usd=float(rng.uniform(0, 100)))
    solved = SlotAssignment(5.0).solve(problem, (bad, IDLE), ())
    period_s = 0.12 / speeds
    counts = water_fill(period_s, period_s, 32)
    after_s = bad.estimate.sync_s + bad.estimate.update_s
    best_s = float((counts * period_s).max()) + after_s
    assert solved.candidate.estimate.step_s == pytest.approx(best_s, rel=1e-9)
    assert solved.fallback is None


def test_best_proposal_is_returned_as_it_is() -> None:
    problem, best = data_parallel((2.0, 1.0), (8, 4))
    assert SlotAssignment(5.0).solve(problem, (IDLE, best), ()).candidate is best


def test_candidate_that_could_be_best_with_other_shares_wins() -> None:
    problem, uneven = data_parallel((1.0, 1.0), (11, 1))
    single = as_candidate(
        problem, make_plan(make_group([problem.cluster.devices[0]], (0, 4), (1,) * 12))
    )
    solved = SlotAssignment(5.0).solve(problem, (uneven, single, IDLE), ())
    assert [g.num_samples for g in solved.candidate.plan.groups] == [6, 6]


def test_short_last_microbatch_keeps_the_batch_whole() -> None:
    devices = [make_device("k0-0", kind="k0"), make_device("k1-0", kind="k1")]
    profile = make_profile({"k0": [0.01] * 4, "k1": [0.03] * 4}, microbatches=(1, 2, 4))
    problem = make_problem(make_cluster(devices), profile, batch_samples=18, microbatch_samples=4)
    groups = [
        make_group([devices[0]], (0, 4), (4, 2)),
        make_group([devices[1]], (0, 4), (4, 4, 4)),
    ]
    solved = SlotAssignment(5.0).solve(
        problem, (as_candidate(problem, make_plan(*groups)), IDLE), ()
    )
    assert solved.candidate.plan.num_samples == 18
    assert solved.candidate.plan.groups[0].num_samples > 12


def test_nothing_but_idle_stays_idle() -> None:
    problem, _ = data_parallel((1.0,), (4,))
    assert SlotAssignment(5.0).solve(problem, (IDLE,), ()).candidate is IDLE


def two_zones(**limit: float | str | bool) -> tuple[PlanningProblem, Candidate, Candidate]:
    """A plan over two zones, and one on the first zone only."""
    devices = [
        make_device("a-0", zone="z1", kind="gpu"),
        make_device("b-0", zone="z2", kind="gpu"),
    ]
    cluster = make_cluster(
        devices, price_usd_per_s={"a": 1e-3, "b": 2e-3}, egress_usd_per_byte=1e-9
    )
    problem = make_problem(cluster, batch_samples=8)
    both = make_plan(
        make_group([devices[0]], (0, 4), (1,) * 4), make_group([devices[1]], (0, 4), (1,) * 4)
    )
    one = make_plan(make_group([devices[0]], (0, 4), (1,) * 8))
    return problem, as_candidate(problem, both), as_candidate(problem, one)


def test_limit_on_a_zone_excludes_the_plan_that_spends_there() -> None:
    problem, both, one = two_zones()
    rows = make_rows([LimitOptions(zone="z2", max_per_hour_usd=3.6)])  # 1e-3 $/s; b costs 2e-3
    solved = SlotAssignment(5.0).solve(problem, (both, one, IDLE), rows)
    assert solved.candidate.plan.device_ids == ("a-0",)


def test_rate_limit_is_not_kept_by_waiting() -> None:
    problem, both, _ = two_zones()
    rows = make_rows([LimitOptions(egress=True, max_per_hour_usd=1e-6)])
    solved = SlotAssignment(5.0).solve(problem, (both, IDLE), rows)
    assert solved.candidate.plan.is_idle
    assert solved.fallback == "user_rows_infeasible: no plan keeps egress"


def test_least_share_moves_samples_to_the_pool() -> None:
    problem, both, _ = two_zones()
    rows = make_rows([LimitOptions(pool="a", min_share=0.75)])
    solved = SlotAssignment(5.0).solve(problem, (both, IDLE), rows)
    assert [g.num_samples for g in solved.candidate.plan.groups] == [6, 2]
    assert broken(CostModel(problem), rows, solved.candidate) is None


def test_price_of_a_share_is_what_a_little_more_of_it_costs() -> None:
    problem, both, _ = two_zones()
    assignment = SlotAssignment(5.0)
    rates, prices = [], []
    for share in (0.75, 0.875):
        rows = make_rows([LimitOptions(pool="a", min_share=share)])
        solved = assignment.solve(problem, (both, IDLE), rows)
        rates.append(solved.candidate.estimate.samples_per_s)
        prices.append(dict(solved.shadow_prices)["share a"])
    slope = (rates[1] - rates[0]) / 0.125
    assert prices[0] < slope < prices[1] < 0  # convex: the price at either end brackets it


def test_rows_that_do_not_bind_have_no_price() -> None:
    problem, both, _ = two_zones()
    rows = make_rows([LimitOptions(zone="z2", max_per_hour_usd=100.0)])
    assert SlotAssignment(5.0).solve(problem, (both, IDLE), rows).shadow_prices == ()


def test_miss_of_the_time_limit_falls_back_to_the_best_proposal_and_says_so() -> None:
    problem, both, one = two_zones()
    solved = SlotAssignment(0.0).solve(problem, (both, one, IDLE), ())
    assert solved.candidate is both
    assert solved.fallback is not None
    assert solved.fallback.startswith("assignment: HiGHS ended ")


def test_problem_is_compiled_once_for_a_shape() -> None:
    problem, both, one = two_zones()
    assignment = SlotAssignment(5.0)
    assignment.solve(problem, (both, one, IDLE), ())
    programs = dict(assignment._programs)
    dear = replace(problem, backlog_usd=5.0)
    assignment.solve(dear, (as_candidate(dear, both.plan), as_candidate(dear, one.plan), IDLE), ())
    assert assignment._programs == programs
    assert next(iter(programs.values()))._problem.is_dcp(dpp=True)


def test_scores_of_another_price_of_money_do_not_mislead() -> None:
    problem, uneven = data_parallel((1.0, 1.0), (11, 1))
    boasting = replace(uneven, score=1e9)
    solved = SlotAssignment(5.0).solve(problem, (boasting, IDLE), ())
    assert [g.num_samples for g in solved.candidate.plan.groups] == [6, 6]
