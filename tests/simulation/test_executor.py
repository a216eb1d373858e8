from dataclasses import replace

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
from orchestrator.core.cluster import Link, make_team
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.simulation.executor import run_step


def test_equal_stages_take_the_textbook_time() -> None:
    """(M + S - 1) (f + b) on free links, with f = 20 ms and b = 40 ms a stage."""
    devices = [make_device(f"gpu-{i}") for i in range(4)]
    model = make_profile({"gpu": [0.02] * 4})
    cost = CostModel(make_problem(make_cluster(devices), model, batch_samples=8))
    ran = run_step(cost, make_plan(make_group(devices, [0, 1, 2, 3, 4], [1] * 8)))
    assert ran.step_s == pytest.approx((8 + 4 - 1) * 0.06, rel=1e-9)


def test_unequal_stages_take_the_time_worked_out_by_hand() -> None:
    """Four stages of 20/10/30/15 ms forward, twice that backward, M = 8: 825 ms."""
    devices = [make_device(f"gpu-{i}") for i in range(4)]
    model = make_profile({"gpu": [0.02, 0.01, 0.03, 0.015]})
    cost = CostModel(make_problem(make_cluster(devices), model, batch_samples=8))
    ran = run_step(cost, make_plan(make_group(devices, [0, 1, 2, 3, 4], [1] * 8)))
    assert ran.group_s == (pytest.approx(0.825, rel=1e-9),)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_on_idle_links_it_equals_the_event_evaluation(data: st.DataObject) -> None:
    num_layers = 6
    layer_s = st.floats(1e-3, 5e-2)
    forward = {
        kind: data.draw(st.lists(layer_s, min_size=num_layers, max_size=num_layers))
        for kind in ("fast", "slow")
    }
    model = make_profile(
        forward, microbatches=(1, 2, 3), boundary_bytes=1e6, param_bytes=2e6, update_s=1e-3
    )
    groups = []
    devices = []
    for g in range(data.draw(st.integers(1, 3))):
        cuts = sorted(data.draw(st.sets(st.integers(1, num_layers - 1), max_size=4)))
        mine = [
            make_device(
                f"d{g}-{s}",
                kind=data.draw(st.sampled_from(["fast", "slow"])),
                slowdown=data.draw(st.sampled_from([1.0, 2.5])),
            )
            for s in range(len(cuts) + 1)
        ]
        devices += mine
        sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        groups.append(make_group(mine, [0, *cuts, num_layers], sizes))
    cluster = make_cluster(devices, latency_s=2e-3, bandwidth_bytes_per_s=1e8)
    cost = CostModel(make_problem(cluster, model, batch_samples=sum(g.num_samples for g in groups)))
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe"]))
    ran = run_step(cost, make_plan(*groups, schedule=schedule))
    timed = retime(cost, groups, schedule)
    assert ran.step_s == pytest.approx(timed.step_s, rel=1e-9)
    assert ran.group_s == pytest.approx(timed.group_s, rel=1e-9)


def test_groups_that_share_a_path_between_zones_take_longer_than_on_idle_links() -> None:
    upper = [make_device(f"a-{i}") for i in range(2)]
    lower = [make_device(f"b-{i}", zone="z2") for i in range(2)]
    slow = [Link(a, b, 1e-3, 1e7) for a in ("z1", "z2") for b in ("z1", "z2") if a != b]
    inside = [Link(z, z, 1e-3, 1e10) for z in ("z1", "z2")]
    cluster = make_cluster([*upper, *lower], links=[*slow, *inside])
    model = make_profile(boundary_bytes=1e6)
    cost = CostModel(make_problem(cluster, model))
    groups = [make_group([a, b], [0, 2, 4], [1] * 4) for a, b in zip(upper, lower, strict=True)]
    alone = run_step(cost, make_plan(groups[0])).group_s[0]
    assert alone == pytest.approx(retime(cost, groups[:1], "1f1b").group_s[0], rel=1e-9)
    assert max(run_step(cost, make_plan(*groups)).group_s) > 1.2 * alone


def test_the_two_directions_of_a_path_do_not_queue_for_each_other() -> None:
    """One pipeline whose outputs and gradients cross the same border: still the event time."""
    a, b = make_device("a-0"), make_device("b-0", zone="z2")
    cluster = make_cluster([a, b], bandwidth_bytes_per_s=2e7)
    cost = CostModel(make_problem(cluster, make_profile(boundary_bytes=1e6)))
    group = make_group([a, b], [0, 2, 4], [1] * 8)
    ran = run_step(cost, make_plan(group))
    assert ran.group_s[0] == pytest.approx(retime(cost, [group], "1f1b").group_s[0], rel=1e-9)


def test_teams_take_what_the_event_evaluation_says() -> None:
    """Two stages on teams of two that halve the work, and gradient sums beside the pipelines."""
    devices = [make_device(f"gpu-{i}", node_id=f"node-{i // 2}") for i in range(4)]
    model = with_teams(make_profile({"gpu": [0.02] * 4}))
    problem = replace(make_problem(make_cluster(devices), model), max_team=2)
    teams = [make_team(devices[:2]), make_team(devices[2:])]
    chain = Group((Stage(teams[0], 0, 2, inflight=2), Stage(teams[1], 2, 4, inflight=1)), (1,) * 8)
    both = tuple(Group((Stage(team, 0, 4, inflight=1),), (1,) * 4) for team in teams)
    for overlap in (False, True):
        cost = CostModel(replace(problem, overlap=overlap))
        for groups in ((chain,), both):
            ran = run_step(cost, make_plan(*groups))
            assert ran.step_s == pytest.approx(retime(cost, groups, "1f1b").step_s, rel=1e-9)
    ran = run_step(CostModel(problem), make_plan(chain))
    assert ran.step_s == pytest.approx((8 + 2 - 1) * 0.06, rel=1e-9)  # 2 layers x 60 ms / 2
    assert dict(ran.compute_s).keys() == {d.device_id for d in devices}


def with_teams(model: ModelProfile) -> ModelProfile:
    """Teams of two that take half the time and hold half the parameters."""
    sizes, times = model.sizes[0], model.times
    halves = tuple(size / 2 for size in sizes.param_bytes)
    return replace(
        model,
        sizes=(sizes, replace(sizes, team_size=2, param_bytes=halves)),
        times=(*times, *(replace(t.scaled(0.5), team_size=2) for t in times)),
    )
