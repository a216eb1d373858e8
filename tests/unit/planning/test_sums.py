"""Gradient sums of teams: what shares a link, and what meets a team of another size."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.builders import make_cluster, make_device, make_profile
from orchestrator.core.cluster import ClusterState, Link, make_team
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Stage
from orchestrator.planning import sums
from orchestrator.planning.sums import GradientSums, alone
from orchestrator.planning.tables import LayerTables

GRADIENT_BYTES = 8e9
INSIDE_BYTES_PER_S, BETWEEN_BYTES_PER_S = 100e9, 4e9


def _profile() -> ModelProfile:
    base = make_profile({"gpu": [1.0]}, param_bytes=GRADIENT_BYTES)
    (sizes,), (times,) = base.sizes, base.times
    halves = tuple(b / 2 for b in sizes.param_bytes)
    return replace(
        base,
        sizes=(sizes, replace(sizes, team_size=2, param_bytes=halves)),
        times=(times, replace(times, team_size=2)),
    )


def _cluster(num_nodes: int, each: int) -> ClusterState:
    devices = [
        make_device(f"d-{n * each + i}", node_id=f"n{n}")
        for n in range(num_nodes)
        for i in range(each)
    ]
    links = [Link(f"n{n}", f"n{n}", 0.0, INSIDE_BYTES_PER_S) for n in range(num_nodes)]
    return make_cluster(devices, links=[*links, Link("z1", "z1", 0.0, BETWEEN_BYTES_PER_S)])


def _sum_s(cluster: ClusterState, *teams: tuple[int, ...]) -> float:
    groups = [
        Group((Stage(make_team(cluster.device(f"d-{i}") for i in team), 0, 1),), (1,))
        for team in teams
    ]
    seconds, _ = GradientSums(LayerTables(_profile()), cluster).together(groups)
    return seconds


def test_members_of_a_team_share_the_link_to_another_node() -> None:
    cluster = _cluster(num_nodes=2, each=2)
    one_each = _sum_s(cluster, (0,), (2,))
    assert one_each == pytest.approx(2 * 1 / 2 * GRADIENT_BYTES / BETWEEN_BYTES_PER_S)
    assert _sum_s(cluster, (0, 1), (2, 3)) == pytest.approx(one_each)


def test_members_of_a_team_have_a_link_each_inside_their_node() -> None:
    cluster = _cluster(num_nodes=1, each=4)
    assert _sum_s(cluster, (0, 1), (2, 3)) == pytest.approx(_sum_s(cluster, (0,), (2,)) / 2)


def test_teams_of_unlike_sizes_exchange_their_parts_inside_the_node_first() -> None:
    cluster = _cluster(num_nodes=2, each=2)
    exchange_s = 1 / 2 * GRADIENT_BYTES / INSIDE_BYTES_PER_S
    assert _sum_s(cluster, (0, 1), (2,)) == pytest.approx(_sum_s(cluster, (0,), (2,)) + exchange_s)


def test_sums_that_are_forgotten_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are kept by identity: that of a forgotten one may come again."""
    monkeypatch.setattr(sums, "MAX_KEPT", 3)
    cluster, tables = _cluster(num_nodes=3, each=2), LayerTables(_profile())
    groups = [Group((Stage(make_team([device]), 0, 1),), (1,)) for device in cluster.devices]
    alike = [alone(group.stages) for group in groups]
    rng = np.random.default_rng(0)
    kept = GradientSums(tables, cluster)
    for _ in range(300):
        some = rng.choice(6, rng.integers(2, 5), replace=False)
        asked = [groups[d] for d in some], [alike[d] for d in some]
        assert kept.together(*asked) == GradientSums(tables, cluster).together(*asked)
