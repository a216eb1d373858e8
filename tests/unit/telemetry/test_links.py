from collections.abc import Sequence
from math import inf

import pytest

from benchmarks.builders import make_cluster, make_device
from orchestrator.core.cluster import ClusterState, Link
from orchestrator.core.slot import StepReport, Transfer
from orchestrator.core.view import ZonePath
from orchestrator.telemetry.links import LEAST_STEP_SHARE, Links, zone_paths
from orchestrator.telemetry.trends import RETRY_SLOTS

MB = 1_000_000
DEVICES = [make_device(f"gpu-{i}", node_id=f"node-{i}") for i in range(4)]
CLUSTER = make_cluster(DEVICES, links=[Link("z1", "z1", 1e-3, 100.0 * MB, 1e-11)])
SAID_S = 0.01
"""Of a message of 1 MB."""


def sent(
    source: int, target: int, busy_s: Sequence[float], *, step_s: float = 1.0
) -> list[StepReport]:
    """Steps in each of which one MB took so long from one device to another."""
    return [
        StepReport(
            generation=1,
            step=step,
            device_id=f"gpu-{target}",
            group_index=0,
            num_samples=4,
            started_s=0.0,
            ended_s=step_s,
            step_s=step_s,
            compute_s=0.5,
            transfers=(Transfer(f"gpu-{source}", f"gpu-{target}", 4, 4 * MB, 4 * seconds),),
        )
        for step, seconds in enumerate(busy_s)
    ]


def new() -> Links:
    return Links(CLUSTER, (), 1.2)


def slow(links: Links) -> list[tuple[str, str]]:
    return [(a, b) for (a, b), trend in links.trends if trend.slots_slow]


def bandwidth(links: Links, source: int, target: int) -> float:
    cluster = ClusterState(0.0, CLUSTER.devices, links.links, CLUSTER.offers)
    return cluster.link(DEVICES[source], DEVICES[target]).bandwidth_bytes_per_s / MB


def test_links_that_are_as_described_stay_the_very_same() -> None:
    links = new()
    links.update(sent(0, 1, [1.05 * SAID_S] * 10), CLUSTER.devices)
    assert links.links is CLUSTER.links
    assert slow(links) == []


def test_a_slow_path_is_named_and_its_class_takes_the_median() -> None:
    links = new()
    links.update(sent(0, 1, [4 * SAID_S] * 10), CLUSTER.devices)
    assert slow(links) == [("node-0", "node-1")]
    assert bandwidth(links, 0, 1) == bandwidth(links, 2, 3) == pytest.approx(25.0, rel=0.03)
    (link,) = links.links
    assert (link.latency_s, link.egress_usd_per_byte) == (1e-3, 1e-11)


def test_one_slow_path_of_several_is_slow_by_itself_and_one_way() -> None:
    links = new()
    reports = sent(0, 1, [4 * SAID_S] * 10)
    for ends in ((1, 0), (1, 2), (2, 3)):
        reports += sent(*ends, [SAID_S] * 10)
    links.update(reports, CLUSTER.devices)
    assert slow(links) == [("node-0", "node-1")]
    assert bandwidth(links, 0, 1) == pytest.approx(25.0, rel=0.03)
    assert [bandwidth(links, *ends) for ends in ((1, 0), (1, 2), (3, 0))] == [100.0] * 3


def test_what_hardly_counts_in_a_step_is_not_called_slow() -> None:
    """A message of microseconds says nothing, however far from what was said it is."""
    links = new()
    late_s = 4 * 9 * SAID_S
    links.update(
        sent(0, 1, [10 * SAID_S] * 10, step_s=1.5 * late_s / LEAST_STEP_SHARE), CLUSTER.devices
    )
    assert slow(links) == []
    assert links.links is CLUSTER.links


def test_a_message_that_lay_in_a_buffer_makes_no_link_fast() -> None:
    links = new()
    links.update(sent(0, 1, [SAID_S / 50] * 10), CLUSTER.devices)
    assert links.links is CLUSTER.links


def test_a_path_that_recovers_is_believed_and_one_that_is_not_used_is_given_up() -> None:
    links = new()
    links.update(sent(0, 1, [4 * SAID_S] * 10), CLUSTER.devices)
    links.update(sent(0, 1, [SAID_S] * 10), CLUSTER.devices)
    assert links.links == CLUSTER.links
    links.update(sent(0, 1, [4 * SAID_S] * 10), CLUSTER.devices)
    for _ in range(RETRY_SLOTS):
        assert bandwidth(links, 0, 1) < 30.0
        links.update((), CLUSTER.devices)
    assert links.links == CLUSTER.links


def test_memory_makes_the_same_links_and_forgets_nodes_that_left() -> None:
    links = new()
    links.update(sent(0, 1, [4 * SAID_S] * 10), CLUSTER.devices)
    assert Links(CLUSTER, links.trends, 1.2).links == links.links
    links.update((), CLUSTER.devices[1:])
    assert links.trends == ()


def test_a_device_that_nobody_knows_any_more_is_no_evidence() -> None:
    links = new()
    links.update(sent(0, 1, [inf]), CLUSTER.devices[1:])
    assert links.trends == ()


def test_zones_are_joined_by_their_slowest_paths_between_present_devices() -> None:
    devices = [
        make_device("a-0", pool="a", node_id="n0", zone="east"),
        make_device("a-1", pool="a", node_id="n0", zone="east"),
        make_device("a-2", pool="a", node_id="n1", zone="east"),
        make_device("b-0", pool="b", node_id="n2", zone="west"),
    ]
    links = [
        Link("n0", "n0", 0.0, 900.0 * MB),  # inside a node: no zone is joined by it
        Link("a", "a", 1e-3, 100.0 * MB, points=((1000, 1.0 * MB), (MB, 80.0 * MB))),
        Link("east", "west", 0.02, 10.0 * MB),
        Link("west", "east", 0.03, 20.0 * MB),
        Link("n1", "n2", 0.01, 2.5 * MB),  # measured
        Link("gone", "n2", 0.5, 1.0),
        Link("west", "west", 0.0, 1.0),  # of one device
    ]
    assert zone_paths(make_cluster(devices, links=links)) == (
        ZonePath("east", "east", 80.0 * MB, 1e-3),
        ZonePath("east", "west", 2.5 * MB, 0.02),
        ZonePath("west", "east", 20.0 * MB, 0.03),
    )
    assert zone_paths(make_cluster(devices[:1], links=links)) == ()
    assert zone_paths(make_cluster(devices, links=links[:1])) == ()  # nobody described them


def test_devices_of_one_node_are_joined_inside_it() -> None:
    devices = [make_device(f"a-{i}", node_id="n0") for i in range(2)]
    links = [Link("n0", "n0", 0.0, 900.0 * MB), Link("z1", "z1", 1e-3, 100.0 * MB)]
    (path,) = zone_paths(make_cluster(devices, links=links))
    assert path == ZonePath("z1", "z1", 900.0 * MB, 0.0)
