"""First guesses of the class level."""

from itertools import chain, combinations

import numpy as np

from orchestrator.planning.mixes import near, seeds
from orchestrator.planning.stock import DeviceClass, Stock


def test_first_guesses_without_pipelines_leave_out_any_class() -> None:
    """One of little memory, or behind slow links, must not stand in the way of the others."""
    stock = Stock([DeviceClass(((2 * c, 2 * c + 1),), (1,)) for c in range(3)])
    guesses = set(seeds(stock, [1.0, 1.1, 1.2], 99))
    some = chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3))
    assert guesses >= {tuple((((c, 1),), 2) for c in classes) for classes in some}


def test_first_guesses_try_every_class_alone_as_chains() -> None:
    stock = Stock([DeviceClass(((2 * c, 2 * c + 1),), (1,)) for c in range(7)])
    guesses = set(seeds(stock, [1.0 + c for c in range(7)], 99))
    assert guesses >= {((((c, 1), (c, 1)), 1),) for c in range(7)}


def test_first_guesses_try_one_device_of_each_of_some_classes_and_no_more() -> None:
    """Where devices of a node are far apart, or one class is too small, nothing else may fit."""
    nodes = ((0, 1, 2, 3, 4),), ((5, 6, 7),), ((8,),)
    guesses = set(seeds(Stock([DeviceClass(n, (1,)) for n in nodes]), [1.0, 1.0, 3.0], 99))
    assert guesses >= {
        ((((0, 1), (1, 1)), 3),),
        ((((0, 1), (2, 1)), 1),),
        ((((1, 1), (2, 1)), 1),),
    }


def test_first_guesses_have_no_more_groups_than_samples() -> None:
    """Beyond that nothing could run, and the fastest devices by themselves were never tried."""
    stock = Stock([DeviceClass(((0, 1, 2, 3, 4, 5, 6, 7),), (1,)), DeviceClass(((8, 9),), (1,))])
    guesses = list(seeds(stock, [1.0, 2.0], 3))
    assert max(sum(count for _, count in mix) for mix in guesses) == 3
    assert ((((0, 1),), 3),) in guesses
    assert any(len(mix) > 1 and {c for t, _ in mix for c, _ in t} == {0, 1} for mix in guesses)


def test_first_guesses_share_every_class_in_the_teams_that_make_most_of_it() -> None:
    """Two of the second class do six times as much as one; the third is too small to be shared."""
    nodes = ((0, 1, 2, 3),), ((4, 5, 6, 7),), ((8,),)
    stock = Stock([DeviceClass(n, (1, 2)[: len(n[0])]) for n in nodes])
    assert stock.pieces == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    guesses = set(seeds(stock, [1.0, 0.8, 6.0, 1.0, 9.0], 99))
    assert ((((0, 1), (0, 1), (1, 2)), 2),) in guesses
    assert ((((1, 2), (0, 1), (0, 1)), 2),) in guesses


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
