"""First guesses of the class level, and more groups over what they leave."""

import itertools

from orchestrator.planning.guesses import filled, seeds
from orchestrator.planning.stock import DeviceClass, Stock


def test_first_guesses_without_pipelines_leave_out_any_class() -> None:
    """One of little memory, or behind slow links, must not stand in the way of the others."""
    stock = Stock([DeviceClass(((2 * c, 2 * c + 1),), (1,)) for c in range(3)])
    guesses = set(seeds(stock, [1.0, 1.1, 1.2], 99, 16))
    some = itertools.chain.from_iterable(
        itertools.combinations(range(3), count) for count in (1, 2, 3)
    )
    assert guesses >= {tuple((((c, 1),), 2) for c in classes) for classes in some}


def test_first_guesses_try_every_class_alone_as_chains() -> None:
    stock = Stock([DeviceClass(((2 * c, 2 * c + 1),), (1,)) for c in range(7)])
    guesses = set(seeds(stock, [1.0 + c for c in range(7)], 99, 16))
    assert guesses >= {((((c, 1), (c, 1)), 1),) for c in range(7)}


def test_first_guesses_try_one_device_of_each_of_some_classes_and_no_more() -> None:
    """Where devices of a node are far apart, or one class is too small, nothing else may fit."""
    nodes = ((0, 1, 2, 3, 4),), ((5, 6, 7),), ((8,),)
    guesses = set(seeds(Stock([DeviceClass(n, (1,)) for n in nodes]), [1.0, 1.0, 3.0], 99, 16))
    assert guesses >= {
        ((((0, 1), (1, 1)), 3),),
        ((((0, 1), (2, 1)), 1),),
        ((((1, 1), (2, 1)), 1),),
    }


def test_first_guesses_have_no_more_groups_than_samples() -> None:
    """Beyond that nothing could run, and the fastest devices by themselves were never tried."""
    stock = Stock([DeviceClass(((0, 1, 2, 3, 4, 5, 6, 7),), (1,)), DeviceClass(((8, 9),), (1,))])
    guesses = list(seeds(stock, [1.0, 2.0], 3, 16))
    assert max(sum(count for _, count in mix) for mix in guesses) == 3
    assert ((((0, 1),), 3),) in guesses
    assert any(len(mix) > 1 and {c for t, _ in mix for c, _ in t} == {0, 1} for mix in guesses)


def test_first_guesses_share_every_class_in_the_teams_that_make_most_of_it() -> None:
    """Two of the second class do six times as much as one; the third is too small to be shared."""
    nodes = ((0, 1, 2, 3),), ((4, 5, 6, 7),), ((8,),)
    stock = Stock([DeviceClass(n, (1, 2)[: len(n[0])]) for n in nodes])
    assert stock.pieces == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    guesses = set(seeds(stock, [1.0, 0.8, 6.0, 1.0, 9.0], 99, 16))
    assert ((((0, 1), (0, 1), (1, 2)), 2),) in guesses
    assert ((((1, 2), (0, 1), (0, 1)), 2),) in guesses


def test_first_guesses_try_most_memory_first() -> None:
    """Early stages keep most microbatches in flight, and the fastest class may hold few."""
    classes = [
        DeviceClass(((c,), (3 + c,)), (1,), memory_bytes)
        for c, memory_bytes in enumerate((1 << 30, 8 << 30, 4 << 30))
    ]
    guesses = set(seeds(Stock(classes), [1.0, 1.1, 1.2], 99, 16))
    assert ((((1, 1), (2, 1), (0, 1)), 2),) in guesses


def test_first_guesses_have_no_longer_chains_than_the_model() -> None:
    stock = Stock([DeviceClass(((0, 1, 2, 3, 4, 5, 6, 7),), (1,)), DeviceClass(((8, 9),), (1,))])
    guesses = list(seeds(stock, [1.0, 2.0], 99, 3))
    assert max(len(template) for mix in guesses for template, _ in mix) == 3


def test_idle_devices_get_chains_as_fast_as_the_others_or_fewer() -> None:
    """Two of the chains leave four fast devices and two slow ones: as much as two more do."""
    nodes = ((0, 1, 2, 3, 4, 5, 6, 7),), ((8, 9, 10, 11),)
    stock = Stock([DeviceClass(n, (1,)) for n in nodes])
    chain = ((0, 1), (0, 1), (1, 1))
    deep = ((0, 1),) * 4 + ((1, 1),) * 2
    found = {frozenset(mix) for mix in filled(stock, ((chain, 2),), [1.0, 2.0], 99, 8)}
    assert found == {
        frozenset({(chain, 4)}),
        frozenset({(chain, 2), (chain[::-1], 2)}),
        frozenset({(chain, 2), (deep, 1)}),
        frozenset({(chain, 2), (deep[::-1], 1)}),
    }
    assert not list(filled(stock, ((chain, 2),), [1.0, 2.0], 2, 8))  # no sample for one more
