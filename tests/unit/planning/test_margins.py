from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.builders import (
    GIB,
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.budget import LimitOptions
from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.constraints import Row, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.margins import DeviceWorth, MarginalValues, marginal_values
from orchestrator.planning.waterfill import water_fill

SECONDS = {"fast": 0.01, "slow": 0.04}  # forward of a layer; a sample takes 12 times as long


def as_candidate(problem: PlanningProblem, plan: Plan) -> Candidate:
    cost = CostModel(problem)
    estimate = cost.evaluate(plan.groups, plan.schedule)
    return Candidate(plan, estimate, cost.score(estimate))


def pools(counts: dict[str, int], zones: dict[str, str] | None = None) -> list[Device]:
    zones = zones or {}
    return [
        make_device(f"{pool}-{i}", kind=pool, zone=zones.get(pool, "z1"))
        for pool, count in counts.items()
        for i in range(count)
    ]


def dealt(problem: PlanningProblem, devices: Sequence[Device]) -> Candidate:
    """Whole model on each device, shares by water-filling, times by the cost model."""
    period_s = [12 * SECONDS[d.kind] * d.slowdown for d in devices]
    counts = water_fill(period_s, period_s, problem.batch_samples)
    groups = [make_group([d], (0, 4), (1,) * int(n)) for d, n in zip(devices, counts, strict=True)]
    return as_candidate(problem, make_plan(*groups))


def a_problem(cluster: ClusterState, **rest: object) -> PlanningProblem:
    profile = make_profile({k: [s] * 4 for k, s in SECONDS.items()}, param_bytes=1e8)
    problem = make_problem(cluster, profile, batch_samples=2000)
    return replace(problem, **rest)  # type: ignore[arg-type]  # fields of the problem


def values_of(problem: PlanningProblem, candidate: Candidate, rows=()) -> MarginalValues:
    found = marginal_values(CostModel(problem), candidate, rows)
    assert found is not None
    return found


def worth(found: MarginalValues, pool: str) -> float:
    return {d.pool: d.samples_per_s for d in found.devices}[pool]


def test_one_more_like_device_is_worth_its_own_rate() -> None:
    devices = pools({"fast": 4})
    problem = a_problem(make_cluster(devices))
    found = values_of(problem, dealt(problem, devices))
    sync_share = 1e-2  # four sums of 400 MB each at 1 TB/s beside a step of 60 s: much less
    assert worth(found, "fast") == pytest.approx(1 / 0.12, rel=sync_share)


def test_the_first_device_of_a_pool_is_worth_what_it_would_be_if_it_stood_idle() -> None:
    devices, first = pools({"fast": 3}), pools({"slow": 1})
    there = a_problem(make_cluster([*devices, *first]))
    idle = worth(values_of(there, dealt(there, devices)), "slow")
    cluster = replace(there.cluster, devices=tuple(devices))
    problem = replace(there, cluster=cluster, rentable=tuple(first))
    assert worth(values_of(problem, dealt(problem, devices)), "slow") == pytest.approx(idle)
    unknown = replace(problem, rentable=())
    assert {d.pool for d in values_of(unknown, dealt(problem, devices)).devices} == {"fast"}


@pytest.mark.parametrize("estimated", [False, True])
def test_one_more_is_as_slow_as_its_kind_proved_only_where_its_times_are_guesses(
    estimated: bool,
) -> None:
    devices = [replace(device, slowdown=2.0) for device in pools({"slow": 2})]
    problem = a_problem(make_cluster(devices))
    times = tuple(replace(each, estimated=estimated) for each in problem.model.times)
    problem = replace(problem, model=replace(problem.model, times=times))
    found = worth(values_of(problem, dealt(problem, devices)), "slow")
    assert found == pytest.approx(1 / (12 * SECONDS["slow"]) / (1 + estimated), rel=1e-2)


@pytest.mark.parametrize("pool", ["fast", "slow"])
@pytest.mark.parametrize("bandwidth", [1e12, 2e8])
def test_worth_of_a_device_is_what_really_adding_it_brings(pool: str, bandwidth: float) -> None:
    devices = pools({"fast": 3, "slow": 5})
    problem = a_problem(make_cluster(devices, bandwidth_bytes_per_s=bandwidth))
    before = dealt(problem, devices)
    more = [*devices, make_device(f"{pool}-new", kind=pool, pool=pool)]
    bigger = replace(problem, cluster=make_cluster(more, bandwidth_bytes_per_s=bandwidth))
    gain = dealt(bigger, more).estimate.samples_per_s - before.estimate.samples_per_s
    assert worth(values_of(problem, before), pool) == pytest.approx(gain, rel=0.03)


def test_worth_counts_egress_at_the_price_of_money_and_the_price_of_the_device_not() -> None:
    devices = pools({"fast": 2}, {"slow": "z2"})
    far = pools({"slow": 2}, {"slow": "z2"})
    cluster = make_cluster([*devices, *far], egress_usd_per_byte=1e-11)
    problem = a_problem(cluster, penalty_weight=2.0, backlog_usd=2e3)
    before, after = dealt(problem, devices), dealt(problem, [*devices, far[0]])
    device_usd_per_s = cluster.price_usd_per_s("slow-0")
    gain = (after.score - before.score) / 2.0 + 1e3 * device_usd_per_s
    found = values_of(problem, before)
    assert worth(found, "slow") == pytest.approx(gain, rel=0.03)
    assert gain < 0.97 / 0.48  # some of its rate pays the egress
    slow = next(d for d in found.devices if d.pool == "slow")
    assert slow.break_even_usd_per_s == pytest.approx(slow.samples_per_s / 1e3)


def test_one_more_microbatch_of_a_lone_group_adds_what_really_adding_it_does() -> None:
    devices = pools({"fast": 1})
    profile = make_profile({"fast": [SECONDS["fast"]] * 4}, update_s=1.0)
    problem = make_problem(make_cluster(devices), profile, batch_samples=100)
    before = dealt(problem, devices)
    after = dealt(replace(problem, batch_samples=101), devices)
    gain = after.estimate.samples_per_s - before.estimate.samples_per_s
    assert gain > 0.01  # the updates of a step serve one sample more
    assert values_of(problem, before).microbatch_samples_per_s == pytest.approx(gain)


def test_one_more_microbatch_adds_nothing_where_memory_has_no_room_for_it() -> None:
    device = make_device("fast-0", memory_bytes=16 * GIB)  # a sample keeps 4 GiB of it
    profile = make_profile({"gpu": [0.01] * 4}, stash_bytes=GIB)
    problem = make_problem(make_cluster([device]), profile, batch_samples=3, schedules=("gpipe",))
    plan = make_plan(make_group([device], (0, 4), (1,) * 3), schedule="gpipe")
    assert values_of(problem, as_candidate(problem, plan)).microbatch_samples_per_s == 0.0


def test_device_that_only_slows_the_others_down_is_worth_nothing() -> None:
    devices = pools({"fast": 2, "slow": 1})
    cluster = make_cluster(devices, bandwidth_bytes_per_s=1e4)
    profile = make_profile({k: [s] * 4 for k, s in SECONDS.items()}, param_bytes=1e6)
    problem = make_problem(cluster, profile, batch_samples=8)
    single = as_candidate(problem, make_plan(make_group(devices[:1], (0, 4), (1,) * 8)))
    assert worth(values_of(problem, single), "slow") == 0.0


def test_money_that_is_not_short_gives_no_break_even_but_the_price_of_todays_samples() -> None:
    devices = pools({"fast": 4})
    problem = a_problem(make_cluster(devices, price_usd_per_s=1e-3))
    (fast,) = values_of(problem, dealt(problem, devices)).devices
    assert fast.break_even_usd_per_s is None
    # Four devices make four times the rate: one more is as dear a sample at the same price.
    assert fast.same_cost_usd_per_s == pytest.approx(1e-3, rel=0.02)


def test_model_too_large_for_one_device_makes_a_copy_of_the_group_shared_by_price() -> None:
    # 4 layers of 1 GB parameters with their Adam states: 16 GB, on devices of 12 GiB.
    devices = [
        make_device(f"{pool}-0", kind="gpu", memory_bytes=12 * GIB) for pool in ("dear", "cheap")
    ]
    cluster = make_cluster(devices, price_usd_per_s={"dear": 3e-3, "cheap": 1e-3})
    profile = make_profile(param_bytes=1e9)
    problem = make_problem(cluster, profile, batch_samples=2000)
    chain = make_plan(make_group(devices, (0, 2, 4), (1,) * 2000))
    before = as_candidate(problem, chain)
    twins = [
        make_device(f"{d.pool}-new", kind="gpu", pool=d.pool, memory_bytes=12 * GIB)
        for d in devices
    ]
    prices = {"dear": 3e-3, "cheap": 1e-3}
    bigger = replace(problem, cluster=make_cluster([*devices, *twins], price_usd_per_s=prices))
    both = make_plan(
        make_group(devices, (0, 2, 4), (1,) * 1000), make_group(twins, (0, 2, 4), (1,) * 1000)
    )
    after = as_candidate(bigger, both)
    gain = after.estimate.samples_per_s - before.estimate.samples_per_s
    found = values_of(problem, before)
    assert worth(found, "dear") + worth(found, "cheap") == pytest.approx(gain, rel=0.01)
    assert worth(found, "dear") == pytest.approx(3 * worth(found, "cheap"))


def test_pool_the_plan_does_not_use_is_worth_its_part_of_the_shortest_chain() -> None:
    small = [make_device(f"small-{i}", kind="gpu", memory_bytes=12 * GIB) for i in range(2)]
    large = make_device("large-0", kind="gpu", memory_bytes=64 * GIB)
    cluster = make_cluster([large, *small])
    problem = make_problem(cluster, make_profile(param_bytes=1e9), batch_samples=2000)
    before = as_candidate(problem, make_plan(make_group([large], (0, 4), (1,) * 2000)))
    groups = make_group([large], (0, 4), (1,) * 667), make_group(small, (0, 2, 4), (1,) * 1333)
    gain = as_candidate(problem, make_plan(*groups)).estimate.samples_per_s
    gain -= before.estimate.samples_per_s
    assert worth(values_of(problem, before), "small") == pytest.approx(gain / 2, rel=0.01)


def test_only_group_that_has_no_room_for_sums_is_lengthened_not_doubled() -> None:
    # 16 GB of state leave no room for 4 GB of packed gradients beside them.
    device = make_device("a-0", kind="gpu", memory_bytes=18 * GIB)
    problem = make_problem(make_cluster([device]), make_profile(param_bytes=1e9))
    single = as_candidate(problem, make_plan(make_group([device], (0, 4), (1,) * 8)))
    (found,) = values_of(problem, single).devices
    alone = as_candidate(problem, single.plan).estimate.samples_per_s
    halves = replace(problem, cluster=make_cluster([device, make_device("a-1", kind="gpu")]))
    both = [device, halves.cluster.devices[1]]
    chain = as_candidate(halves, make_plan(make_group(both, (0, 2, 4), (1,) * 8)))
    assert found.samples_per_s <= 1.2 * (chain.estimate.samples_per_s - alone)


@pytest.mark.parametrize("max_team", [1, 2])
def test_kind_measured_in_teams_only_is_added_as_a_team(max_team: int) -> None:
    devices = pools({"fast": 2})
    pair = [make_device(f"pair-{i}", kind="pair", node_id="pairs") for i in range(2)]
    base = make_profile({"fast": [0.01] * 4, "pair": [0.01] * 4}, param_bytes=1e6)
    times = tuple(replace(t, team_size=2) if t.kind == "pair" else t for t in base.times)
    sizes = (*base.sizes, replace(base.sizes[0], team_size=2))
    profile = replace(base, times=times, sizes=sizes)
    problem = make_problem(make_cluster([*devices, *pair]), profile, batch_samples=2000)
    found = values_of(replace(problem, max_team=max_team), dealt(problem, devices))
    worth_of = {d.pool: d.samples_per_s for d in found.devices}
    if max_team == 1:
        assert set(worth_of) == {"fast"}  # no worker could run it
    else:
        assert worth_of["pair"] == pytest.approx(worth_of["fast"] / 2, rel=1e-3)


def test_device_that_no_link_leads_to_has_no_worth() -> None:
    (device,) = pools({"fast": 1})
    problem = a_problem(make_cluster([device], links=()))
    assert values_of(problem, dealt(problem, [device])).devices == ()


def test_worth_of_a_microbatch_is_what_a_larger_batch_brings() -> None:
    devices = pools({"fast": 2})
    cluster = make_cluster(devices, bandwidth_bytes_per_s=1e8)  # a sum of 4 s a step
    rates = []
    for batch in (2000, 2002):
        problem = a_problem(cluster, batch_samples=batch, microbatch_samples=2)
        rates.append(dealt(problem, devices).estimate.samples_per_s)
    problem = a_problem(cluster, microbatch_samples=2)
    found = values_of(problem, dealt(problem, devices))
    assert found.microbatch_samples_per_s == pytest.approx(rates[1] - rates[0], rel=0.01)


def test_worth_of_a_dollar_of_a_limit_is_what_a_little_more_of_it_brings() -> None:
    devices = [make_device("a-0", zone="z1", kind="gpu"), make_device("b-0", zone="z2", kind="gpu")]
    fast = make_device("c-0", zone="z1", kind="gpu")
    cluster = make_cluster([*devices, fast], egress_usd_per_byte=1e-9)
    profile = make_profile(boundary_bytes=1e5)
    problem = make_problem(cluster, profile, batch_samples=2000)

    plan = make_plan(
        make_group(devices, (0, 2, 4), (1,) * 1000), make_group([fast], (0, 4), (1,) * 1000)
    )
    rows = make_rows([LimitOptions(egress=True, max_per_hour_usd=2e-3 * 3600)])
    ((row, price),) = values_of(problem, as_candidate(problem, plan), rows).limits
    assert row.name == "egress"
    # A sample in the chain pays 2e5 bytes x 1e-9 $: a dollar more is 5,000 samples more there.
    assert price == pytest.approx(5000.0, rel=0.05)


def test_share_that_binds_costs_what_a_little_more_of_it_costs() -> None:
    devices = pools({"fast": 1, "slow": 1})
    problem = a_problem(make_cluster(devices))
    rates, prices = [], []
    for share in (0.5, 0.505):
        rows = make_rows([LimitOptions(pool="slow", min_share=share)])
        counts = (round(2000 * (1 - share)), round(2000 * share))
        plan = make_plan(
            *(make_group([d], (0, 4), (1,) * n) for d, n in zip(devices, counts, strict=True))
        )
        candidate = as_candidate(problem, plan)
        rates.append(candidate.estimate.samples_per_s)
        ((row, price),) = values_of(problem, candidate, rows).limits
        assert row.name == "share slow"
        prices.append(price)
    slope = (rates[1] - rates[0]) / 0.005
    assert prices[0] < slope < prices[1] < 0  # convex: the price at either end brackets it


def test_values_have_names_and_units_of_the_users_files() -> None:
    """One second of the run billed as a minute: a dollar per second is 60 dollars per hour."""
    found = MarginalValues(
        price_of_money_samples_per_usd=120.0,
        microbatch_samples_per_s=0.5,
        devices=(
            DeviceWorth("a", 0.1, 6.0, break_even_usd_per_s=0.05, same_cost_usd_per_s=0.02),
            DeviceWorth("b", 0.1, 6.0, break_even_usd_per_s=None, same_cost_usd_per_s=0.02),
        ),
        limits=((Row("zone", "z2", 1.0), 30.0), (Row("share", "a", 0.5), -4.0)),
    )
    assert dict(found.named(60.0)) == pytest.approx(
        {
            "budget_samples_per_s": 2.0,
            "microbatch_samples_per_s": 0.5,
            "device_samples_per_s.a": 6.0,
            "device_break_even_per_hour_usd.a": 3.0,
            "device_same_cost_per_hour_usd.a": 1.2,
            "device_samples_per_s.b": 6.0,
            "device_same_cost_per_hour_usd.b": 1.2,
            "zone_samples_per_s.z2": 0.5,
            "share_samples_per_s.a": -0.04,
        }
    )
    dearer = found.at(240.0)
    assert [d.break_even_usd_per_s for d in dearer.devices] == [6.0 / 240.0] * 2


def test_limit_that_does_not_bind_has_no_price() -> None:
    devices = pools({"fast": 2})
    problem = a_problem(make_cluster(devices))
    rows = make_rows([LimitOptions(zone="z1", max_per_hour_usd=100.0)])
    assert values_of(problem, dealt(problem, devices), rows).limits == ()


def test_worth_does_not_depend_on_the_order_of_groups() -> None:
    devices = pools({"fast": 2, "slow": 3})
    problem = a_problem(make_cluster(devices))
    one = values_of(problem, dealt(problem, devices))
    other = values_of(problem, dealt(problem, devices[::-1]))
    for pool in ("fast", "slow"):
        assert worth(one, pool) == pytest.approx(worth(other, pool), rel=1e-6)
