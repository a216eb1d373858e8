"""The batches of one place in a plan, loaded ahead by a thread, in the order of their use."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from workers.data import pinned, to_device
from workers.process_groups import LostContactError

_Key = tuple[int, range]  # step, positions


class Batches(Protocol):
    """Where samples come from."""

    def batch(self, positions: Sequence[int], during: str = "") -> Any:
        """The collated samples at these positions; ``during`` begins an error's message."""

    @property
    def call(self) -> str:
        """Which call of the user's code is under way, in words; empty: none."""

    def release(self, position: int) -> None:
        """Samples before this position will hardly be asked for again."""

    def first_input(self, batch: Any, positions: Sequence[int]) -> Any:
        """What the first layer receives of the batch of these positions."""


class Feed:
    """Loads and collates what the coming microbatches of one place take, some of them ahead.

    What a step takes is a function of the plan and the step, so nothing has to be told, and
    nothing is lost when what was loaded is not used. ``take`` is called by the thread that runs
    steps; ``begin`` and ``stop`` come on any.
    """

    def __init__(
        self,
        source: Batches,
        positions: Callable[[int], Sequence[range]],
        num_steps: int,
        device: torch.device,
        ahead: int,
    ) -> None:
        """Load nothing yet.

        Args:
            source: Of the samples.
            positions: Those of each microbatch of a step, in order.
            num_steps: Of the whole run.
            device: Where batches are to be.
            ahead: Microbatches that are loaded before they are asked for; 0: none.
        """
        self._source, self._positions, self._num_steps = source, positions, num_steps
        self._device, self._most = device, ahead
        self._loader: _Loader | None = None
        self._expected: Iterator[_Key] = iter(())
        self._due: _Key | None = None  # what the loader hands out next
        self._oldest = 0  # the first sample of the step that runs
        self._stopped = False
        self.waited_s = 0.0
        """For batches, by the wall clock, since the beginning."""

        self._waits = False
        self._lock = threading.Lock()  # ``begin`` and ``stop``, against each other

    @property
    def waits_for(self) -> str:
        """Which call of the user's code ``take`` waits for, in words; empty: none. Any thread."""
        return self._source.call if self._waits else ""

    def first_input(self, batch: Any, positions: Sequence[int]) -> Any:
        """What the first layer receives of the batch of these positions."""
        return self._source.first_input(batch, positions)

    def begin(self, step: int) -> None:
        """Start to load for ``step`` and what follows it, unless that is under way."""
        expected = self._coming(step)
        due = next(expected, None)
        with self._lock:
            if self._most < 1 or due is None or self._stopped or due == self._due:
                return
            if self._loader is not None:
                self._loader.stop()
            self._expected, self._due = expected, due
            self._loader = _Loader(self._load, self._coming(step), self._most)

    def take(self, step: int, positions: range) -> Any:
        """The batch of a microbatch, on the device; waits for it.

        The microbatches of a step are taken in their order.

        Raises:
            UserCodeError: If the dataset or the collate raised.
            LostContactError: If ``stop`` came, or comes meanwhile.
        """
        started_s, self._waits = time.monotonic(), True
        try:
            batch = to_device(self._next(step, positions), self._device)
        finally:
            self._waits = False
        self.waited_s += time.monotonic() - started_s
        return batch

    def _next(self, step: int, positions: range) -> Any:
        self._oldest = self._positions(step)[0].start
        if self._most < 1:
            return self._load(step, positions)
        if self._due != (step, positions):
            self.begin(step)
        if self._loader is None or self._stopped:
            raise LostContactError(_STOPPED)
        assert self._due == (step, positions), "microbatches are taken in their order"
        batch = self._loader.take()
        self._due = next(self._expected, None)
        return batch

    def resume(self) -> None:
        """Load what takes the place of what was taken.

        Called when there is something to wait for: Python runs one thread at a time, and what
        loads small tensors would else keep the one that computes from doing so.
        """
        if self._loader is not None:
            self._loader.resume()

    def stop(self) -> None:
        """Forget what was loaded and load nothing more; whoever waits in ``take`` is freed.

        A call of the dataset that is under way is the last one; its thread ends with it.
        """
        with self._lock:
            self._stopped = True
            if self._loader is not None:
                self._loader.stop()

    def _coming(self, step: int) -> Iterator[_Key]:
        for at in range(step, self._num_steps):
            for positions in self._positions(at):
                yield at, positions

    def _load(self, step: int, positions: range) -> Any:
        self._source.release(self._oldest)
        return pinned(self._source.batch(positions, f"step {step}: "))


_STOPPED = "the worker was told to stop while it waited for samples"


class _Loader:
    """One thread that loads what comes, at most so much of it before it is taken."""

    def __init__(
        self, load: Callable[[int, range], Any], coming: Iterator[_Key], most: int
    ) -> None:
        self._load, self._coming = load, coming
        self._room = threading.Semaphore(most)
        self._taken = 0  # whose room is not given free yet
        self._loaded: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._stopped = False
        # A dataset that hangs for ever must not keep the process from ending.
        threading.Thread(target=self._run, name="samples", daemon=True).start()

    def take(self) -> Any:
        """What was loaded next. Raises what loading it raised."""
        if self._loaded.empty():
            self.resume()
        batch, error = self._loaded.get()
        self._taken += 1
        if error is not None:
            raise error
        return batch

    def resume(self) -> None:
        """Go on in the place of what was taken."""
        if self._taken:
            self._room.release(self._taken)
            self._taken = 0

    def stop(self) -> None:
        """End the thread once it comes to it, and free whoever waits."""
        self._stopped = True
        self._room.release()
        self._loaded.put((None, LostContactError(_STOPPED)))

    def _run(self) -> None:
        for step, positions in self._coming:
            self._room.acquire()
            if self._stopped:
                return
            try:
                loaded = self._load(step, positions), None
            except BaseException as error:  # it is raised where the batch is asked for
                self._loaded.put((None, error))
                return
            if self._stopped:
                return
            self._loaded.put(loaded)
