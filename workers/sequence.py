"""Which sample stands at a position of the run: of a shuffled dataset, or of a stream."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from orchestrator.errors import ConfigError
from workers.failures import user_code
from workers.seeding import Draws

LARGEST_TABLE = 1 << 22
"""Samples of a dataset whose order is kept as a table; of a larger one it is computed."""


class InOrder(Protocol):
    """The samples of a run in its one order, a function of the seed alone.

    What the dataset draws meanwhile is, too: ``draws`` is told what is asked for.
    """

    num_samples: int | None
    """Of the dataset; None: a stream that does not say."""

    field: str
    """Of ``Task``, for the message of an error."""

    def name(self, position: int) -> str:
        """What stands at a position, for the message of an error."""

    def expect(self, positions: Iterable[int]) -> None:
        """These samples are asked for next; what the dataset raises comes through."""

    def item(self, position: int, draws: Draws) -> Any:
        """The sample at a position; what the dataset raises comes through."""

    def release(self, position: int) -> None:
        """Samples before this position will hardly be asked for again."""


def in_order(dataset: Any, seed: int) -> InOrder:
    """A dataset in the run's order.

    Raises:
        ConfigError: If it is no dataset, or has no sample.
        UserCodeError: If its ``__len__`` raises.
    """
    place = _refused(dataset, Shuffled.field)
    if _is_map_style(dataset):
        return Shuffled(dataset, seed)
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise ConfigError(f"{place}, which has no __len__; add it: the number of its samples")
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"{place}; give a map-style dataset, with __len__ and __getitem__, or an iterable one"
        )
    if hasattr(dataset, "__next__"):
        raise ConfigError(
            f"{place}, which can be read only once; give an object whose __iter__ starts anew"
        )
    return Streamed(dataset, seed)


def as_given(dataset: Any, seed: int) -> InOrder:
    """An evaluation dataset in its own order.

    Raises:
        ConfigError: If it is no map-style dataset, or has no sample.
        UserCodeError: If its ``__len__`` raises.
    """
    place = _refused(dataset, AsGiven.field)
    if not _is_map_style(dataset):
        raise ConfigError(f"{place}; give a map-style dataset, with __len__ and __getitem__")
    return AsGiven(dataset, seed)


def _refused(dataset: Any, field: str) -> str:
    """How a refusal of this field begins; refuses what only looks like a dataset."""
    place = f"training.task: {field} is {_named(dataset)}"
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"{place}; batches are made here: give what it loads from (loader.dataset) as "
            f"{field}, and loader.collate_fn as Task.collate if it is your own"
        )
    if isinstance(dataset, type | str | bytes | Mapping | set | frozenset):
        raise ConfigError(f"{place}; give a dataset: an object with __len__ and __getitem__")
    return place


def _is_map_style(dataset: Any) -> bool:
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_both and not isinstance(dataset, IterableDataset)


def _named(dataset: Any) -> str:
    if isinstance(dataset, type):
        return f"the class {dataset.__name__}, not an object of it"
    return f"a {type(dataset).__name__}"


def _length(dataset: Any, field: str) -> int:
    with user_code(f"len({field})"):
        length = len(dataset)
    if length < 1:
        raise ConfigError(f"training.task: {field} is empty; give at least one sample")
    return length


class AsGiven:
    """A map-style dataset in its own order, as it is evaluated."""

    field = "Task.eval_dataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        self._length = _length(dataset, self.field)
        self.num_samples: int | None = self._length
        self._dataset, self._seed = dataset, seed

    def index(self, position: int) -> int:
        """Index in the dataset of the sample at a position."""
        return position

    def name(self, position: int) -> str:
        """Position, and which sample of how many it is."""
        return f"position {position} (sample {self.index(position)} of {self._length})"

    def expect(self, positions: Iterable[int]) -> None:
        """Tell a dataset with ``will_read(indices)``, which may fetch them all at once."""
        if hasattr(self._dataset, "will_read"):
            self._dataset.will_read([self.index(position) for position in positions])

    def item(self, position: int, draws: Draws) -> Any:
        """The sample at a position."""
        draws.key(self._seed, position)
        return self._dataset[self.index(position)]

    def release(self, position: int) -> None:
        """Nothing is kept."""


class Shuffled(AsGiven):
    """A map-style dataset, in another order every epoch.

    Position p of the run is sample ``perm(seed, p div N)[p mod N]`` of a dataset of N.
    """

    field = "Task.dataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset, seed)
        self._orders: dict[int, np.ndarray] = {}  # of the two newest epochs

    def index(self, position: int) -> int:
        """Index in the dataset of the sample at a position."""
        epoch, place = divmod(position, self._length)
        if self._length > LARGEST_TABLE:
            return _permuted(place, self._length, struct.pack("<2q", self._seed, epoch))
        if epoch not in self._orders:
            # Samples are asked for in order: of the last epochs no other is needed again.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._orders[epoch] = generator.permutation(self._length)
        return int(self._orders[epoch][place])


def _permuted(index: int, size: int, key: bytes) -> int:
    """Entry of a permutation of ``range(size)``, without the others: a Feistel network.

    Its domain is the next even power of two; what falls outside goes through once more.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            told = blake2b(struct.pack("<qB", right, round_), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(told, "little") & mask)
        index = left << half | right
        if index < size:
            return index


class Streamed:
    """An iterable dataset in the order in which it gives its samples, anew when it ends.

    What lies between two samples that are asked for is read and forgotten; a dataset with
    ``iter_from(epoch, start)`` is asked for an iterator that begins at sample ``start`` of the
    epoch instead. A stream must give the same samples every time, on every worker.
    """

    field = "Task.dataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        has_length = hasattr(dataset, "__len__")
        self.num_samples = _length(dataset, self.field) if has_length else None
        self._length = self.num_samples  # known once the stream has ended
        self._dataset, self._seed = dataset, seed
        self._iterator: Iterator[Any] | None = None
        self._position = 0  # of what the iterator gives next
        self._has_read = False  # anything from this iterator
        self._seeks = hasattr(dataset, "iter_from")
        self._kept: dict[int, Any] = {}
        self._keep_from: int | None = None

    def name(self, position: int) -> str:
        """Position; of a known length, which sample of the epoch."""
        if self._length is None:
            return f"position {position}"
        return f"position {position} (sample {position % self._length} of {self._length})"

    def expect(self, positions: Iterable[int]) -> None:
        """A stream comes as it comes."""

    def item(self, position: int, draws: Draws) -> Any:
        """The sample at a position.

        Raises:
            ValueError: If the stream has another length than before, or than it says.
        """
        if position in self._kept:
            return self._kept[position]
        while True:
            if self._iterator is None or not self._goes_on_to(position):
                self._open(position, draws)
            found = self._position
            assert self._iterator is not None, "it was opened"
            draws.key(self._seed, found)
            try:
                item = next(self._iterator)
            except StopIteration:
                self._ended()
                continue
            self._position, self._has_read = found + 1, True
            if not self._seeks and self._keep_from is not None and found >= self._keep_from:
                self._kept[found] = item
            if found == position:
                return item

    def release(self, position: int) -> None:
        """Keep what is read from this position on: a new plan asks for some of it again.

        A stream that seeks is asked itself.
        """
        self._keep_from = position
        self._kept = {p: item for p, item in self._kept.items() if p >= position}

    def _place(self, position: int) -> tuple[int, int]:
        """Epoch, and sample of it; a stream of unknown length is in its first."""
        return divmod(position, self._length) if self._length else (0, position)

    def _goes_on_to(self, position: int) -> bool:
        """Whether the open iterator gets there."""
        if position < self._position or (self._seeks and position > self._position):
            return False
        if self._length and self._position % self._length == 0 and self._has_read:
            return False  # the epoch is over, whatever else it would give
        return self._place(position)[0] == self._place(self._position)[0]

    def _open(self, position: int, draws: Draws) -> None:
        epoch, place = self._place(position)
        self._iterator = None
        draws.key(self._seed, -1 - epoch)
        if self._seeks:
            self._iterator = iter(self._dataset.iter_from(epoch, place))
        else:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            self._iterator = iter(self._dataset)
        self._position, self._has_read = position if self._seeks else position - place, False

    def _ended(self) -> None:
        """Take note of how long the stream is."""
        place = self._place(self._position)[1]
        if self._length is not None:
            raise ValueError(
                f"the stream ended before sample {place} of {self._length}; it must give as many "
                "samples as its __len__ says, and the same in every epoch"
            )
        self._iterator = None
        if self._seeks and not self._has_read:  # it began behind the end
            place = sum(1 for _ in self._dataset.iter_from(0, 0))
        if not place:
            raise ValueError("the stream has no sample")
        self._length = place
