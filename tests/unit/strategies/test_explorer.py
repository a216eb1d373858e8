import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType

import numpy as np
import pytest

from benchmarks.random_problems import Size, random_problem
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning import fading
from orchestrator.strategies.explorer import Explorer, uncollected


def small_problem() -> PlanningProblem:
    size = Size(devices=4, layers=6, batch=16, microbatch=2, devices_per_node=2)
    return random_problem(np.random.default_rng(5), size)


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
    problem = small_problem()
    first, *others = problem.cluster.devices
    explorer = Explorer()
    gc.collect()
    gc.disable()
    for slowdown in (1.0, 1.5, 2.0):
        devices = (replace(first, slowdown=slowdown), *others)
        slowed = replace(problem, cluster=replace(problem.cluster, devices=devices))
        explorer.search(slowed, lambda: False)
    assert gc.collect() == 0


# What is kept from one state of the cluster to the next -------------------------------


def newcomer(index: int) -> PlanningProblem:
    """Another device has taken the place of the last one, as fast as none before it."""
    problem = small_problem()
    *others, last = problem.cluster.devices
    new = replace(last, device_id=f"new-{index}", slowdown=1.0 + index / 10_000)
    return replace(problem, cluster=replace(problem.cluster, devices=(*others, new)))


def repriced(index: int) -> PlanningProblem:
    """All prices are others than ever before."""
    problem = small_problem()
    offers = tuple(
        replace(offer, price_usd_per_s=offer.price_usd_per_s * (1.0 + index / 100))
        for offer in problem.cluster.offers
    )
    return replace(problem, cluster=replace(problem.cluster, offers=offers))


def num_kept(root: object) -> int:
    """Things that an object keeps alive, code apart."""
    found, left = {id(root): root}, [root]
    while left:
        for thing in gc.get_referents(left.pop()):
            if id(thing) not in found and not isinstance(
                thing, type | ModuleType | FunctionType | MethodType
            ):
                found[id(thing)] = thing
                left.append(thing)
    return len(found)


@pytest.mark.parametrize("state", [newcomer, repriced])
def test_memory_does_not_grow_with_the_states_there_have_been(
    state: Callable[[int], PlanningProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices come under new names and go for good; prices move for ever."""
    monkeypatch.setattr(fading, "KEPT_STATES", 4)
    explorer, kept = Explorer(), []
    for index in range(36):
        explorer.search(state(index), lambda: False)
        if index % 12 == 11:
            kept.append(num_kept(explorer))
    assert kept[2] <= 1.05 * kept[1]


@pytest.mark.parametrize("state", [newcomer, repriced])
def test_what_is_kept_and_what_is_forgotten_changes_no_plan(
    state: Callable[[int], PlanningProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fading, "KEPT_STATES", 4)
    explorer = Explorer()
    for index in (*range(10), 0, 9):
        problem = state(index)
        known = explorer.search(problem, lambda: False)
        fresh = Explorer().search(problem, lambda: False)
        assert [t.groups for t in known] == [t.groups for t in fresh]
