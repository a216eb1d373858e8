from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile
from orchestrator.core.cluster import Device, Link, make_team
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning import groups as groups_module
from orchestrator.planning.cost import CostModel
from orchestrator.planning.grouping import DeviceSpace
from orchestrator.planning.roster import Roster
from orchestrator.planning.search import Search
from orchestrator.planning.space import Space, Trial
from orchestrator.planning.templates import ClassSpace
from orchestrator.planning.trials import Evaluator
from orchestrator.planning.waterfill import as_microbatches
from tests.unit.planning.demo_cluster import (
    demo_cluster,
    demo_devices,
    demo_problem,
    demo_profile,
)

GIB = 2**30


def evaluator(problem: PlanningProblem) -> Evaluator:
    return Evaluator(problem, lambda p: DeviceSpace(Roster(p.cluster)))


def search(problem: PlanningProblem, seed: int = 0) -> tuple[Search, list[Trial]]:
    found = Search(
        evaluator(problem), problem.penalty_weight, problem.backlog_usd, out_of_time=lambda: False
    )
    return found, found.run((), seed)


# Exhaustive reference ----------------------------------------------------------------


def chain_sets(devices: tuple[Device, ...]) -> Iterator[tuple[tuple[Device, ...], ...]]:
    """All sets of disjoint chains, the empty one included."""
    if not devices:
        yield ()
        return
    first, others = devices[0], devices[1:]
    yield from chain_sets(others)
    for count in range(len(others) + 1):
        for mates in combinations(others, count):
            left = tuple(d for d in others if d not in mates)
            for chain in permutations((first, *mates)):
                for rest in chain_sets(left):
                    yield (chain, *rest)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def all_stages(problem: PlanningProblem, chain: Sequence[Device]) -> list[tuple[Stage, ...]]:
    num_layers = problem.model.num_layers
    return [
        tuple(
            Stage(make_team([d]), first, end)
            for d, (first, end) in zip(chain, pairwise((0, *cuts, num_layers)), strict=True)
        )
        for cuts in combinations(range(1, num_layers), len(chain) - 1)
    ]


def best_of_all(problem: PlanningProblem) -> tuple[float, float]:
    """Best J over all groupings, cuts, microbatch sizes and shares, idle included; and its rate."""
    cost, batch = CostModel(problem), problem.batch_samples
    sizes = [size for size in (1, 2, 4) if size <= problem.microbatch_samples]
    best = (0.0, 0.0)
    for chains in chain_sets(problem.cluster.devices):
        if not chains:
            continue
        every = [all_stages(problem, chain) for chain in chains]
        for shares, stages_G in product(compositions(batch, len(chains)), product(*every)):
            for size_G in product(sizes, repeat=len(chains)):
                groups = tuple(
                    Group(
                        cost.with_inflight(
                            stages, size, -(-batch // size), "1f1b", replicated=len(chains) > 1
                        ),
                        as_microbatches(share, size),
                    )
                    for stages, size, share in zip(stages_G, size_G, shares, strict=True)
                )
                if cost.memory_error(groups, "1f1b") is None:
                    estimate = cost.evaluate(groups, "1f1b")
                    best = max(best, (cost.score(estimate), estimate.samples_per_s))
    return best


def random_problem(
    seed: int, *, devices: int, layers: int, batch: int, microbatch: int, money: float = 0.0
) -> PlanningProblem:
    """Unlike devices in two zones, uneven layers, thin or thick links between the zones."""
    rng = np.random.default_rng(seed)
    members = []
    for i in range(devices):
        kind, zone = f"k{rng.integers(3)}", f"z{rng.integers(2)}"
        members.append(
            make_device(
                f"{kind}{zone}-{i}",
                kind=kind,
                zone=zone,
                node_id=f"{zone}n{rng.integers(2)}",
                slowdown=float(rng.choice([1, 1, 1, 2])),
                memory_bytes=int(rng.choice([16, 16, 1])) * GIB,
            )
        )
    latency_s, rate = 10 ** rng.uniform(-5, -2.5), 10 ** rng.uniform(6.5, 9)
    links = [
        Link(a, b, latency_s, rate, 1e-9) if a != b else Link(a, b, latency_s / 10, 10 * rate)
        for a, b in product(("z0", "z1"), repeat=2)
    ]
    prices = {d.pool: rng.uniform(0.3, 4) / 3600 for d in members}
    weights, overhead = rng.uniform(0.3, 1.5, layers), rng.choice([0, 0.2, 0.5])
    times = [
        LayerTimes(kind, 1, size, forward_s, tuple(2 * t for t in forward_s), (0.0,) * layers)
        for kind, slowness in (("k0", 1.0), ("k1", 3.0), ("k2", 4.5))
        for size in (1, 2, 4)
        for forward_s in [
            tuple(0.01 * slowness * w * (overhead + (1 - overhead) * size) for w in weights)
        ]
    ]
    sizes = LayerSizes(
        1,
        tuple(rng.uniform(1e5, 4e6, layers)),
        tuple(rng.uniform(1e3, 1e5, layers)),
        tuple(rng.uniform(1e5, 3e7, layers)),
    )
    model = ModelProfile(
        model="random", dtype="fp32", layers=tuple(map(str, range(layers))), sizes=(sizes,),
        times=tuple(times), step_overhead_s=0.005,
    )  # fmt: skip
    return make_problem(
        make_cluster(members, price_usd_per_s=prices, links=links),
        model,
        batch_samples=batch,
        microbatch_samples=microbatch,
        backlog_usd=money,
    )


def gaps(problems: Sequence[PlanningProblem]) -> list[float]:
    """What the search misses of the best J, over the best plan's samples/s."""
    found = []
    for problem in problems:
        runner, trials = search(problem)
        best, rate = best_of_all(problem)
        reached = max(0.0, *(runner.score(t) for t in trials[:1]))
        found.append((best - reached) / rate if rate else 0.0)
    return found


def test_three_devices_come_within_a_thousandth_of_exhaustive_search() -> None:
    problems = [
        random_problem(seed, devices=3, layers=4, batch=8, microbatch=2, money=money)
        for seed in range(4)
        for money in (0.0, 2000.0)
    ]
    found = gaps(problems)
    assert np.mean(found) <= 1e-3
    assert max(found) <= 0.02


def test_four_devices_come_within_a_thousandth_of_exhaustive_search() -> None:
    found = gaps(
        [
            random_problem(seed, devices=4, layers=4, batch=8, microbatch=2, money=money)
            for seed, money in ((20, 0.0), (21, 1000.0))
        ]
    )
    assert np.mean(found) <= 1e-3
    assert max(found) <= 0.02


def test_part_of_the_demo_cluster_is_planned_as_well_as_by_exhaustive_search() -> None:
    cluster = demo_cluster(demo_devices((1, 1, 1)))
    problem = demo_problem(cluster, batch_samples=16)
    assert gaps([problem]) == [pytest.approx(0.0, abs=1e-9)]


# What it promises --------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)))
def test_plan_depends_on_neither_order_nor_names_of_devices(seed: int, order: list[int]) -> None:
    problem = random_problem(seed, devices=4, layers=4, batch=12, microbatch=2)
    devices = problem.cluster.devices
    renamed = tuple(
        replace(devices[i], device_id=f"other{rank}", node_id=f"on-{devices[i].node_id}")
        for rank, i in enumerate(order)
    )
    shuffled = replace(problem, cluster=replace(problem.cluster, devices=renamed))
    (one, first), (two, second) = search(problem), search(shuffled)
    assert one.score(first[0]) == two.score(second[0])
    assert [t.state for t in first] == [t.state for t in second]


def test_same_seed_gives_the_same_plans() -> None:
    problem = demo_problem()
    (_, first), (_, second) = search(problem, seed=3), search(problem, seed=3)
    assert first == second


def test_what_a_search_has_seen_is_no_worse_at_another_price_of_money() -> None:
    problem = random_problem(5, devices=4, layers=6, batch=16, microbatch=2)
    known = evaluator(problem)
    for backlog_usd in (0.0, 40.0, 300.0, 5.0):
        priced = Search(known, problem.penalty_weight, backlog_usd, lambda: False)
        best = max(map(priced.score, priced.run((), problem.seed)))
        assert best >= max(map(priced.score, known.polished.values())) - 1e-9


def test_a_state_hopes_for_what_whole_pipelines_of_like_devices_and_layers_do() -> None:
    devices = [make_device(f"d-{i}") for i in range(4)]
    problem = make_problem(make_cluster(devices), make_profile({"gpu": [0.1] * 8}))
    known = evaluator(problem)
    for state in known.space.seeds(known.seconds_per_sample, known.num_layers):
        hoped = known.hoped_samples_per_s(state)
        assert hoped <= known.most_samples_per_s(state)
        assert hoped == pytest.approx(problem.batch_samples / known.least_s(state), rel=0.03)


def test_evaluator_of_an_earlier_slot_changes_nothing() -> None:
    cheap, dear = demo_problem(), demo_problem(backlog_usd=30.0)
    used = evaluator(cheap)
    Search(used, 1.0, 0.0, lambda: False).run((), 0)
    assert used.serves(dear)
    again = Search(used, 1.0, 30.0, lambda: False).run((), 0)
    assert again == search(dear)[1]


def test_what_is_kept_of_teams_when_one_device_slows_changes_no_plan() -> None:
    before, slowed = (
        demo_problem(),
        demo_problem(demo_cluster(demo_devices(slowdowns={"fast-0": 2.5}))),
    )
    used = evaluator(before)
    Search(used, 1.0, 0.0, lambda: False).run((), 0)
    later = Evaluator(slowed, lambda p: DeviceSpace(Roster(p.cluster)), used)
    again = Search(later, 1.0, 0.0, lambda: False).run((), 0)
    fresh = search(slowed)[1]
    assert [(t.state, t.groups, t.estimate) for t in again] == [
        (t.state, t.groups, t.estimate) for t in fresh
    ]


def test_what_is_kept_of_teams_is_not_used_for_smaller_microbatches() -> None:
    large = demo_problem()
    small = replace(large, microbatch_samples=2)
    used = evaluator(large)
    Search(used, 1.0, 0.0, lambda: False).run((), 0)
    later = Evaluator(small, lambda p: DeviceSpace(Roster(p.cluster)), used)
    trials = Search(later, 1.0, 0.0, lambda: False).run((), 0)
    assert max(m for t in trials for group in t.groups for m in group.microbatches) <= 2
    assert trials[0].estimate == search(small)[1][0].estimate


def test_what_piles_up_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    used = evaluator(demo_problem())
    Search(used, 1.0, 0.0, lambda: False).run((), 0)
    slowed = demo_problem(demo_cluster(demo_devices(slowdowns={"fast-0": 2.5})))
    assert used.cost.following(slowed) is not None
    monkeypatch.setattr(groups_module, "MAX_FOLLOWED", 10)
    assert used.cost.following(slowed) is None


def test_evaluator_does_not_serve_another_state_of_the_cluster() -> None:
    slowed = demo_cluster(demo_devices(slowdowns={"fast-0": 2.5}))
    assert not evaluator(demo_problem()).serves(demo_problem(slowed))


def by_class(problem: PlanningProblem) -> Space:
    return ClassSpace(problem.cluster, {}, problem.batch_samples)


def by_device(problem: PlanningProblem) -> Space:
    return DeviceSpace(Roster(problem.cluster))


@pytest.mark.parametrize("make_space", [by_class, by_device])
def test_what_was_found_while_other_devices_were_held_serves_no_more(
    make_space: Callable[[PlanningProblem], Space],
) -> None:
    """As many are held, so that classes keep their sizes and their first devices."""
    used: Evaluator | None = None
    for held in ({0, 2}, {0, 4}):
        devices = [
            replace(
                make_device(f"d-{i}", node_id=f"n{i}"),
                surcharge_usd_per_s=-0.5e-3 if i in held else 0.0,
            )
            for i in range(6)
        ]
        problem = make_problem(make_cluster(devices))
        used = (used and used.repriced(problem)) or Evaluator(problem, make_space)
        backlog_usd = 1 / used.seconds_per_sample[0] / 0.9e-3  # only what is held is worth it
        search = Search(used, 1.0, backlog_usd, lambda: False)
        trial = max(search.run((), 0), key=search.score)
        groups = trial.space.placed(trial, None) or ()
        assert {d for group in groups for d in group.device_ids} == {f"d-{i}" for i in held}


def test_slow_devices_behind_a_thin_link_help_where_small_microbatches_are_free() -> None:
    _, trials = search(demo_problem(profile=demo_profile(call_share=0.0)))
    best = trials[0]
    assert sorted(d for chain in best.state for d in chain) == list(range(6))
    # the six devices together do 124.4 samples/s, and the update takes 0.03 s
    assert 64 / 124.4 + 0.03 < best.estimate.step_s < 0.6


def test_slow_devices_behind_a_thin_link_stay_idle_where_they_would_only_delay() -> None:
    _, trials = search(demo_problem(profile=demo_profile(call_share=0.2)))
    # 6, 6, 2 and 2 microbatches end together: 6 x 0.1 s, sums and update
    assert [g.num_samples for g in trials[0].groups] == [24, 24, 8, 8]
    assert trials[0].estimate.step_s == pytest.approx(0.6 + 0.03, abs=0.002)


def test_dear_money_leaves_dear_devices_idle() -> None:
    problem = demo_problem(backlog_usd=1000.0)
    _, trials = search(problem)
    kinds = {evaluator(problem).space.teams[t].kind for c in trials[0].state for t in c}
    assert "fast" not in kinds


def test_search_stops_when_told_and_returns_the_best_so_far() -> None:
    looks = 0

    def out_of_time() -> bool:
        nonlocal looks
        looks += 1
        return looks > 20

    problem = demo_problem()
    runner = Search(evaluator(problem), 1.0, 0.0, out_of_time)
    trials = runner.run((), 0)
    assert trials
    assert looks < 200


def test_polish_stops_amid_its_variations_when_told() -> None:
    """At a thousand devices the variations of one trial take seconds."""
    problem = demo_problem()
    used, polished = evaluator(problem), search(problem)[1][0]
    trial = used.trials(polished.state)[0]

    def asked(most: float) -> int:
        count = 0

        def out_of_time() -> bool:
            nonlocal count
            count += 1
            return count > most

        Search(used, 1.0, 0.0, out_of_time).polish(trial, used.estimate)
        return count

    assert asked(inf) > 8
    assert asked(2) == 3


def test_model_that_fits_nowhere_has_no_trial() -> None:
    tiny = [replace(d, memory_bytes=1000) for d in demo_devices()]
    assert search(demo_problem(demo_cluster(tiny)))[1] == []


def test_model_that_fits_no_single_device_is_spread() -> None:
    # 2 MB of parameters need 8 MB of state; with stash no device of 8 MB holds them all
    small = [replace(d, memory_bytes=8_000_000) for d in demo_devices()]
    _, trials = search(demo_problem(demo_cluster(small)))
    assert trials
    assert all(len(chain) > 1 for chain in trials[0].state)


def test_a_state_in_which_all_is_idle_makes_no_plan() -> None:
    assert evaluator(demo_problem()).trials(()) == ()
