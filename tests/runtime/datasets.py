"""Datasets and collates as people bring them, each with a trait that could go wrong."""

import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from orchestrator.core.training import Task
from tests.runtime.models import Block

WIDTH = 4
LENGTH = 13

Pair = tuple[Tensor, Tensor]


def sample(index: int) -> Pair:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


class Rows(Dataset[Pair]):
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Columns(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = sample(index)
        return {"x": x, "y": y, "name": str(index), "size": 1.5, "part": index}


class Arrays(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y = sample(index)
        return x.numpy()[::-1].copy(), torch.stack([y, y], dim=1)[:, 0]  # no contiguous tensor


class Locked(Rows):
    """Holds what cannot be pickled: an open file and a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.file = threading.Lock(), tempfile.TemporaryFile()  # noqa: SIM115
        self.file.write(
            torch.stack([torch.cat(sample(i)) for i in range(LENGTH)]).numpy().tobytes()
        )

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            self.file.seek(16 * WIDTH * index)
            row = torch.frombuffer(bytearray(self.file.read(16 * WIDTH)), dtype=torch.float64)
        return row[:WIDTH], row[WIDTH:]

    def __del__(self) -> None:
        self.file.close()


class Augmented(Rows):
    """Draws from all three generators; the target is turned as the input is."""

    def __getitem__(self, index: int) -> Any:
        x, y = sample(index)
        if random.random() < 0.5:
            x, y = x.flip(0), y.flip(0)
        noise = torch.randn(WIDTH, dtype=torch.float64) * float(np.random.rand())  # noqa: NPY002
        return x + noise, y * torch.randint(1, 4, ())


class Threaded(Rows):
    """Loads in threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(2)

    def __getitem__(self, index: int) -> Any:
        return self.pool.submit(sample, index).result()


class Stream(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        return map(sample, range(LENGTH))


class SizedStream(Stream):
    def __len__(self) -> int:
        return LENGTH


class SeekingStream(SizedStream):
    def iter_from(self, epoch: int, start: int) -> Iterator[Pair]:
        return map(sample, range(start, LENGTH))


class Failing(Rows):
    """Sample 5 is another one, or none."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act = act

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            match self.act:
                case "raises":
                    raise OSError("torn page")
                case "none":
                    return None
                case "ragged":
                    return torch.zeros(WIDTH + 1), torch.zeros(WIDTH)
                case "lies":
                    raise IndexError(index)
        return sample(index)


# Batches -------------------------------------------------------------------------------------


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Fields:
    x: Tensor
    y: Tensor


def named(samples: list[Pair]) -> Named:
    return Named(*default_collate(samples))


def fielded(samples: list[Pair]) -> Fields:
    return Fields(*default_collate(samples))


def encoded(samples: list[Pair]) -> Any:
    from transformers import BatchEncoding  # noqa: PLC0415 - slow to import

    x, y = default_collate(samples)
    return BatchEncoding({"x": x, "y": y})


def collate_that_raises(samples: list[Pair]) -> Any:
    raise KeyError("a word of mine")


def _squares(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return ((output - y) ** 2).mean(1).sum(), len(y)


def _by_place(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return _squares(output, batch[1])


def _by_name(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return _squares(output, batch["y"] if isinstance(batch, dict) else batch.y)


ROWS = TensorDataset(*map(torch.stack, zip(*map(sample, range(LENGTH)), strict=True)))

DATASETS: dict[str, Any] = {
    "rows": Rows,
    "one": lambda: Rows(1),
    "three": lambda: Rows(3),
    "list": lambda: [sample(i) for i in range(LENGTH)],
    "tensors": lambda: ROWS,
    "subset": lambda: Subset(ROWS, [7, 3, 3, 1]),
    "concat": lambda: ConcatDataset([ROWS, Rows(5)]),
    "columns": Columns,
    "arrays": Arrays,
    "locked": Locked,
    "augmented": Augmented,
    "threaded": Threaded,
    "stream": Stream,
    "sized": SizedStream,
    "seeking": SeekingStream,
    "empty": list,
    "loader": lambda: DataLoader(ROWS, batch_size=4),
    "generator": lambda: iter(Stream()),
    **{act: lambda act=act: Failing(act) for act in ("raises", "none", "ragged", "lies")},
}
COLLATES: dict[str, Any] = {
    "named": named, "fields": fielded, "encoded": encoded, "fails": collate_that_raises
}  # fmt: skip


def task(dataset: str = "rows", collate: str | None = None) -> Task:
    """Three residual layers on a dataset, and with a collate, of the tables above."""
    has_names = dataset == "columns" or collate in ("fields", "encoded")
    inputs = (lambda batch: batch["x"]) if dataset == "columns" or collate == "encoded" else None
    if collate == "fields":
        inputs = lambda batch: batch.x  # noqa: E731
    return Task(
        layers=[Block(WIDTH).to(torch.float64) for _ in range(3)],
        loss=_by_name if has_names else _by_place,
        dataset=DATASETS[dataset](),
        collate=COLLATES[collate] if collate else None,
        inputs=inputs,
    )
