from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.strategies.registry import make_strategy
from tests.unit.planning.demo_cluster import demo_cluster, demo_devices, demo_problem

SMALL = demo_cluster(demo_devices((1, 1, 1)))


def proposed(name: str, problem: PlanningProblem) -> tuple[Candidate, ...]:
    return make_strategy(name).propose(problem, out_of_time=lambda: False)


def running(name: str, problem: PlanningProblem) -> Candidate:
    return next(c for c in proposed(name, problem) if not c.plan.is_idle)


def test_even_split_deals_64_samples_over_6_devices_as_ddp_does() -> None:
    plan = running("even-split", demo_problem()).plan
    assert [g.num_samples for g in plan.groups] == [11, 11, 11, 11, 10, 10]
    assert {g.microbatches for g in plan.groups} == {(4, 4, 3), (4, 4, 2)}
    assert all(g.stages[0].layers == range(10) for g in plan.groups)


def test_even_split_takes_as_long_as_its_slowest_device() -> None:
    cluster = demo_cluster(demo_devices((2, 0, 0), slowdowns={"fast-1": 2.0}))
    estimate = running("even-split", demo_problem(cluster)).estimate
    # 8 microbatches of 0.1 s, twice as slow
    assert max(estimate.group_s) == pytest.approx(1.6)


def test_proportional_gives_three_times_the_samples_to_three_times_the_speed() -> None:
    cluster = demo_cluster(demo_devices((1, 1, 0)))
    plan = running("proportional", demo_problem(cluster)).plan
    assert [g.num_samples for g in plan.groups] == [48, 16]


def test_device_too_slow_for_one_sample_stays_idle_under_proportional() -> None:
    devices = [make_device("a-0", kind="a"), make_device("b-0", kind="b")]
    profile = make_profile({"a": [0.01] * 4, "b": [1.0] * 4})
    plan = running("proportional", make_problem(make_cluster(devices), profile)).plan
    assert plan.device_ids == ("a-0",)
    assert plan.num_samples == 8


def test_even_pipeline_gives_every_device_as_many_layers_as_can_be() -> None:
    plan = running("even-pipeline", demo_problem()).plan
    (group,) = plan.groups
    assert [len(stage.layers) for stage in group.stages] == [2, 2, 2, 2, 1, 1]
    assert [d[:4] for d in group.device_ids] == ["fast", "fast", "mid-", "mid-", "slow", "slow"]
    assert group.microbatches == (4,) * 16


def test_balanced_pipeline_is_faster_than_the_even_one() -> None:
    even = running("even-pipeline", demo_problem()).estimate.step_s
    balanced = running("balanced-pipeline", demo_problem()).estimate.step_s
    assert balanced < 0.9 * even


def test_pipeline_of_more_devices_than_layers_leaves_the_slowest_idle() -> None:
    devices = [make_device(f"d-{i}", slowdown=1.0 + i) for i in range(6)]
    for name in ("even-pipeline", "balanced-pipeline"):
        plan = running(name, make_problem(make_cluster(devices))).plan
        assert set(plan.device_ids) == {"d-0", "d-1", "d-2", "d-3"}


def test_joint_beats_every_baseline_on_the_demo_cluster() -> None:
    problem = demo_problem()
    joint = running("joint", problem).estimate.step_s
    even = running("even-split", problem).estimate.step_s
    others = ("even-split", "proportional", "even-pipeline", "balanced-pipeline")
    assert joint <= (1 - 0.45) * even
    assert joint <= (1 - 0.08) * min(running(n, problem).estimate.step_s for n in others)


def test_baseline_that_does_not_fit_names_the_device_that_lacks_memory() -> None:
    devices = [replace(d, memory_bytes=6_000_000) for d in demo_devices()]
    with pytest.raises(InfeasibleError, match=r"does not fit: .*'(fast|mid|slow)-"):
        proposed("even-split", demo_problem(demo_cluster(devices)))


def test_greedy_ignores_the_price_of_money() -> None:
    free, dear = demo_problem(SMALL), demo_problem(SMALL, backlog_usd=1000.0)
    assert running("greedy", dear).plan == running("greedy", free).plan
    assert proposed("greedy", dear)[0].plan.is_idle  # and leaves it to the guards


def test_cheapest_runs_the_plan_of_most_samples_per_dollar() -> None:
    estimate = running("cheapest", demo_problem(SMALL)).estimate
    best = estimate.samples_per_s / estimate.cost_usd_per_s
    for name in ("joint", "even-split", "proportional", "greedy"):
        other = running(name, demo_problem(SMALL)).estimate
        assert other.samples_per_s / other.cost_usd_per_s <= best * (1 + 1e-9)


def test_slot_cap_never_plans_above_the_rate_and_uses_it() -> None:
    problem = demo_problem(SMALL)  # 4 $/h
    estimate = running("slot-cap", problem).estimate
    assert estimate.cost_usd_per_s <= problem.budget_usd_per_s
    # a fast device alone costs 3.67 $/h and takes 16 microbatches of 0.1 s
    assert estimate.samples_per_s >= 64 / 1.63 * (1 - 1e-9)


def test_slot_cap_below_every_price_is_idle() -> None:
    (only,) = proposed("slot-cap", demo_problem(SMALL, budget_usd_per_s=1e-4))
    assert only.plan.is_idle


def test_on_demand_uses_firm_pools_only() -> None:
    cluster = demo_cluster()
    offers = tuple(replace(o, spot=o.pool != "mid") for o in cluster.offers)
    plan = running("on-demand", demo_problem(replace(cluster, offers=offers))).plan
    assert {d[:3] for d in plan.device_ids} == {"mid"}
    every = tuple(replace(o, spot=True) for o in cluster.offers)
    with pytest.raises(InfeasibleError, match="every pool is spot"):
        proposed("on-demand", demo_problem(replace(cluster, offers=every)))


def test_static_keeps_its_plan_when_a_device_slows_down() -> None:
    strategy = make_strategy("static")
    first = strategy.propose(demo_problem(SMALL), out_of_time=lambda: False)[0].plan
    slowed = demo_problem(
        demo_cluster(demo_devices((1, 1, 1), slowdowns={"fast-0": 2.5})), incumbent=first
    )
    again = strategy.propose(slowed, out_of_time=lambda: False)[0].plan
    assert again == first


def test_static_remembers_its_plan_over_an_idle_slot() -> None:
    strategy = make_strategy("static")
    first = strategy.propose(demo_problem(SMALL), out_of_time=lambda: False)[0].plan
    idle = Plan(4, "1f1b")
    again = strategy.propose(demo_problem(SMALL, incumbent=idle), out_of_time=lambda: False)[0].plan
    assert again.groups == first.groups


def test_static_plans_anew_when_it_lost_a_device() -> None:
    strategy = make_strategy("static")
    first = strategy.propose(demo_problem(SMALL), out_of_time=lambda: False)[0].plan
    left = demo_cluster([d for d in SMALL.devices if d.device_id != "fast-0"])
    again = strategy.propose(demo_problem(left, incumbent=first), out_of_time=lambda: False)[0]
    assert "fast-0" not in again.plan.device_ids


def test_rebalanced_static_moves_samples_off_the_straggler_and_nothing_else() -> None:
    strategy = make_strategy("static-rebalanced")
    first = strategy.propose(demo_problem(), out_of_time=lambda: False)[0].plan
    slowed = demo_problem(demo_cluster(demo_devices(slowdowns={"fast-0": 2.5})), incumbent=first)
    again = strategy.propose(slowed, out_of_time=lambda: False)[0].plan
    assert [g.stages for g in again.groups] == [g.stages for g in first.groups]
    before = {g.device_ids: g.num_samples for g in first.groups}
    after = {g.device_ids: g.num_samples for g in again.groups}
    assert sum(after.values()) == 64
    slow = next(devices for devices in before if "fast-0" in devices)
    assert after[slow] < before[slow]


def test_do_nothing_only_idles() -> None:
    (only,) = proposed("do-nothing", demo_problem())
    assert only.plan.is_idle
