from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_problem,
    make_profile,
    team_of,
)
from orchestrator.core.cluster import Link
from orchestrator.core.plan import Group, Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.partition import THETAS, busiest_s, cut_options, partition


def cuts_of(stages):
    return (0, *(stage.end_layer for stage in stages))


def chain(devices, profile, **problem):
    cost = CostModel(make_problem(make_cluster(devices), profile, **problem))
    return cost, tuple(team_of(d) for d in devices)


def test_like_devices_get_like_shares_of_like_layers():
    devices = [make_device(f"d-{i}") for i in range(3)]
    cost, teams = chain(devices, make_profile({"gpu": [0.1] * 9}))
    assert cuts_of(partition(cost, teams, 1, "1f1b")[0]) == (0, 3, 6, 9)


def test_a_device_half_as_fast_gets_half_the_layers():
    devices = [make_device("a-0"), make_device("b-0", slowdown=2.0)]
    cost, teams = chain(devices, make_profile({"gpu": [0.1] * 9}))
    assert cuts_of(partition(cost, teams, 1, "1f1b")[0]) == (0, 6, 9)


def test_a_cut_avoids_the_wide_boundary():
    devices = [make_device(f"d-{i}") for i in range(2)]
    profile = make_profile({"gpu": [0.1] * 4}, boundary_bytes=[1e3, 1e9, 1e3, 0])
    problem = make_problem(make_cluster(devices, bandwidth_bytes_per_s=1e9), profile)
    options = partition(CostModel(problem), tuple(team_of(d) for d in devices), 1, "1f1b")
    assert cuts_of(options[0]) in {(0, 1, 4), (0, 3, 4)}


def test_memory_decides_where_the_large_layers_go():
    devices = [make_device("a-0", memory_bytes=10**8), make_device("b-0", memory_bytes=10**10)]
    profile = make_profile({"gpu": [0.1] * 4}, param_bytes=[1e6, 1e6, 1e9, 1e6])
    cost, teams = chain(devices, profile)
    assert {cuts_of(stages)[1] for stages in partition(cost, teams, 1, "1f1b")} <= {1, 2}


def test_nothing_is_returned_when_no_cut_fits_or_layers_are_fewer_than_stages():
    devices = [make_device(f"d-{i}", memory_bytes=10**6) for i in range(2)]
    cost, teams = chain(devices, make_profile(num_layers=4))
    assert partition(cost, teams, 1, "1f1b") == ()
    assert busiest_s(cost, teams, 1) == inf
    roomy = [make_device(f"d-{i}") for i in range(5)]
    cost, teams = chain(roomy, make_profile(num_layers=4))
    assert partition(cost, teams, 1, "1f1b") == ()
    assert busiest_s(cost, teams, 1) == inf


def test_what_fits_only_with_fewer_microbatches_in_flight_is_still_offered():
    devices = [make_device(f"d-{i}", memory_bytes=10**9) for i in range(2)]
    profile = make_profile(num_layers=2, param_bytes=0.0, stash_bytes=5e8)
    cost, teams = chain(devices, profile)
    (stages,) = partition(cost, teams, 1, "1f1b")
    assert [stage.inflight for stage in stages] == [1, 1]
    assert cost.curve(stages, 1, "1f1b").max_microbatches == cost.problem.batch_samples
    assert cost.memory_error((Group(stages, (1,) * cost.problem.batch_samples),)) is None


@pytest.mark.parametrize("seed", range(20))
def test_first_option_has_the_shortest_possible_busiest_stage(seed):
    rng = np.random.default_rng(seed)
    count, num_layers = int(rng.integers(2, 5)), int(rng.integers(5, 9))
    devices = [make_device(f"d-{i}", slowdown=rng.uniform(1, 4)) for i in range(count)]
    cost, teams = chain(devices, make_profile({"gpu": list(rng.uniform(0.1, 1, num_layers))}))

    def busiest(cuts):
        return max(
            sum(cost.stage_seconds(team, a, b, 1))
            for team, (a, b) in zip(teams, pairwise(cuts), strict=True)
        )

    best = min(
        busiest((0, *inner, num_layers)) for inner in combinations(range(1, num_layers), count - 1)
    )
    options = partition(cost, teams, 1, "1f1b")
    assert min(busiest(cuts_of(o)) for o in options) == pytest.approx(best, rel=1e-9)
    assert busiest_s(cost, teams, 1) == pytest.approx(best, rel=1e-9)
    assert 1 <= len(options) <= 7


def test_options_trade_period_against_fill_and_drain():
    devices = [make_device("a-0"), make_device("b-0", slowdown=3.0)]
    cost, teams = chain(devices, make_profile({"gpu": [0.1] * 12}))
    curves = [cost.curve(o, 1, "1f1b") for o in partition(cost, teams, 1, "1f1b")]
    assert len(curves) > 1
    for a, b in pairwise(curves):
        assert a.period_s < b.period_s
        assert a.fill_drain_s > b.fill_drain_s


def test_cuts_do_not_depend_on_the_names_of_devices():
    profile = make_profile({"gpu": [0.1, 0.3, 0.2, 0.4, 0.1]})
    names = [["a-0", "b-0"], ["z-7", "c-1"]]
    found = []
    for pair in names:
        devices = [make_device(pair[0]), make_device(pair[1], slowdown=1.5)]
        cost, teams = chain(devices, profile)
        found.append([cuts_of(o) for o in partition(cost, teams, 1, "1f1b")])
    assert found[0] == found[1]


def test_a_cost_model_that_follows_another_cuts_over_devices_that_joined():
    devices = [make_device(f"d-{i}") for i in range(3)]
    profile = make_profile({"gpu": [0.1] * 9})
    before = CostModel(make_problem(make_cluster(devices[:2]), profile))
    partition(before, tuple(team_of(d) for d in devices[:2]), 1, "1f1b")
    after = before.following(make_problem(make_cluster(devices), profile))
    assert after is not None
    assert cuts_of(partition(after, tuple(map(team_of, devices)), 1, "1f1b")[0]) == (0, 3, 6, 9)


def random_chain(rng, num_stages, num_layers):
    """Unlike devices in two zones, layers, links and, often, too little memory for some cuts."""
    devices = [
        make_device(
            f"d-{i}",
            slowdown=rng.uniform(1, 3),
            zone=f"z{i % 2}",
            memory_bytes=int(rng.choice([1e10, 2e8]) * rng.uniform(0.5, 1)),
        )
        for i in range(num_stages)
    ]
    profile = make_profile(
        {"gpu": list(rng.uniform(0.1, 1, num_layers))},
        param_bytes=list(rng.uniform(1e6, 2e7, num_layers)),
        boundary_bytes=list(10 ** rng.uniform(5, 8, num_layers)),
        stash_bytes=list(10 ** rng.uniform(5, 7, num_layers)),
    )
    links = [
        Link(a, b, 0.01, 1e9 if a == b else 1e8, 0.0 if a == b else 1e-11)
        for a in ("z0", "z1")
        for b in ("z0", "z1")
    ]
    problem = make_problem(make_cluster(devices, links=links), profile)
    return CostModel(problem), tuple(team_of(d) for d in devices)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(10))
def test_no_option_is_worse_than_another_in_the_figures_of_the_cost_model(seed, schedule):
    rng = np.random.default_rng(seed)
    cost, teams = random_chain(rng, int(rng.integers(2, 7)), 14)
    figures = []
    for cuts, period_s, fill_drain_s in cut_options(cost, teams, 1, schedule):
        plain = tuple(
            Stage(team, first, end, inflight=len(teams) - s)
            for s, (team, (first, end)) in enumerate(zip(teams, pairwise(cuts), strict=True))
        )
        curve = cost.curve(plain, 1, schedule)
        assert period_s <= curve.period_s * (1 + 1e-9)
        assert fill_drain_s == pytest.approx(curve.fill_drain_s)
        figures.append((curve.period_s, curve.fill_drain_s, cost.egress_usd(plain, 1)))
    for a, b in pairwise(figures):
        assert a[0] <= b[0] * (1 + 1e-12)
    for a in figures:
        assert not any(all(y < x * (1 - 1e-9) for x, y in zip(a, b, strict=True)) for b in figures)


NUM_LAYERS = 8


def rated(cost, teams, cuts):
    """Longest stage or message, and total, of one microbatch; None where it does not fit."""
    longest_s = total_s = 0.0
    for s, (team, (first, end)) in enumerate(zip(teams, pairwise(cuts), strict=True)):
        ways = [Stage(team, first, end), Stage(team, first, end, recompute=True)]
        fitting = [w for w in ways if cost.memory.max_held(w, 1) >= len(teams) - s]
        if not fitting:
            return None
        work_s = sum(cost.seconds_of(fitting[0], 1))
        longest_s, total_s = max(longest_s, work_s), total_s + work_s
        if end < NUM_LAYERS:
            size = cost.tables.boundary_bytes(end - 1, 1)
            for link in (cost.link(team, teams[s + 1]), cost.link(teams[s + 1], team)):
                longest_s = max(longest_s, link.occupied_s(size))
                total_s += link.transfer_s(size)
    return longest_s, total_s


@pytest.mark.parametrize("seed", range(12))
def test_every_limit_on_the_longest_stage_gives_the_least_total_time(seed):
    rng, every = np.random.default_rng(seed), []
    while not every:  # until something fits
        cost, teams = random_chain(rng, int(rng.integers(2, 5)), NUM_LAYERS)
        cuts = combinations(range(1, NUM_LAYERS), len(teams) - 1)
        every = [found for c in cuts if (found := rated(cost, teams, (0, *c, NUM_LAYERS)))]
    offered = [rated(cost, teams, c) for c, _, _ in cut_options(cost, teams, 1, "1f1b")]
    options = [one for one in offered if one]  # others let fewer be in flight
    for theta in THETAS:
        limit_s = min(every)[0] * theta * (1 + 1e-9)
        least_s = min(total for longest, total in every if longest <= limit_s)
        found_s = min(total for longest, total in options if longest <= limit_s)
        assert found_s == pytest.approx(least_s, rel=1e-9)
