"""Ray nodes become priced devices."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.control.backend import ClusterOptions, OfferOptions
from orchestrator.control.scaling import AutoscalerOptions
from orchestrator.errors import ConfigError
from orchestrator.runtime.inventory import (
    Numbering,
    Product,
    found_nodes,
    number_nodes,
    price_nodes,
    unlabelled_gpus,
)


def ray_node(
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, float] | None = None,
    alive: bool = True,
) -> dict[str, object]:
    """A dictionary as ``ray.nodes()`` returns it, as far as we read it."""
    return {
        "NodeID": f"id-{name}",
        "NodeName": name,
        "Alive": alive,
        "Labels": {"ray.io/node-id": f"id-{name}", **(labels or {})},
        "Resources": {"CPU": 8.0, "node:10.0.0.1": 1.0, **(resources or {})},
    }


def offers(*pools: tuple[str, str]) -> ClusterOptions:
    return ClusterOptions(
        source="ray",
        offers=tuple(OfferOptions(pool=p, kind=k, price_per_hour=1.0, zone="zz") for p, k in pools),
    )


def test_a_node_without_devices_is_passed_over() -> None:
    nodes = [ray_node("head"), ray_node("gone", labels={"lyray.kind": "t4"}, alive=False)]
    assert found_nodes(nodes) == ()


def test_gpus_are_devices_of_the_kind_that_ray_reports() -> None:
    (node,) = found_nodes([ray_node("a", resources={"GPU": 4.0, "accelerator_type:V100": 1.0})])
    assert (node.kind, node.pool, node.num_devices, node.num_gpus) == ("v100-16", None, 4, 4)


def test_the_longer_accelerator_type_says_more() -> None:
    resources = {"GPU": 1.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    (node,) = found_nodes([ray_node("a", resources=resources)])
    assert node.kind == "a100-80"


def gpus(*names: str, gib: float = 79.1) -> tuple[Product, ...]:
    return tuple(Product(name, round(gib * 2**30)) for name in names)


def test_what_the_driver_says_counts_more_than_the_accelerator_type() -> None:
    nodes = [ray_node("a", resources={"GPU": 2.0, "accelerator_type:H100": 1.0})]
    told = {"id-a": gpus("NVIDIA H100 PCIe", "NVIDIA H100 PCIe")}
    assert [n.kind for n in found_nodes(nodes, products=told)] == ["h100-pcie"]
    assert [n.kind for n in found_nodes(nodes, products={"id-a": ()})] == ["h100-sxm"]


def test_a_node_is_there_once_its_driver_has_answered() -> None:
    nodes = [ray_node("a", resources={"GPU": 1.0, "accelerator_type:T4": 1.0})]
    assert found_nodes(nodes, products={"id-a": None}) == ()


def test_a_product_that_is_not_in_the_catalogue_is_named_with_the_label_to_set() -> None:
    nodes = [ray_node("odd", resources={"GPU": 1.0})]
    with pytest.raises(
        ConfigError,
        match=r"node odd has a 'NVIDIA H100 NVL'.*--labels lyray.kind=KIND.*speed_ratio",
    ):
        found_nodes(nodes, products={"id-odd": gpus("NVIDIA H100 NVL")})


def test_unlike_gpus_of_one_node_are_refused_by_name() -> None:
    nodes = [ray_node("mix", resources={"GPU": 2.0})]
    with pytest.raises(ConfigError, match=r"node mix has unlike GPUs \(NVIDIA L4, Tesla T4\)"):
        found_nodes(nodes, products={"id-mix": gpus("Tesla T4", "NVIDIA L4")})


def test_only_living_nodes_with_gpus_and_without_a_label_are_asked_for_them() -> None:
    nodes = [
        ray_node("a", resources={"GPU": 4.0}),
        ray_node("b", resources={"GPU": 1.0}, labels={"lyray.kind": "t4"}),
        ray_node("c", resources={"GPU": 1.0}, alive=False),
        ray_node("d"),
    ]
    assert unlabelled_gpus(nodes) == {"id-a": 4}


def test_a_label_wins_over_the_accelerator_type() -> None:
    resources = {"GPU": 2.0, "accelerator_type:T4": 1.0}
    (node,) = found_nodes([ray_node("a", labels={"lyray.kind": "tuned-t4"}, resources=resources)])
    assert node.kind == "tuned-t4"


def test_a_labelled_node_without_gpus_has_as_many_devices_as_its_resource_says() -> None:
    labels = {"lyray.kind": "cpu", "lyray.pool": "p"}
    nodes = [ray_node("a", labels=labels), ray_node("b", labels=labels, resources={"lyray": 3.0})]
    assert [n.num_devices for n in found_nodes(nodes)] == [1, 3]


def test_devices_share_the_processors_of_their_own_node() -> None:
    labels = {"lyray.kind": "cpu", "lyray.pool": "p"}
    nodes = [
        ray_node("a", labels=labels, resources={"CPU": 8.0, "lyray": 3.0}),
        ray_node("b", labels=labels, resources={"CPU": 2.0, "lyray": 3.0}),
        ray_node("c", resources={"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0}),
    ]
    assert [n.num_threads for n in found_nodes(nodes)] == [4, 2, 1]


def test_gpus_of_unknown_type_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Ray node odd has 2 GPUs of unknown type.*lyray\.kind"):
        found_nodes([ray_node("odd", resources={"GPU": 2.0})])


def test_a_node_that_joins_with_gpus_of_unknown_type_is_refused_and_the_others_are_found() -> None:
    refused = list[str]()
    nodes = [ray_node("odd", resources={"GPU": 2.0}), ray_node("a", labels={"lyray.kind": "t4"})]
    (found,) = found_nodes(nodes, refused.append)
    assert found.name == "a"
    assert [reason.partition(" of unknown")[0] for reason in refused] == ["Ray node odd has 2 GPUs"]


def test_devices_are_numbered_within_their_pool_and_know_their_node() -> None:
    found = found_nodes(
        [
            ray_node("b", resources={"GPU": 2.0, "accelerator_type:T4": 1.0}),
            ray_node("a", resources={"GPU": 2.0, "accelerator_type:T4": 1.0}),
            ray_node("c", resources={"GPU": 1.0, "accelerator_type:V100": 1.0}),
        ]
    )
    options, devices = price_nodes(found, offers(("fast", "v100-16"), ("slow", "t4")))
    assert [(d.device_id, d.ray_node_id, d.node_id) for d in devices] == [
        ("fast-0", "id-c", "fast-node0"),
        ("slow-0", "id-a", "slow-node0"),
        ("slow-1", "id-a", "slow-node0"),
        ("slow-2", "id-b", "slow-node1"),
        ("slow-3", "id-b", "slow-node1"),
    ]
    assert [(o.pool, o.count, o.devices_per_node) for o in options.offers] == [
        ("fast", 1, 1),
        ("slow", 4, 2),
    ]


def test_nodes_keep_their_names_and_one_that_comes_takes_the_lowest_free_place() -> None:
    def nodes(*names: str) -> list[dict[str, object]]:
        return [ray_node(n, labels={"lyray.kind": "t4"}, resources={"lyray": 2.0}) for n in names]

    numbering, refused = Numbering(), list[str]()
    options, _ = price_nodes(found_nodes(nodes("a", "b")), offers(("slow", "t4")), numbering)
    later = found_nodes([*nodes("0", "b", "c"), ray_node("odd", labels={"lyray.kind": "v100"})])
    devices = number_nodes(later, options, numbering, refused.append)
    assert {d.ray_node_id: d.node_id for d in devices} == {
        "id-b": "slow-node1",
        "id-0": "slow-node0",
        "id-c": "slow-node2",
    }
    assert [d.device_id for d in devices] == [f"slow-{i}" for i in range(6)]
    assert refused == [
        "Ray node odd has 1 device(s) of kind 'v100' without a price; "
        "add an entry for it to cluster.offers"
    ]


def test_a_device_without_a_price_is_refused_and_what_is_usual_is_only_said() -> None:
    found = found_nodes([ray_node("a", labels={"lyray.kind": "a100-40"})])
    usual = r"cluster\.offers \(usual: \$1\.48/h on demand at Lambda \(2026-05-07\); "
    with pytest.raises(ConfigError, match=usual):
        price_nodes(found, offers(("slow", "t4")))


def test_a_node_of_another_size_is_left_alone_while_a_run_goes_on() -> None:
    numbering, refused = Numbering(), list[str]()
    small = ray_node("a", labels={"lyray.kind": "t4"})
    options, _ = price_nodes(found_nodes([small]), offers(("slow", "t4")), numbering)
    large = ray_node("b", labels={"lyray.kind": "t4"}, resources={"lyray": 4.0})
    devices = number_nodes(found_nodes([small, large]), options, numbering, refused.append)
    assert [d.device_id for d in devices] == ["slow-0"]
    assert refused == ["Ray node b has 4 devices, the others of pool 'slow' have 1"]


def test_an_offer_that_nobody_fills_is_left_out() -> None:
    found = found_nodes([ray_node("a", labels={"lyray.kind": "t4"})])
    options, _ = price_nodes(found, offers(("fast", "v100-16"), ("slow", "t4")))
    assert [o.pool for o in options.offers] == ["slow"]


def test_an_offer_whose_first_device_can_be_asked_for_stays() -> None:
    known, numbering = offers(("fast", "v100-16"), ("slow", "t4")), Numbering()
    known = replace(
        known,
        autoscaler=AutoscalerOptions(enabled=True),
        offers=(replace(known.offers[0], max_count=2, devices_per_node=2), known.offers[1]),
    )
    found = [ray_node("a", labels={"lyray.kind": "t4"})]
    options, devices = price_nodes(found_nodes(found), known, numbering)
    assert [(o.pool, o.count) for o in options.offers] == [("fast", 0), ("slow", 1)]
    assert [d.pool for d in devices] == ["slow"]
    refused: list[str] = []
    found.append(ray_node("b", labels={"lyray.kind": "v100-16"}))
    number_nodes(found_nodes(found), options, numbering, refused.append)
    assert refused == [
        "Ray node b has 1 devices; write that as devices_per_node of pool 'fast', where it is 2"
    ]


def test_the_zone_label_places_a_pool() -> None:
    found = found_nodes([ray_node("a", labels={"lyray.kind": "t4", "lyray.zone": "eu"})])
    options, _ = price_nodes(found, offers(("slow", "t4")))
    assert options.offers[0].zone == "eu"


@pytest.mark.parametrize(
    ("labels", "pools", "message"),
    [
        ({"lyray.kind": "t4"}, [("fast", "v100-16")], "Ray node a has 1 .* kind 't4' without a"),
        (
            {"lyray.kind": "t4", "lyray.pool": "x"},
            [("slow", "t4")],
            "Ray node a .* pool 'x' without a price; add an entry for it to cluster.offers",
        ),
        ({"lyray.kind": "t4"}, [("p", "t4"), ("q", "t4")], "fits the pools 'p', 'q'; say which"),
        (
            {"lyray.kind": "t4", "lyray.pool": "p"},
            [("p", "l4")],
            "says kind 't4', but cluster.offers prices pool 'p' as kind 'l4'",
        ),
    ],
)
def test_a_device_without_one_clear_price_is_an_error_that_names_its_node(
    labels: dict[str, str], pools: list[tuple[str, str]], message: str
) -> None:
    found = found_nodes([ray_node("a", labels=labels)])
    with pytest.raises(ConfigError, match=message):
        price_nodes(found, offers(*pools))


def test_nodes_of_unlike_size_do_not_share_a_pool() -> None:
    labels = {"lyray.kind": "cpu", "lyray.pool": "p"}
    nodes = [ray_node("a", labels=labels), ray_node("b", labels=labels, resources={"lyray": 3.0})]
    with pytest.raises(ConfigError, match=r"nodes of pool 'p' have \[1, 3\] devices"):
        price_nodes(found_nodes(nodes), offers(("p", "cpu")))


def test_a_cluster_without_devices_says_how_to_label_them() -> None:
    with pytest.raises(ConfigError, match=r"no Ray node has GPUs or a label lyray\.kind"):
        price_nodes((), offers(("p", "cpu")))


def test_a_custom_resource_names_pool_and_number_and_the_offer_the_kind() -> None:
    """Where node types cannot have labels, and what Ray's autoscaler can be asked for."""
    nodes = [
        ray_node("a", resources={"lyray.pool.small": 2.0}),
        ray_node("b", labels={"lyray.kind": "a100-40"}),
        ray_node("c"),
    ]
    found = found_nodes(nodes)
    assert [(n.name, n.pool, n.kind, n.num_devices) for n in found] == [
        ("b", None, "a100-40", 1),
        ("a", "small", None, 2),
    ]
    options, devices = price_nodes(found, offers(("big", "a100-40"), ("small", "t4")))
    assert [(offer.pool, offer.kind, offer.count) for offer in options.offers] == [
        ("big", "a100-40", 1),
        ("small", "t4", 2),
    ]
    assert [(d.device_id, d.num_threads, d.resource) for d in devices] == [
        ("big-0", 8, None),
        ("small-0", 4, "lyray.pool.small"),
        ("small-1", 4, "lyray.pool.small"),
    ]


def test_gpus_of_a_pool_named_by_a_resource_need_no_other_name() -> None:
    named = ray_node("a", resources={"GPU": 2.0, "lyray.pool.small": 2.0})
    (found,) = found_nodes([named])
    assert (found.kind, found.num_devices, found.num_gpus) == (None, 2, 2)
    typed = ray_node("b", resources={"GPU": 1, "lyray.pool.small": 1, "accelerator_type:V100": 1})
    with pytest.raises(ConfigError, match=r"says kind 'v100-16', but cluster\.offers prices pool"):
        price_nodes(found_nodes([typed]), offers(("small", "t4")))


@pytest.mark.parametrize(
    ("labels", "resources", "message"),
    [
        ({"lyray.pool": "big"}, {"lyray.pool.small": 1.0}, r"several pools \(big, small\)"),
        ({}, {"lyray.pool.a": 1.0, "lyray.pool.b": 1.0}, r"several pools \(a, b\)"),
        ({}, {"lyray.pool.a": 1.0, "GPU": 4.0}, r"4 GPUs and 1 of its resource lyray\.pool\.a"),
    ],
)
def test_resources_that_contradict_are_refused(
    labels: dict[str, str], resources: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        found_nodes([ray_node("a", labels=labels, resources=resources)])
