"""Where the stages of a group lie: neighbours on shared nodes, or each on a node of its own."""

import pytest

from orchestrator.planning.stock import DeviceClass, Stock, Template, is_apart

BIG, SMALL = 0, 1
STOCK = Stock(
    [
        DeviceClass(tuple(tuple(range(4 * n, 4 * n + 4)) for n in range(3)), (1, 2, 4)),
        DeviceClass(((12,), (13,)), (1,)),
    ]
)


def test_stages_are_apart_where_others_find_room_beside_them() -> None:
    """A team of a whole node has its node for itself whatever is said of it."""
    template = ((BIG, 1), (BIG, 2), (BIG, 4), (SMALL, 1))
    apart = STOCK.apart(template)
    assert apart == ((BIG, -1), (BIG, -2), (BIG, 4), (SMALL, 1))
    assert STOCK.apart(apart) == apart
    assert STOCK.together(apart) == template
    assert is_apart(apart)
    assert not is_apart(template)


def test_neighbours_share_a_node_as_far_as_they_fit_unless_they_are_apart() -> None:
    packed = ((BIG, 1), (BIG, 2), (BIG, 2), (SMALL, 1))
    assert STOCK.parts(packed) == [(BIG, [1, 2]), (BIG, [2]), (SMALL, [1])]
    assert STOCK.parts(STOCK.apart(packed)) == [(BIG, [1]), (BIG, [2]), (BIG, [2]), (SMALL, [1])]


@pytest.mark.parametrize(
    ("pieces", "nodes", "expected"),
    [
        (((BIG, 1), (BIG, 1)), "aa", ((BIG, 1), (BIG, 1))),
        (((BIG, 1), (BIG, 1)), "ab", ((BIG, -1), (BIG, -1))),
        (((BIG, 2), (BIG, 2), (BIG, 2)), "aab", ((BIG, 2), (BIG, 2), (BIG, 2))),
        (((BIG, 4), (BIG, 4)), "ab", ((BIG, 4), (BIG, 4))),
        (((BIG, 1), (SMALL, 1)), "ax", ((BIG, 1), (SMALL, 1))),
        (((BIG, 1), (SMALL, 1), (BIG, 1)), "axa", ((BIG, 1), (SMALL, 1), (BIG, 1))),
        (((BIG, 1), (SMALL, 1), (BIG, 1)), "axb", ((BIG, -1), (SMALL, 1), (BIG, -1))),
    ],
)
def test_a_group_is_apart_where_its_stages_could_share_a_node_and_do_not(
    pieces: Template, nodes: str, expected: Template
) -> None:
    assert STOCK.laid(pieces, nodes) == expected


def test_groups_apart_need_as_many_nodes_as_stages_until_these_are_full() -> None:
    """Four groups of two single devices: the same stages of all lie on one node."""
    packed, apart = ((BIG, 1), (BIG, 1)), ((BIG, -1), (BIG, -1))
    assert STOCK.num_nodes(((packed, 1),)) == {BIG: 1}
    assert STOCK.num_nodes(((apart, 4),)) == {BIG: 2}
    assert STOCK.most(packed) == STOCK.most(apart) == 6
