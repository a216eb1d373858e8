import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.random_problems import Size, random_problem
from orchestrator.strategies.explorer import Explorer, uncollected


@pytest.fixture(autouse=True)
def collection_goes_on() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_collection_stops_for_a_search_and_goes_on_after_it_however_it_ends() -> None:
    during: list[bool] = []

    @uncollected()
    def search() -> None:
        during.append(gc.isenabled())
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        search()
    assert [*during, gc.isenabled()] == [False, True]


def test_who_collects_nothing_before_a_search_collects_nothing_after_it() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_what_somebody_put_aside_for_good_stays_there() -> None:
    gc.freeze()
    with uncollected():
        pass
    assert gc.get_freeze_count() > 0


def test_nothing_is_put_aside_that_was_not_before() -> None:
    with uncollected():
        pass
    assert gc.get_freeze_count() == 0


def test_a_search_and_its_memory_of_earlier_ones_make_no_cycles() -> None:
    """Else what earlier slots knew would stay until a collection of the oldest generation."""
    size = Size(devices=4, layers=6, batch=16, microbatch=2, devices_per_node=2)
    problem = random_problem(np.random.default_rng(5), size)
    first, *others = problem.cluster.devices
    explorer = Explorer()
    gc.collect()
    gc.disable()
    for slowdown in (1.0, 1.5, 2.0):
        devices = (replace(first, slowdown=slowdown), *others)
        slowed = replace(problem, cluster=replace(problem.cluster, devices=devices))
        explorer.search(slowed, lambda: False)
    assert gc.collect() == 0
