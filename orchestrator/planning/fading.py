"""What is known from earlier states of the cluster, forgotten when later ones do not ask for it."""

from typing import Any, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")

KEPT_STATES = 32
"""States in which nobody has asked for a thing, at most twice as many, after which it is
forgotten: speeds flap, and devices come back."""


class Fading(dict[K, V | None]):
    """``fading[key]`` is the value known of a key; None, and nothing is added, where none is."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[K, V | None] = {}  # of which none has been asked for since

    def __missing__(self, key: K) -> V | None:
        found = self._before.pop(key, None)
        if found is not None:
            self[key] = found
        return found

    @property
    def num_known(self) -> int:
        """How many keys have a value, those that nobody has asked for lately among them."""
        return len(self) + len(self._before)

    def fade(self) -> None:
        """Forget what nobody has asked for since the last call."""
        self._before = dict(self)
        self.clear()

    def forget(self) -> None:
        """Forget everything."""
        self._before = {}
        self.clear()


class Memories:
    """The fading dictionaries of things that follow each other, state by state, and share them.

    What is in them must be true in every state: they hold what is slow to compute, and say
    nothing that depends on which states there have been.
    """

    def __init__(self) -> None:
        self._all: list[ref[Fading[Any, Any]]] = []
        self._num_states = 0

    def new(self) -> Fading[Any, Any]:
        """One more of them, which lives as long as somebody holds it."""
        fading = Fading[Any, Any]()
        self._all.append(ref(fading))
        return fading

    def follow(self) -> None:
        """One more state begins."""
        self._num_states += 1
        if self._num_states % KEPT_STATES == 0:
            held = [(fading, one) for one in self._all if (fading := one()) is not None]
            self._all = [one for _, one in held]
            for fading, _ in held:
                fading.fade()
