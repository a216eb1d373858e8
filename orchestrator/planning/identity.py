"""What is known of a thing, found by which thing it is: hashing deep tuples costs more."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")

MAX_KEPT = 200_000
"""Things remembered; when there are more, all are forgotten."""


class ByIdentity(Generic[T, V]):
    """Values of things that come again as the very same object; it keeps those alive.

    It does not keep what makes them: an owner whose method that is would keep itself alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[T, V]] = {}

    def of(self, thing: T, make: Callable[[T], V]) -> V:
        """Its value, made when first asked for."""
        found = self._known.get(id(thing))
        if found is None:
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            found = self._known[id(thing)] = thing, make(thing)
        return found[1]
