"""Link rules: which one joins two devices, and what is said when none does."""

import re

import pytest

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.backend import LinkOptions
from orchestrator.control.links import build_links
from orchestrator.core.cluster import ClusterState, Device
from orchestrator.errors import ConfigError


def _pool(pool: str, zone: str = "z1") -> list[Device]:
    """Three devices, the first two of them on one node."""
    return [
        make_device(f"{pool}-{i}", pool=pool, node_id=f"{pool}-node{i // 2}", zone=zone)
        for i in range(3)
    ]


def _rule(gbytes_per_s: float, **place: object) -> LinkOptions:
    return LinkOptions(bandwidth_gbytes_per_s=gbytes_per_s, **place)  # type: ignore[arg-type]


def _joined(*rules: LinkOptions, pools: tuple[list[Device], ...]) -> ClusterState:
    devices = [device for pool in pools for device in pool]
    return make_cluster(devices, links=build_links(devices, rules))


def _gbytes_per_s(cluster: ClusterState, source: str, target: str) -> float:
    return cluster.link(cluster.device(source), cluster.device(target)).bandwidth_bytes_per_s / 1e9


GENERAL = (_rule(50, within="node"), _rule(3, within="zone"))
PAIR = (_pool("a"), _pool("b"))


def test_a_rule_that_names_a_pool_wins_inside_its_nodes_and_between_them() -> None:
    own = (_rule(200, within="node", pool="a"), _rule(12, within="zone", pool="a"))
    for rules in ((*own, *GENERAL), (*GENERAL, *own)):
        cluster = _joined(*rules, pools=PAIR)
        assert _gbytes_per_s(cluster, "a-0", "a-1") == 200
        assert _gbytes_per_s(cluster, "a-0", "a-2") == 12
        assert _gbytes_per_s(cluster, "b-0", "b-1") == 50
        assert _gbytes_per_s(cluster, "b-0", "b-2") == 3
        assert _gbytes_per_s(cluster, "a-0", "b-0") == 3


def test_a_rule_between_pools_wins_over_that_of_their_zone_both_ways() -> None:
    cluster = _joined(*GENERAL, _rule(1, between=("a", "b")), pools=PAIR)
    assert _gbytes_per_s(cluster, "a-0", "b-2") == 1
    assert _gbytes_per_s(cluster, "b-2", "a-0") == 1
    assert _gbytes_per_s(cluster, "a-0", "a-2") == 3


def test_a_rule_between_pools_wins_over_that_of_their_zones() -> None:
    rules = (*GENERAL, _rule(0.1, between=("z1", "z2")), _rule(0.5, between=("b", "a")))
    cluster = _joined(*rules, pools=(_pool("a"), _pool("b", "z2"), _pool("c", "z2")))
    assert _gbytes_per_s(cluster, "a-0", "b-0") == 0.5
    assert _gbytes_per_s(cluster, "a-0", "c-0") == 0.1


def test_pools_that_are_joined_pair_by_pair_need_no_rule_of_their_zone() -> None:
    rules = (
        _rule(50, within="node"),
        _rule(9, within="zone", pool="a"),
        _rule(8, within="zone", pool="b"),
        _rule(7, between=("a", "b")),
    )
    cluster = _joined(*rules, pools=PAIR)
    assert _gbytes_per_s(cluster, "b-0", "b-2") == 8


def test_a_pool_of_its_zones_name_is_joined_as_its_zone_is() -> None:
    pools = (_pool("z1", "z1"), _pool("spot", "z1"), _pool("z2", "z2"))
    cluster = _joined(*GENERAL, _rule(0.1, between=("z1", "z2")), pools=pools)
    assert _gbytes_per_s(cluster, "z1-0", "z1-2") == 3
    assert _gbytes_per_s(cluster, "z1-0", "spot-0") == 3
    assert _gbytes_per_s(cluster, "spot-0", "z2-0") == 0.1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            (_rule(50, within="node"), _rule(9, within="zone", pool="a")),
            "links inside zone 'z1'; add {within: zone, latency_s: ..., "
            "bandwidth_gbytes_per_s: ...} (or with pool: b)",
        ),
        (
            (
                _rule(50, within="node"),
                _rule(9, within="zone", pool="a"),
                _rule(9, within="zone", pool="b"),
            ),
            "links inside zone 'z1' from pool 'a' to 'b'; add {between: [a, b]",
        ),
    ],
)
def test_pools_that_no_rule_joins_are_named_with_the_mend(
    rules: tuple[LinkOptions, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        _joined(*rules, pools=PAIR)


def test_a_path_that_nobody_described_is_named_with_both_ends_and_the_mend() -> None:
    cluster = make_cluster([*PAIR[0], *_pool("c", "z2")], links=())
    ends = [cluster.device("a-0"), cluster.device("c-0")]
    wanted = (
        "no link from 'a-0' (node a-node0, pool a, zone z1) to 'c-0' (node c-node0, pool c, zone "
        "z2); add one of {between: [a, c], ...} and {between: [z1, z2], ...} to cluster.links"
    )
    with pytest.raises(ValueError, match=re.escape(wanted)):
        cluster.link(*ends)
