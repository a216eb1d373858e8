"""Moves of the class level."""

import numpy as np

from orchestrator.planning.mixes import near
from orchestrator.planning.stock import DeviceClass, Stock


def test_one_deep_chain_becomes_two_that_are_led_by_a_device_of_its_first_class() -> None:
    """Where only that class holds the first layers, splitting the chain leads nowhere."""
    stock = Stock([DeviceClass(((0,), (1,), (2,), (3,)), (1,)), DeviceClass(((4, 5),), (1,))])
    deep = (((1, 1), (0, 1), (0, 1), (0, 1), (0, 1)), 1)
    wide = (((1, 1), (0, 1), (0, 1)), 2)
    assert (wide,) in near(stock, (deep,), 8, np.random.default_rng(0))
    deeper = (((1, 1), (1, 1), (0, 1), (0, 1), (0, 1), (0, 1)), 1)
    assert (deeper,) in near(stock, (wide,), 8, np.random.default_rng(0))


def test_all_chains_turn_round_at_once() -> None:
    """One by itself would be cut elsewhere than the others, and share no sums with them."""
    stock = Stock([DeviceClass(((3 * c, 3 * c + 1, 3 * c + 2),), (1,)) for c in range(3)])
    chains = (((0, 1), (1, 1)), 2), (((2, 1), (1, 1)), 1)
    turned = tuple(sorted((template[::-1], count) for template, count in chains))
    assert turned in near(stock, chains, 8, np.random.default_rng(0))


def test_chains_that_differ_in_few_devices_change_together() -> None:
    """One by itself would be cut elsewhere than the others, and share no sums with them."""
    stock = Stock([DeviceClass(tuple((4 * c + i,) for i in range(4)), (1,)) for c in range(4)])
    chains = (((0, 1), (1, 1)), 1), (((0, 1), (2, 1)), 1)
    found = list(near(stock, chains, 8, np.random.default_rng(0)))
    longer = (((0, 1), (3, 1), (1, 1)), 1), (((0, 1), (3, 1), (2, 1)), 1)
    swapped = (((1, 1), (0, 1)), 1), (((2, 1), (0, 1)), 1)
    assert tuple(sorted(longer)) in map(tuple, map(sorted, found))
    assert tuple(sorted(swapped)) in map(tuple, map(sorted, found))
