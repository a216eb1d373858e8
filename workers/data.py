"""The batches of a run: samples at positions of its one sequence, collated."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from workers.device import brought
from workers.device import pinned as pinned_tensor
from workers.failures import user_code
from workers.randomness import INPUTS, sample_randomness
from workers.seeding import Draws
from workers.sequence import InOrder, in_order


class SampleSource:
    """A dataset in one order: a function of the seed alone, never of the plan.

    Every plan and every restart sees the same samples in the same places; what a dataset draws
    at random (augmentation) is a function of seed and position, too. Only one thread at a time
    calls the user's code, also where a dataset and one that it is evaluated on are of one file.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        inputs: Callable[[Any], Any] | None = None,
        order: Callable[[Any, int], InOrder] = in_order,
    ) -> None:
        """Wrap ``dataset``; see ``Task`` for ``collate`` and ``inputs``.

        Raises:
            ConfigError: If it is no dataset, or has no sample.
            UserCodeError: If its ``__len__`` raises.
        """
        self._sequence = order(dataset, seed)
        self._collate, self._seed = collate, seed
        self._inputs = inputs
        self._lock = threading.Lock()
        self._call: object = ""

    @property
    def call(self) -> str:
        """Which call of the user's code is under way, in words; empty: none. Any thread."""
        return str(self._call).rstrip(",")

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset; None: a stream that does not say."""
        return self._sequence.num_samples

    def batch(self, positions: Sequence[int], during: str = "") -> Any:
        """The collated samples at these positions.

        Args:
            positions: In the run.
            during: What they are for, as the beginning of an error's message (``step 3: ``).

        Raises:
            UserCodeError: If the dataset or the collate raises; names the position.
        """
        with self._lock, Draws() as draws:
            with self._calls(f"{during}{self._sequence.field}.will_read"):
                self._sequence.expect(positions)
            where = _Where(self._sequence, during)
            with self._calls(where):
                samples = [self._sample(where.at(p), draws) for p in positions]
            draws.key(self._seed, positions[0], len(positions))
            return self._collated(samples, positions, during)

    def _sample(self, position: int, draws: Draws) -> Any:
        sample = self._sequence.item(position, draws)
        if sample is None and self._collate is None:
            raise TypeError("it returned None; return a sample, or leave it out of the dataset")
        return sample

    def _collated(self, samples: list[Any], positions: Sequence[int], during: str) -> Any:
        name = "Task.collate"
        if self._collate is None:
            name = "torch's default_collate (Task.collate replaces it)"
        span = f"samples at positions {positions[0]} to {positions[-1]},"
        if len(positions) == 1:
            span = f"sample at position {positions[0]},"
        with self._calls(f"{during}{name}, of the {span}"):
            return (self._collate or default_collate)(samples)

    @contextmanager
    def _calls(self, place: object) -> Iterator[None]:
        self._call = place
        try:
            with user_code(place):
                yield
        finally:
            self._call = ""

    def release(self, position: int) -> None:
        """Samples before this position will hardly be asked for again."""
        with self._lock:
            self._sequence.release(position)

    def first_input(self, batch: Any, positions: Sequence[int]) -> Any:
        """What the first layer receives of the batch of these positions.

        What ``Task.inputs`` draws at random is a function of the seed and each position.
        """
        if self._inputs is None:
            return _first(batch)
        with sample_randomness(self._seed, 0, positions, INPUTS, who="Task.inputs"):
            return self._inputs(batch)


class _Where:
    """Which sample is being asked for, in words that are only made when it fails."""

    def __init__(self, sequence: InOrder, during: str) -> None:
        self._sequence, self._during, self._position = sequence, during, 0

    def at(self, position: int) -> int:
        """This one, from now on."""
        self._position = position
        return position

    def __str__(self) -> str:
        return f"{self._during}{self._sequence.field}, at {self._sequence.name(self._position)},"


def _first(batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        return batch[0]
    # Tokenizers give mappings of a class of their own; a model takes keywords.
    return dict(batch) if isinstance(batch, Mapping) else batch


def to_device(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on ``device``: nests, dataclasses, and what has a ``to`` itself."""
    return _mapped(
        value,
        lambda tensor: brought(tensor, device),
        lambda other: other.to(device) if hasattr(other, "to") else other,
    )


def pinned(value: Any) -> Any:
    """A batch in memory from which a GPU copies while other work goes on, if there is one."""
    return _mapped(value, pinned_tensor, lambda other: other)


def _mapped(
    value: Any, change: Callable[[Tensor], Tensor], change_other: Callable[[Any], Any]
) -> Any:
    def mapped(item: Any) -> Any:
        return _mapped(item, change, change_other)

    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(mapped, value))
    if isinstance(value, tuple | list):
        return type(value)(map(mapped, value))
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: mapped(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **changes)
    return change_other(value)
