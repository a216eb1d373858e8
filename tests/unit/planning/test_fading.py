import gc
from weakref import ref

import pytest

from orchestrator.planning import fading
from orchestrator.planning.fading import Fading, Memories


def test_nothing_is_known_of_what_was_never_said_and_asking_adds_nothing() -> None:
    known: Fading[str, int] = Fading()
    assert known["a"] is None
    assert not known


def test_what_is_asked_for_between_two_fadings_stays_and_the_rest_goes() -> None:
    known: Fading[str, int] = Fading()
    known["asked"], known["left"] = 1, 2
    for _ in range(3):
        known.fade()
        assert known["asked"] == 1
    assert known["left"] is None


def test_what_faded_once_is_still_known_and_what_is_forgotten_never() -> None:
    known: Fading[str, int] = Fading()
    known["a"] = known["b"] = 1
    known.fade()
    assert known["a"] == 1
    known.forget()
    assert known["a"] is known["b"] is None


def test_what_faded_once_counts_as_known() -> None:
    known: Fading[str, int] = Fading()
    known["a"] = known["b"] = 1
    known.fade()
    assert known["a"] == 1
    assert known.num_known == 2


def test_a_dictionary_that_nobody_holds_any_more_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fading, "KEPT_STATES", 1)
    memories = Memories()
    held, left = memories.new(), ref(memories.new())
    gc.collect()
    assert left() is None
    memories.follow()
    held["a"] = 1
    memories.follow()
    memories.follow()
    assert held["a"] is None


@pytest.mark.parametrize(("num_states", "found"), [(2, 1), (3, 1), (5, 1), (6, None)])
def test_a_thing_is_known_for_so_many_states_and_at_most_twice_as_many(
    num_states: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fading, "KEPT_STATES", 3)
    memories = Memories()
    known = memories.new()
    known["a"] = 1
    for _ in range(num_states):
        memories.follow()
    assert known["a"] == found
