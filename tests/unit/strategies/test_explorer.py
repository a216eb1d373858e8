import gc
from collections.abc import Iterator

import pytest

from orchestrator.strategies.explorer import uncollected


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
