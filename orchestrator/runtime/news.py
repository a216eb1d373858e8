"""What passes between the job process and the head; light, so that the job process stays light."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord

Cursor = tuple[int, int, int, int]

Item = TypeVar("Item")


class Feed(Generic[Item]):
    """Things in the order in which they happened; those that were passed on are forgotten.

    A run of weeks would else hold every step and slot. Written and read by different threads.
    """

    def __init__(self) -> None:
        self._waiting: list[Item] = []
        self._num_forgotten = 0
        self._lock = threading.Lock()
        self.last: Item | None = None
        """The newest one; it stays."""

    def __len__(self) -> int:
        """How many there have been."""
        return self._num_forgotten + len(self._waiting)

    def append(self, item: Item) -> None:
        """One more has happened."""
        self.extend((item,))

    def extend(self, items: Iterable[Item]) -> None:
        """Some more have happened."""
        with self._lock:
            for item in items:
                self._waiting.append(item)
                self.last = item

    def since(self, position: int) -> tuple[Item, ...]:
        """Those from a position on; whoever asks has all before it, which are forgotten."""
        with self._lock:
            num_known = max(0, position - self._num_forgotten)
            del self._waiting[:num_known]
            self._num_forgotten += num_known
            return tuple(self._waiting)


@dataclass(frozen=True, slots=True)
class HeadNews:
    """What happened since the last question; ``cursor`` goes into the next one."""

    phase: str
    steps: tuple[CommittedStep, ...]
    slots: tuple[SlotRecord, ...]
    events: tuple[RunEvent, ...]
    evaluations: tuple[Evaluation, ...]
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Comparing:
    """Strategies to run for a few discarded steps before the first one that counts."""

    strategies: tuple[str, ...]
    num_steps: int = 8
