from dataclasses import replace
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.builders import make_cluster, make_device, make_group, make_plan
from orchestrator.core.cluster import ClusterState, Link
from orchestrator.planning.grouping import MAX_NEIGHBOURS, DeviceSpace
from orchestrator.planning.roster import Grouping, Roster, dealt_out
from tests.unit.planning.demo_cluster import demo_cluster, demo_devices


def test_devices_are_numbered_by_what_they_are_not_by_name_or_order() -> None:
    devices = demo_devices((1, 1, 1))
    renamed = [replace(d, device_id=f"x{9 - i}") for i, d in enumerate(devices)]
    for order in permutations(renamed):
        kinds = [d.kind for d in Roster(demo_cluster(list(order))).devices]
        assert kinds == [d.kind for d in Roster(demo_cluster(devices)).devices]


def test_alike_devices_of_a_node_and_alike_nodes_share_one_canonical_form() -> None:
    roster = Roster(demo_cluster())
    fast = [i for i, d in enumerate(roster.devices) if d.kind == "fast"]
    slow = [i for i, d in enumerate(roster.devices) if d.kind == "slow"]
    forms = {roster.canonical(((f, s),)) for f in fast for s in slow}
    assert len(forms) == 1


def test_two_devices_of_one_node_are_not_one_device_of_each_of_two() -> None:
    devices = [make_device(f"d-{i}", node_id=f"n{i // 2}") for i in range(4)]
    roster = Roster(make_cluster(devices))
    together, apart = roster.canonical(((0, 1),)), roster.canonical(((0, 2),))
    assert together != apart
    assert roster.canonical(((2, 3),)) == together
    assert roster.canonical(((3, 1),)) == apart


def test_nodes_behind_unlike_links_are_not_alike() -> None:
    devices = [make_device(f"d-{i}", node_id=f"n{i}") for i in range(3)]
    links = [Link("z1", "z1", 0.0, 1e9), Link("n0", "n1", 0.1, 1e6), Link("n1", "n0", 0.1, 1e6)]
    roster = Roster(make_cluster(devices, links=links))
    ids = {d.device_id: i for i, d in enumerate(roster.devices)}
    thin = roster.canonical(((ids["d-0"], ids["d-1"]),))
    assert roster.canonical(((ids["d-0"], ids["d-2"]),)) != thin
    assert roster.canonical(((ids["d-1"], ids["d-0"]),)) == thin  # n0 and n1 may be swapped


def test_slowed_device_is_no_longer_like_its_neighbour() -> None:
    roster = Roster(demo_cluster(demo_devices(slowdowns={"fast-0": 2.5})))
    first, second = (i for i, d in enumerate(roster.devices) if d.kind == "fast")
    assert roster.canonical(((first,),)) != roster.canonical(((second,),))


def test_the_others_stay_alike_whichever_device_of_a_pool_slows() -> None:
    devices = [make_device(f"d-{i}", node_id=f"n{i}") for i in range(5)]
    for slow in range(5):
        some = [replace(d, slowdown=2.0) if i == slow else d for i, d in enumerate(devices)]
        assert len(set(Roster(make_cluster(some)).node_class)) == 2


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_canonical_form_does_not_change_under_swaps_of_alike_devices(random: object) -> None:
    roster = Roster(demo_cluster())
    grouping = ((0, 2), (4,), (1, 3))
    canonical = roster.canonical(grouping)
    pairs = [(0, 1), (2, 3), (4, 5)]
    swap = {
        a: b
        for pair in pairs
        if random.random() < 0.5  # type: ignore[attr-defined]  # hypothesis gives a Random
        for a, b in (pair, pair[::-1])
    }
    assert roster.canonical(tuple(tuple(swap.get(d, d) for d in c) for c in grouping)) == canonical
    assert roster.canonical(canonical) == canonical


def test_neighbours_are_distinct_valid_and_close() -> None:
    roster = Roster(demo_cluster())
    start = roster.canonical(((0, 2), (4,)))
    near = list(DeviceSpace(roster).near(start, 10, np.random.Generator(np.random.PCG64(0))))
    assert start not in near
    assert len(set(near)) == len(near) <= MAX_NEIGHBOURS
    for grouping in near:
        used = [d for chain in grouping for d in chain]
        assert len(set(used)) == len(used)
        assert abs(len(used) - 3) <= 2


def test_every_grouping_can_be_reached_from_one_device() -> None:
    roster = Roster(demo_cluster(demo_devices((1, 1, 1))))
    reached = {roster.canonical(((0,),))}
    todo = list(reached)
    rng = np.random.Generator(np.random.PCG64(0))
    while todo:
        for grouping in DeviceSpace(roster).near(todo.pop(), 10, rng):
            if grouping not in reached:
                reached.add(grouping)
                todo.append(grouping)
    assert len(reached) == 3 * 1 + 3 * 3 + 1 * 13  # sets of chains of one, two and three devices


def test_chains_are_no_longer_than_the_model() -> None:
    roster = Roster(demo_cluster())
    rng = np.random.Generator(np.random.PCG64(0))
    near = DeviceSpace(roster).near(roster.canonical(((0, 1),)), 2, rng)
    assert max(len(chain) for grouping in near for chain in grouping) == 2


def test_seeds_hold_data_parallel_one_chain_and_single_devices() -> None:
    roster = Roster(demo_cluster())
    found = DeviceSpace(roster).seeds([1.0, 1.0, 3.0, 3.0, 4.5, 4.5], 6)
    sizes = [sorted(len(chain) for chain in grouping) for grouping in found]
    assert [1] * 6 in sizes
    assert [6] in sizes
    assert sizes.count([1]) == 3  # one of each class


def test_seeds_hold_chains_through_the_nodes_of_each_kind() -> None:
    """Gradient sums then stay inside the nodes, whatever slower devices there are beside."""
    devices = [
        make_device(f"{kind}-{n}.{i}", pool=kind, kind=kind, node_id=f"{kind}{n}")
        for kind in ("fast", "slow")
        for n in range(2)
        for i in range(2)
    ]
    roster = Roster(make_cluster(devices))
    seconds = [1.0 if d.kind == "fast" else 2.0 for d in roster.devices]
    found = DeviceSpace(roster).seeds(seconds, 8)
    for kind in ("fast", "slow"):
        first, second = ([roster.index_of(f"{kind}-{n}.{i}") for n in range(2)] for i in range(2))
        assert roster.canonical((tuple(first), tuple(second))) in found  # type: ignore[arg-type]


def test_a_grouping_falls_into_the_kinds_of_its_chains_and_is_joined_from_them() -> None:
    roster = Roster(demo_cluster())
    space = DeviceSpace(roster)
    of_kind: dict[str, list[int]] = {}
    for index, device in enumerate(roster.devices):
        of_kind.setdefault(device.kind, []).append(index)
    pure = [tuple(devices[:1]) for devices in of_kind.values()]
    state = roster.canonical(tuple(pure))
    parts = space.by_kind(state)
    assert set(parts) == set(of_kind)
    assert all(roster.devices[d].kind == kind for kind in parts for (d, *_) in parts[kind])
    assert space.joined(list(parts.values())) == state
    mixed = tuple(devices[-1] for devices in of_kind.values())
    assert space.by_kind(roster.canonical((*pure[:1], mixed))).keys() == {next(iter(of_kind))}


def test_alignment_leaves_layers_where_they_are() -> None:
    roster = Roster(demo_cluster())
    index = {d.device_id: i for i, d in enumerate(roster.devices)}
    wanted = [[(index["fast-0"], range(3)), (index["slow-0"], range(3, 10))]]
    target = roster.aligned(wanted, {"fast-1": (0, range(3)), "slow-1": (1, range(3, 10))})
    assert target == {index["fast-0"]: index["fast-1"], index["slow-0"]: index["slow-1"]}


def test_alignment_keeps_partners_together_where_layers_do_not_decide() -> None:
    roster = Roster(demo_cluster())
    index = {d.device_id: i for i, d in enumerate(roster.devices)}
    wanted = [
        [(index["fast-0"], range(5)), (index["mid-0"], range(5, 10))],
        [(index["fast-1"], range(5)), (index["mid-1"], range(5, 10))],
    ]
    held = {
        "fast-0": (0, range(5)), "mid-1": (0, range(5, 10)),
        "fast-1": (1, range(5)), "mid-0": (1, range(5, 10)),
    }  # fmt: skip
    target = roster.aligned(wanted, held)
    assert target[index["fast-0"]] == index["fast-0"]
    assert target[index["mid-0"]] == index["mid-1"]


def test_devices_of_one_node_stay_on_one_node() -> None:
    devices = [make_device(f"d-{i}", node_id=f"n{i // 2}") for i in range(4)]
    roster = Roster(make_cluster(devices))
    held = {roster.devices[2].device_id: (0, range(2)), roster.devices[1].device_id: (1, range(2))}
    target = roster.aligned([[(0, range(2)), (1, range(2, 4))]], held)
    assert set(target.values()) == {2, 3} or set(target.values()) == {0, 1}


def test_alignment_without_history_changes_nothing() -> None:
    roster = Roster(demo_cluster())
    assert roster.aligned([[(0, range(3)), (3, range(3, 10))]], {}) == {0: 0, 3: 3}


def test_plan_with_a_device_that_left_has_no_grouping() -> None:
    cluster = demo_cluster(demo_devices((1, 1, 0)))
    fast, mid = cluster.devices
    gone = make_device("gone-0")
    space = DeviceSpace(Roster(cluster))
    assert space.of_plan(make_plan(make_group([fast, mid], (0, 2, 4), (1,))))
    assert not space.of_plan(make_plan(make_group([fast, gone], (0, 2, 4), (1,))))


def test_many_nodes_are_numbered_quickly_and_exactly() -> None:
    devices = [make_device(f"d-{i}", node_id=f"n{i}") for i in range(32)]
    cluster: ClusterState = make_cluster(devices)
    roster = Roster(cluster)
    assert roster.canonical(((31,), (7,))) == ((0,), (1,))


# Teams ------------------------------------------------------------------------------


def quad(nodes: int = 1) -> Roster:
    """Nodes of four like devices that may form teams of two and four."""
    devices = [make_device(f"d-{i}", node_id=f"n{i // 4}") for i in range(4 * nodes)]
    return Roster(make_cluster(devices), {"gpu": (1, 2, 4)})


def test_teams_are_sets_of_like_devices_of_one_node() -> None:
    roster = quad(2)
    assert len(roster.members) == 8 + 2 * (6 + 1)
    assert all(len({roster.node_of[d] for d in members}) == 1 for members in roster.members)
    mixed = [make_device("a-0", kind="a", node_id="n"), make_device("b-0", kind="b", node_id="n")]
    assert len(Roster(make_cluster(mixed), {"a": (1, 2), "b": (1, 2)}).members) == 2


def test_teams_that_differ_by_a_swap_of_alike_devices_have_one_form() -> None:
    roster = quad(2)
    pairs = [t for t, members in enumerate(roster.members) if len(members) == 2]
    assert len({roster.canonical(((pair,),)) for pair in pairs}) == 1
    two = {
        roster.canonical(((a, b),))
        for a in pairs
        for b in pairs
        if not set(roster.members[a]) & set(roster.members[b])
    }
    assert len(two) == 2  # on one node, or on two


def test_every_team_can_be_reached_and_none_shares_a_device() -> None:
    space = DeviceSpace(quad())
    start: Grouping = ((0,),)
    todo, reached = [start], {start}
    rng = np.random.Generator(np.random.PCG64(0))
    while todo:
        for near in space.near(todo.pop(), 4, rng):
            used = space.roster.devices_of(near)
            assert len(used) == len(set(used))
            if near not in reached:
                reached.add(near)
                todo.append(near)
    sizes = {
        tuple(sorted(len(space.roster.members[t]) for chain in state for t in chain))
        for state in reached
    }
    assert {(4,), (2, 2), (1, 1, 2), (2,), (1, 1, 1, 1)} <= sizes


def test_hands_are_dealt_to_and_fro() -> None:
    assert dealt_out([0, 1, 2, 3, 4, 5, 6], 3) == [(0, 5, 6), (1, 4), (2, 3)]
