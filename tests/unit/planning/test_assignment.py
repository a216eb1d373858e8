from collections.abc import Sequence
from dataclasses import replace

import numpy as np
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
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.planning.constraints import Row, broken, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.margins import MarginalValues, marginal_values
from orchestrator.planning.program import SlotProgram
from orchestrator.planning.slot_table import slot_table
from orchestrator.planning.waterfill import water_fill

IDLE = Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)


class Counted(SlotAssignment):
    """Notes which problems are compiled and for which plans values are computed."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int]] = []
        self.valued_plans: list[Plan] = []
        super().__init__(5.0, compiled=self._compile, valued=self._value)

    def _compile(self, *shape: int) -> SlotProgram:
        num_candidates, num_sets, num_rows = shape
        self.shapes.append((num_candidates, num_sets, num_rows))
        return SlotProgram(*shape)

    def _value(
        self, cost: CostModel, best: Candidate, rows: Sequence[Row]
    ) -> MarginalValues | None:
        self.valued_plans.append(best.plan)
        return marginal_values(cost, best, rows)


def as_candidate(problem: PlanningProblem, plan: Plan) -> Candidate:
    cost = CostModel(problem)
    estimate = cost.evaluate(plan.groups, plan.schedule)
    return Candidate(plan, estimate, cost.score(estimate))


def data_parallel(
    speeds: Sequence[float], counts: Sequence[int], **rest: float
) -> tuple[PlanningProblem, Candidate]:
    """A kind for every speed, whole model on each device, microbatches of one sample."""
    kinds = {speed: f"k{i}" for i, speed in enumerate(dict.fromkeys(speeds))}
    devices = [make_device(f"{kinds[s]}-{i}", kind=kinds[s]) for i, s in enumerate(speeds)]
    profile = make_profile({kind: [0.01 / s] * 4 for s, kind in kinds.items()})
    problem = make_problem(make_cluster(devices), profile, batch_samples=sum(counts))
    problem = replace(problem, **rest)  # type: ignore[arg-type]  # fields of the problem
    groups = [make_group([d], (0, 4), (1,) * n) for d, n in zip(devices, counts, strict=True)]
    return problem, as_candidate(problem, make_plan(*groups))


def random_sets(seed: int) -> tuple[PlanningProblem, Candidate, float]:
    """Sets of alike devices, shares at random, and the step time of water-filling over groups."""
    rng = np.random.default_rng(seed)
    sets = [int(c) for c in rng.integers(1, 7, rng.integers(1, 6))]
    speeds = [s for c in sets for s in [float(rng.uniform(0.2, 3.0))] * c]
    counts = [1] * len(speeds)
    for g in rng.integers(0, len(speeds), int(rng.integers(20, 80))):
        counts[g] += 1
    problem, drawn = data_parallel(speeds, counts, backlog_usd=float(rng.uniform(0, 1)))
    period_s = 0.12 / np.array(speeds)
    best = water_fill(period_s, period_s, sum(counts))
    after_s = drawn.estimate.sync_s + drawn.estimate.update_s
    return problem, drawn, float((best * period_s).max()) + after_s


@pytest.mark.parametrize("seed", range(30))
def test_without_rows_the_shares_are_those_of_water_filling_and_of_the_solver(seed: int) -> None:
    problem, drawn, best_s = random_sets(seed)
    solved = SlotAssignment(5.0).solve(problem, (drawn, IDLE), ())
    assert solved.candidate.estimate.step_s == pytest.approx(best_s, rel=1e-9)
    assert solved.fallback is None
    table = slot_table(CostModel(problem), drawn, ())
    program = SlotProgram(1, len(table.sets), 0)
    found = program.best([table], (), 0.9 * drawn.score, 5.0)
    assert found is not None
    assert table.step_s(found[1]) == pytest.approx(best_s, rel=1e-9)


def test_alike_groups_are_one_column_to_the_solver() -> None:
    speeds = [s for s in (1.0, 1.5, 2.0, 3.0) for _ in range(64)]
    problem, bad = data_parallel(speeds, [8] * 256)
    assert slot_table(CostModel(problem), bad, ()).count == (64,) * 4
    rows = make_rows([LimitOptions(pool="k0", min_share=0.5)])
    assignment = Counted()
    solved = assignment.solve(problem, (bad, IDLE), rows)
    assert assignment.shapes == [(1, 4, 1)]
    # Half the batch on 64 devices of speed 1: 16 microbatches of 0.12 s on each.
    after_s = bad.estimate.sync_s + bad.estimate.update_s
    assert solved.candidate.estimate.step_s == pytest.approx(16 * 0.12 + after_s, rel=1e-9)


def test_shares_within_a_set_differ_by_one_microbatch_at_most() -> None:
    problem, bad = data_parallel((1.0, 1.0, 1.0, 2.0), (20, 1, 1, 2))
    solved = SlotAssignment(5.0).solve(problem, (bad, IDLE), ())
    shares = [g.num_samples for g in solved.candidate.plan.groups]
    assert sum(shares) == 24
    assert max(shares[:3]) - min(shares[:3]) <= 1
    assert shares[0] == max(shares[:3])  # who had most keeps most


def test_where_the_search_found_the_best_shares_nothing_is_solved() -> None:
    problem, best = data_parallel((2.0, 1.0), (8, 4))
    assignment = Counted()
    assert assignment.solve(problem, (IDLE, best), ()).candidate is best
    assert not assignment.shapes


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
    assert solved.fallback is not None
    assert solved.fallback.startswith("user_rows_infeasible: the best plan breaks egress: ")
    assert solved.fallback.endswith(" times its limit")


def test_least_share_moves_samples_to_the_pool() -> None:
    problem, both, _ = two_zones()
    rows = make_rows([LimitOptions(pool="a", min_share=0.75)])
    solved = SlotAssignment(5.0).solve(problem, (both, IDLE), rows)
    assert [g.num_samples for g in solved.candidate.plan.groups] == [6, 2]
    assert broken(CostModel(problem), rows, solved.candidate) is None


@pytest.mark.parametrize("seed", range(12))
def test_under_rows_the_shares_are_the_best_of_all_that_obey(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ("a", "b", "c", "d")
    devices = [
        make_device(f"{name}-0", zone="z1" if name < "c" else "z2", kind=name) for name in names
    ]
    prices = {name: float(rng.uniform(5e-4, 2e-3)) for name in names}
    cluster = make_cluster(devices, price_usd_per_s=prices, egress_usd_per_byte=2e-9)
    profile = make_profile(
        {name: [float(rng.uniform(0.005, 0.03))] * 4 for name in names}, boundary_bytes=2e4
    )
    problem = make_problem(cluster, profile, batch_samples=12)
    problem = replace(problem, backlog_usd=float(rng.uniform(0, 3e3)))
    chains = ([devices[0], devices[2]], [devices[1]], [devices[3]])
    cuts = ((0, 2, 4), (0, 4), (0, 4))
    rows = make_rows(
        [
            LimitOptions(
                pool=str(rng.choice(["a", "b", "d"])), min_share=float(rng.uniform(0, 0.6))
            ),
            LimitOptions(egress=True, max_per_hour_usd=float(rng.uniform(0.5, 6))),
            LimitOptions(zone="z2", max_per_hour_usd=3600 * (prices["c"] + prices["d"] + 2e-4)),
        ]
    )
    cost = CostModel(problem)

    def dealt(counts: Sequence[int]) -> Candidate:
        groups = [
            make_group(chain, cut, (1,) * n)
            for chain, cut, n in zip(chains, cuts, counts, strict=True)
        ]
        plan = make_plan(*groups)
        estimate = retime(cost, plan.groups, plan.schedule)
        return Candidate(plan, estimate, cost.score(estimate))

    every = [dealt((x, y, 12 - x - y)) for x in range(1, 11) for y in range(1, 12 - x)]
    scores = [c.score for c in every if broken(cost, rows, c) is None]
    solved = SlotAssignment(5.0).solve(problem, (every[0], IDLE), rows).candidate
    if not scores:
        assert solved.plan.is_idle
    else:
        assert solved.score == pytest.approx(max(scores), rel=1e-9)
        assert broken(cost, rows, solved) is None


def test_miss_of_the_time_limit_falls_back_to_what_obeys_and_says_so() -> None:
    problem, both, one = two_zones()
    rows = make_rows([LimitOptions(pool="a", min_share=0.75)])
    solved = SlotAssignment(0.0).solve(problem, (both, one, IDLE), rows)
    assert solved.candidate is one
    assert solved.fallback is not None
    assert solved.fallback.startswith("assignment: HiGHS ended ")


def test_problem_is_compiled_once_for_a_shape() -> None:
    """CVXPY warns, which is an error here, of a problem that it compiles for every solve."""
    problem, both, one = two_zones()
    rows = make_rows([LimitOptions(pool="a", min_share=0.75)])
    assignment = Counted()
    assignment.solve(problem, (both, one, IDLE), rows)
    dear = replace(problem, backlog_usd=5.0)
    again = [as_candidate(dear, c.plan) for c in (both, one)]
    assignment.solve(dear, (*again, IDLE), rows)
    assert len(assignment.shapes) == 1


def test_marginal_values_are_remembered_while_nothing_but_the_time_and_a_little_money_moves() -> (
    None
):
    problem, best = data_parallel((2.0, 1.0), (8, 4), backlog_usd=2.0)
    assignment = Counted()
    first = assignment.solve(problem, (IDLE, best), ()).margins
    later = replace(problem, backlog_usd=2.01, cluster=replace(problem.cluster, now_s=60.0))
    second = assignment.solve(later, (IDLE, best), ()).margins
    assert len(assignment.valued_plans) == 1
    assert first is not None
    assert second is not None
    for a, b in zip(first.devices, second.devices, strict=True):
        assert a.samples_per_s == b.samples_per_s
        assert b.break_even_usd_per_s == pytest.approx(b.samples_per_s / 2.01)
    slower = replace(later.cluster.devices[0], slowdown=2.0)
    devices = (slower, *later.cluster.devices[1:])
    changed = replace(later, cluster=replace(later.cluster, devices=devices))
    assignment.solve(changed, (IDLE, as_candidate(changed, best.plan)), ())
    assert len(assignment.valued_plans) == 2


def test_scores_of_another_price_of_money_do_not_mislead() -> None:
    problem, uneven = data_parallel((1.0, 1.0), (11, 1))
    boasting = replace(uneven, score=1e9)
    solved = SlotAssignment(5.0).solve(problem, (boasting, IDLE), ())
    assert [g.num_samples for g in solved.candidate.plan.groups] == [6, 6]
