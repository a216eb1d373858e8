from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from orchestrator.planning.packing import assign, num_nodes, spread


def filled(sizes: list[int], node_size: int) -> int:
    """First fit decreasing, node by node: the oracle of ``num_nodes``."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        for n in sorted(range(len(rooms)), key=lambda n: rooms[n]):
            if rooms[n] >= size:
                rooms[n] -= size
                break
        else:
            rooms.append(node_size - size)
    return len(rooms)


@pytest.mark.parametrize("seed", range(40))
def test_nodes_counted_at_once_are_those_of_parts_placed_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    node_size = int(rng.choice([1, 2, 4, 8]))
    powers = [s for s in (1, 2, 4, 8) if s <= node_size]
    sizes = [int(s) for s in rng.choice(powers, rng.integers(1, 60))]
    assert num_nodes(Counter(sizes), node_size) == -(-sum(sizes) // node_size)
    assert num_nodes(Counter(sizes), node_size) == filled(sizes, node_size)


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_size_that_are_counted_to_fit_are_placed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.integers(1, 9, rng.integers(1, 40))]
    where = assign(sizes, [8] * num_nodes(Counter(sizes), 8))
    assert where is not None
    used = Counter[int]()
    for size, node in zip(sizes, where, strict=True):
        used[node] += size
    assert max(used.values()) <= 8


def test_parts_that_find_no_place_are_refused() -> None:
    assert assign([3, 3], [4]) is None
    assert assign([2, 2], [4]) == [0, 0]
    assert assign([1], []) is None


def test_parts_that_spread_have_nodes_of_their_own_the_emptiest_ones() -> None:
    """The largest part on the emptiest node; of equally empty nodes the first."""
    assert spread([1, 2], [4, 3, 4, 0]) == [2, 0]
    assert spread([], [4]) == []


@pytest.mark.parametrize("seed", range(20))
def test_parts_spread_wherever_each_finds_a_node_of_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.integers(1, 5, rng.integers(1, 6))]
    rooms = [int(s) for s in rng.integers(0, 5, rng.integers(1, 6))]
    feasible = any(
        all(size <= room for size, room in zip(sizes, some, strict=True))
        for some in permutations(rooms, len(sizes))
    )
    where = spread(sizes, rooms)
    assert (where is not None) == feasible
    if where is not None:
        assert len(set(where)) == len(sizes)
        assert all(size <= rooms[node] for size, node in zip(sizes, where, strict=True))
