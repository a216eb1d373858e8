"""How long instructions take: the clock of a real device, and what every clock tells of a step."""

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.device import Mark, between_s, finish, mark


@dataclass(slots=True)
class StepTimes:
    """Where the time of one step went on one device, in s; virtual on an emulated one."""

    compute_s: float = 0.0
    receive_s: float = 0.0
    data_s: float = 0.0
    num_operations: int = 0
    num_late: int = 0
    end_s: float = 0.0
    sent: list[tuple[str, int, float]] = field(default_factory=list)
    """(operation, bytes, s on the link) of each message, where its time on the link is known."""


class Clock(Protocol):
    """How instructions take time: as long as they need, or as long as an emulated device would."""

    times: StepTimes

    def begin_step(self, step: int, at_s: float) -> None:
        """Start a step, whose first instruction may start at ``at_s``."""

    def start(self, op: str, microbatch_samples: int, arrival_s: float) -> None:
        """Start an instruction whose input arrived at ``arrival_s`` (0: nothing to wait for)."""

    def finish(self) -> None:
        """End the instruction: the real work is done."""

    def end_work(self, waited_s: float) -> float:
        """All instructions of the step have been asked for: wait until they have ended.

        Args:
            waited_s: How long the process waited for input and messages meanwhile.

        Returns:
            In which part of that time the device had nothing to do, 0 to 1.
        """

    def depart(self, op: str, size_bytes: int) -> float:
        """When a result sent now arrives at its neighbour; 0 in real time."""

    def end_step(self, last_end_s: float) -> float:
        """When the step ends, given when the last worker's instructions ended; waits until then."""


class RealClock:
    """The time of a real device: what it computed, as its own queue saw it.

    On a GPU an instruction is only asked for when ``finish`` is called: the next one is asked for
    while it runs. Its time is that between two marks in the device's queue, read once the step's
    instructions have ended, so measuring waits once a step.
    """

    def __init__(self, on: torch.device) -> None:
        self._device = on
        self._marks: list[tuple[Mark, Mark]] = []
        self._started = self._begun = Mark(0.0)
        self.times = StepTimes()

    def begin_step(self, step: int, at_s: float) -> None:
        """Start a step."""
        self.times = StepTimes(end_s=at_s)
        self._marks.clear()
        self._begun = mark(self._device)

    def start(self, op: str, microbatch_samples: int, arrival_s: float) -> None:
        """Start an instruction."""
        self._started = mark(self._device)

    def finish(self) -> None:
        """End the instruction."""
        self._marks.append((self._started, mark(self._device)))

    def end_work(self, waited_s: float) -> float:
        """Wait for the last instruction to end; then the times are known."""
        finish(self._device)
        times, idle_s, free = self.times, 0.0, self._begun
        for start, end in self._marks:
            times.compute_s += between_s(start, end)
            idle_s += between_s(free, start)
            free = end
        times.num_operations = len(self._marks)
        times.end_s = time.monotonic()
        return min(1.0, idle_s / waited_s) if waited_s else 1.0

    def depart(self, op: str, size_bytes: int) -> float:
        """No virtual time."""
        return 0.0

    def end_step(self, last_end_s: float) -> float:
        """The step ends now."""
        return time.monotonic()
