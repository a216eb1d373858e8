import pytest

from orchestrator.planning import identity
from orchestrator.planning.identity import ByIdentity


class Totals:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, numbers: list[int]) -> int:
        self.asked.append(numbers)
        return sum(numbers)


def test_the_same_object_is_worked_out_once_and_one_that_equals_it_again() -> None:
    totals = Totals()
    known: ByIdentity[list[int], int] = ByIdentity()
    one, equal = [1, 2], [1, 2]
    assert [known.of(numbers, totals) for numbers in (one, one, equal)] == [3, 3, 3]
    assert totals.asked == [one, equal]


def test_a_forgotten_object_is_never_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that nobody keeps leave their places in memory to those that follow."""
    monkeypatch.setattr(identity, "MAX_KEPT", 2)
    known: ByIdentity[list[int], int] = ByIdentity()
    assert [known.of([n, n], sum) for n in range(100)] == [2 * n for n in range(100)]
