"""Class level: the same plans as device by device, whatever the number of alike devices."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import GIB, make_cluster, make_device, make_problem
from orchestrator.core.cluster import ClusterState, Device, Link
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.search import Search
from orchestrator.planning.space import Trial
from orchestrator.planning.stock import make_mix
from orchestrator.planning.templates import ClassSpace, binned
from orchestrator.planning.trials import Evaluator

SIZES = {"big": (1, 2, 4), "small": (1, 2, 4)}


def fleet(nodes: tuple[int, int], *, prefix: str = "", node_size: int = 4) -> list[Device]:
    return [
        make_device(
            f"{prefix}{kind}-{n}.{i}",
            pool=kind,
            kind=kind,
            node_id=f"{prefix}{kind}-node{n}",
            zone=zone,
            memory_bytes=(16 if kind == "big" else 6) * GIB,
        )
        for kind, zone, count in (("big", "z1", nodes[0]), ("small", "z2", nodes[1]))
        for n in range(count)
        for i in range(node_size)
    ]


def cluster_of(devices: list[Device]) -> ClusterState:
    nodes = {d.node_id for d in devices}
    links = [Link(a, b, 1e-4, 2e9 if a == b else 5e8) for a, b in product(("z1", "z2"), repeat=2)]
    links += [Link(node, node, 1e-5, 1e11) for node in nodes]
    return make_cluster(devices, links=links, price_usd_per_s={"big": 1e-3, "small": 4e-4})


def profile(num_layers: int = 8) -> ModelProfile:
    times = [
        LayerTimes(kind, team, m, (t,) * num_layers, (2 * t,) * num_layers, (0.0,) * num_layers)
        for kind, slowness in (("big", 1.0), ("small", 3.0))
        for team in (1, 2, 4)
        for m in (1, 2)
        for t in [0.005 * slowness * m / team**0.8]
    ]
    sizes = [
        LayerSizes(q, (2e8 / q,) * num_layers, (4e6,) * num_layers, (6e7 / q,) * num_layers)
        for q in (1, 2, 4)
    ]
    return ModelProfile(
        model="m", dtype="fp32", layers=("l",) * num_layers, sizes=tuple(sizes), times=tuple(times)
    )


def problem_of(devices: list[Device], **rest: object) -> PlanningProblem:
    made = make_problem(cluster_of(devices), profile(), batch_samples=256, microbatch_samples=2)
    return replace(made, max_team=4, **rest)  # type: ignore[arg-type]


def evaluator(problem: PlanningProblem) -> Evaluator:
    problem = replace(problem, cluster=binned(problem.cluster))
    return Evaluator(problem, lambda p: ClassSpace(p.cluster, SIZES, p.batch_samples))


def best(problem: PlanningProblem, looks: int = 4000) -> Trial:
    left = iter(range(looks))
    found = Search(evaluator(problem), 1.0, 0.0, lambda: next(left, None) is None)
    return found.finalists((), 0, 4)[0]


@pytest.mark.parametrize(("nodes", "gain"), [((2, 2), 0.15), ((4, 1), 0.15), ((16, 8), 0.01)])
def test_a_mix_is_worth_what_its_groups_are_worth_one_by_one(
    nodes: tuple[int, int], gain: float
) -> None:
    """On few nodes groups share them and sum faster than a mix foresees, hardly ever slower."""
    problem = problem_of(fleet(nodes))
    space, cost = ClassSpace(problem.cluster, SIZES, problem.batch_samples), CostModel(problem)
    worker = evaluator(problem)
    rng = np.random.Generator(np.random.PCG64(0))
    state = next(iter(worker.space.seeds(worker.seconds_per_sample, worker.num_layers)))
    ratios: list[float] = []
    for _ in range(150):
        state = next(worker.space.near(state, 8, rng))
        for trial in worker.trials(state):
            groups = space.placed(trial, None)
            assert groups is not None
            whole = cost.evaluate(groups, trial.schedule)
            assert sum(g.num_samples for g in groups) == 256
            ratios.append(whole.step_s / trial.estimate.step_s)
            assert whole.cost_usd_per_s == pytest.approx(trial.estimate.cost_usd_per_s, rel=1e-6)
            assert cost.memory_error(groups, trial.schedule) is None
    assert len(ratios) > 30
    assert 1 - gain <= min(ratios)
    assert max(ratios) <= 1.12
    assert sum(ratio > 1.06 for ratio in ratios) <= 0.02 * len(ratios)


def test_every_device_is_placed_once_and_teams_stay_on_their_node() -> None:
    problem = problem_of(fleet((8, 8)))
    trial = best(problem)
    groups = trial.space.placed(trial, None)
    assert groups is not None
    used = Counter(d for group in groups for d in group.device_ids)
    assert max(used.values()) == 1
    for stage in (stage for group in groups for stage in group.stages):
        nodes = {problem.cluster.device(d).node_id for d in stage.team.device_ids}
        assert nodes == {stage.team.node_id}


def test_a_kept_plan_stays_on_its_devices() -> None:
    problem = problem_of(fleet((4, 4)))
    trial = best(problem)
    groups = trial.space.placed(trial, None)
    assert groups is not None
    shuffled = tuple(reversed(groups))
    plan = Plan(3, trial.schedule, shuffled)
    again = trial.space.placed(trial, plan)
    assert again is not None
    assert {tuple(s.team for s in g.stages) for g in again} == {
        tuple(s.team for s in g.stages) for g in groups
    }
    assert list(trial.space.of_plan(plan)) == [trial.state]


def test_a_device_that_came_back_on_another_node_is_in_no_team_of_its_old_one() -> None:
    devices = fleet((4, 4))
    problem = problem_of(devices)
    trial = best(problem, 300)
    plan = Plan(3, trial.schedule, trial.space.placed(trial, None) or ())
    node_of = {"big-0.0": "big-node1", "big-1.0": "big-node0"}
    moved = [replace(d, node_id=node_of.get(d.device_id, d.node_id)) for d in devices]
    later = problem_of(moved)
    trial = best(later, 300)
    for group in trial.space.placed(trial, plan) or ():
        for stage in group.stages:
            nodes = {later.cluster.device(d).node_id for d in stage.team.device_ids}
            assert nodes == {stage.team.node_id}


@settings(max_examples=5, deadline=None)
@given(st.randoms(use_true_random=False))
def test_plans_depend_on_neither_order_nor_names_of_many_devices(random: object) -> None:
    devices = fleet((3, 3))
    renamed = fleet((3, 3), prefix="x")
    random.shuffle(renamed)  # type: ignore[attr-defined]  # hypothesis gives a Random
    one, two = (best(problem_of(d), looks=600) for d in (devices, renamed))
    assert one.estimate.step_s == two.estimate.step_s
    assert one.state == two.state


def test_noise_of_a_percent_does_not_part_alike_devices() -> None:
    devices = [replace(d, slowdown=1 + 0.01 * (i % 3)) for i, d in enumerate(fleet((4, 0)))]
    space = ClassSpace(binned(cluster_of(devices)), SIZES, 99)
    assert len(space.stock.classes) == 1
    slow = [replace(d, slowdown=1.5 if i < 4 else 1.0) for i, d in enumerate(devices)]
    assert len(ClassSpace(binned(cluster_of(slow)), SIZES, 99).stock.classes) == 2


def test_more_alike_devices_are_never_worth_less() -> None:
    rates = [best(problem_of(fleet((n, n)))).estimate.samples_per_s for n in (1, 2, 4, 8)]
    assert rates == sorted(rates)


def test_a_zone_behind_a_thin_link_takes_nothing_from_the_others() -> None:
    """Most first guesses would sum gradients over that link, and all others are ranked lower."""
    zones = "abcdw"
    devices = [
        make_device(f"{z}-{n}.{i}", pool=z, kind="big", node_id=f"{z}{n}", zone=f"z{z}")
        for z in zones
        for n in range(4)
        for i in range(4)
    ]
    links = [
        Link(f"z{a}", f"z{b}", 1e-4, 2e8 if "w" in a + b and a != b else 3e9)
        for a, b in product(zones, repeat=2)
    ]
    links += [Link(f"{z}{n}", f"{z}{n}", 1e-5, 1e11) for z in zones for n in range(4)]

    def rate(some: list[Device]) -> float:
        cluster = make_cluster(some, links=links)
        problem = make_problem(cluster, profile(), batch_samples=256, microbatch_samples=2)
        return best(replace(problem, max_team=4), looks=1500).estimate.samples_per_s

    assert rate(devices) >= rate([d for d in devices if d.pool != "w"])


def test_a_mix_falls_into_the_kinds_of_its_templates_and_is_joined_from_them() -> None:
    space = evaluator(problem_of(fleet((2, 2)))).space
    big, small, both = (((0, 2), (0, 2)), 1), (((1, 1),), 3), (((0, 1), (1, 1)), 2)
    pure, mixed = make_mix(dict((big, small))), make_mix(dict((big, both)))
    parts = space.by_kind(pure)
    assert sorted(parts.values()) == [(big,), (small,)]
    assert space.joined(list(parts.values())) == pure
    assert list(space.by_kind(mixed).values()) == [(big,)]


def test_retimed_mix_equals_the_retimed_plan() -> None:
    problem = problem_of(fleet((4, 4)))
    trial = best(problem)
    groups = trial.space.placed(trial, None)
    assert groups is not None
    exact = retime(CostModel(problem), groups, trial.schedule)
    assert exact.step_s == pytest.approx(trial.estimate.step_s, rel=0.02)


def test_the_same_stages_of_several_groups_share_nodes_where_stages_are_apart() -> None:
    problem = problem_of(fleet((4, 1)))
    worker = evaluator(problem)
    apart = ((((0, -1), (0, -1), (0, -1), (0, -1)), 4),)
    (trial,) = worker.trials(apart)
    groups = trial.space.placed(trial, None)
    assert groups is not None
    for stages in zip(*(group.stages for group in groups), strict=True):
        assert len({stage.team.node_id for stage in stages}) == 1
    assert len({stage.team.node_id for stage in groups[0].stages}) == 4
    whole = CostModel(problem).evaluate(groups, trial.schedule)
    assert whole.sync_s == pytest.approx(trial.estimate.sync_s)
    (packed,) = worker.trials(((((0, 1),) * 4, 4),))
    assert trial.estimate.sync_s < packed.estimate.sync_s / 10  # over the links inside nodes
    assert list(trial.space.of_plan(Plan(0, "1f1b", groups))) == [apart]


def test_groups_are_formed_anew_from_whole_teams_when_devices_slow() -> None:
    """Two of four nodes each lose one device's speed: the rest makes up whole chains."""
    devices = fleet((4, 1))
    worker = evaluator(problem_of(devices))
    (trial, *_) = worker.trials(((((0, 2), (0, 2)), 4),))
    groups = trial.space.placed(trial, None)
    assert groups is not None
    slow = {"big-0.0", "big-1.0"}
    slowed = [replace(d, slowdown=2.0) if d.device_id in slow else d for d in devices]
    cluster = binned(cluster_of(slowed))
    space = ClassSpace(cluster, SIZES, 256)
    mixes = space.of_plan(Plan(0, "1f1b", groups))
    most = max(
        sum(count * sum(abs(size) for _, size in template) for template, count in mix)
        for mix in mixes
    )
    assert most == 12  # 8 on whole nodes, 2 on each broken one
