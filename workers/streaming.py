"""Datasets in files at any fsspec URL, of which only what is asked for is read."""

import operator
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from io import BytesIO
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator import storage
from orchestrator.credentials import masked

BLOCK_BYTES = 1 << 17
"""Of what is read at once: waiting for an object store takes longer than so many bytes."""

CACHE_BLOCKS = 512
"""The newest blocks are kept: 64 MiB."""

SCAN_BYTES = 1 << 23
"""Of what is read at once to find where lines begin."""

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
_LINE_BREAK = 10


class _Files:
    """Byte ranges of files, read in blocks. For one thread at a time."""

    def __init__(self, urls: Urls, name: str) -> None:
        given = _given(urls, f"{name}: urls")
        self.urls = [storage.absolute(url) for wanted in given for url in storage.matching(wanted)]
        self.names = [masked(url) for url in self.urls]  # for messages
        if not self.urls:
            raise ValueError(masked(f"{name}: there is no file at {', '.join(given) or 'no URL'}"))
        for url in self.names:
            if url.endswith(_COMPRESSED):
                raise ValueError(
                    f"{name}: {url} is compressed: no part can be read alone; unpack it"
                )
        self.sizes_bytes = [_size_bytes(url, name) for url in self.urls]
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def fetch(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Have (file, first byte, end) at hand: what is missing is read at once."""
        wanted = dict.fromkeys(key for span in spans for key in _blocks_of(*span))
        missing: dict[int, list[int]] = {}
        for file, block in wanted:
            if (file, block) in self._blocks:
                self._blocks.move_to_end((file, block))
            else:
                missing.setdefault(file, []).append(block)
        for file, blocks in missing.items():
            size = self.sizes_bytes[file]
            ranges = [(b * BLOCK_BYTES, min((b + 1) * BLOCK_BYTES, size)) for b in blocks]
            found = storage.read_ranges(self.urls[file], ranges)
            self._blocks.update(zip([(file, b) for b in blocks], found, strict=True))
        while len(self._blocks) > max(CACHE_BLOCKS, len(wanted)):
            self._blocks.popitem(last=False)

    def read(self, file: int, first: int, end: int) -> bytes:
        """Bytes of one file."""
        self.fetch([(file, first, end)])
        data = b"".join(self._blocks[key] for key in _blocks_of(file, first, end))
        skipped = first % BLOCK_BYTES
        return data[skipped : skipped + end - first]


def _given(urls: Any, argument: str) -> list[str]:
    """Paths and URLs as a list of texts; ``argument``: for the message."""
    single = isinstance(urls, str | bytes | os.PathLike) or not isinstance(urls, Iterable)
    given = [urls] if single else list(urls)
    for url in given:
        if not (isinstance(url, str) and url.strip()) and not isinstance(url, os.PathLike):
            raise ValueError(f"{argument} has {url!r}; give a path, an fsspec URL, or several")
    return [os.fspath(url) for url in given]


def _size_bytes(url: str, name: str) -> int:
    try:
        return storage.size_bytes(url)
    except IsADirectoryError:
        raise ValueError(
            masked(f"{name}: {url} is a folder; write {url.rstrip('/')}/* for the files in it")
        ) from None


def _blocks_of(file: int, first: int, end: int) -> list[tuple[int, int]]:
    return [(file, block) for block in range(first // BLOCK_BYTES, -(-end // BLOCK_BYTES))]


class _Records(ABC):
    """A map-style dataset of records, each a range of bytes of one of several files."""

    def __init__(self, files: _Files, counts: Sequence[int]) -> None:
        self._files = files
        self._ends = list(accumulate(counts))  # of the files, in records

    def __len__(self) -> int:
        return self._ends[-1]

    def will_read(self, indices: Iterable[int]) -> None:
        """Fetch these records together; called before a batch's samples are asked for."""
        self._files.fetch(self._span(index) for index in indices)

    def _place(self, index: int) -> tuple[int, int]:
        """File, and record of it."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        file = bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    @abstractmethod
    def _span(self, index: int) -> tuple[int, int, int]:
        """File of a record, its first byte, and the one behind its last."""


class Lines(_Records):
    """The lines of text files (JSON lines, for instance), empty ones apart, as a dataset.

    ``Task.dataset = Lines("s3://bucket/train-*.jsonl", parse=json.loads)``. The files are read
    once, block by block, to find where lines begin; after that only what is asked for is.
    """

    def __init__(
        self,
        urls: Urls,
        parse: Callable[[str], Any] = str,
        *,
        encoding: str = "utf-8",
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        """Look for the lines.

        Args:
            urls: Paths or fsspec URLs; ``*`` stands for any name, in alphabetical order.
            parse: Makes a sample of a line, which comes without its line break.
            encoding: Of the text; one in which a line break is one byte, as in nearly all.
            index: A folder (path or URL) to keep in where lines begin, so that other workers and
                later runs need not read everything; a file of another size has another entry.

        Raises:
            ValueError: If there is no such file, or it is compressed; if an argument is none.
            TypeError: If ``parse`` is no function.
            OSError: If the storage refuses.
        """
        _check_encoding(encoding)
        if not callable(parse):
            raise TypeError(f"Lines: parse is {parse!r}; give a function that takes a line")
        if index is not None:
            (index,) = _given(index, "Lines: index")
        files = _Files(urls, "Lines")
        self._bounds = [
            _kept(index, url, size) for url, size in zip(files.urls, files.sizes_bytes, strict=True)
        ]
        super().__init__(files, [len(bounds) for bounds in self._bounds])
        self._parse, self._encoding = parse, encoding

    def _span(self, index: int) -> tuple[int, int, int]:
        file, line = self._place(index)
        first, end = self._bounds[file][line].tolist()
        return file, first, end

    def __getitem__(self, index: int) -> Any:
        file, first, end = self._span(index)
        data = self._files.read(file, first, end)
        if _LINE_BREAK in data:
            raise ValueError(
                f"Lines: {self._files.names[file]} has changed: bytes {first} to {end} are no line "
                "any more; leave files alone while they are read, and empty the folder of index"
            )
        place = f"{self._files.names[file]}, from byte {first} on"
        try:
            line = data.decode(self._encoding).removesuffix("\r")
        except UnicodeError as error:
            raise ValueError(
                f"Lines: {place}: {error}; give the encoding of the file, such as "
                "encoding='latin-1', or mend the line"
            ) from error
        try:
            return self._parse(line)
        except Exception as error:
            raise ValueError(f"{place}: {type(error).__name__}: {error}") from error


class Tokens(_Records):
    """Records of ``length`` tokens from files that are nothing but tokens of one size.

    Sample i is an int64 tensor; what is left at the end of a file is no record. With
    ``overlap=1`` each record's last token is the next one's first: inputs ``record[:-1]`` and
    targets ``record[1:]`` then leave no token out.
    """

    def __init__(
        self,
        urls: Urls,
        length: int,
        dtype: str = "uint16",
        *,
        overlap: int = 0,
    ) -> None:
        """Count the records.

        Args:
            urls: Paths or fsspec URLs; ``*`` stands for any name, in alphabetical order.
            length: Tokens of a record.
            dtype: Of a token, as numpy names it.
            overlap: Tokens that a record shares with the next one.

        Raises:
            ValueError: If there is no such file, it is no whole number of tokens, ``dtype`` is
                none of whole numbers, or another argument is none.
            OSError: If the storage refuses.
        """
        self._dtype = _token_type(dtype)
        length, overlap = _whole("length", length), _whole("overlap", overlap)
        self._length, self._stride = length, length - overlap
        if length < 1 or not 0 <= overlap < length:
            raise ValueError(
                f"Tokens: length {length} with overlap {overlap}; write 0 <= overlap < length"
            )
        files = _Files(urls, "Tokens")
        counts = []
        for url, size in zip(files.names, files.sizes_bytes, strict=True):
            tokens, rest = divmod(size, self._dtype.itemsize)
            if rest:
                raise ValueError(
                    f"Tokens: {url} has {size} bytes, no whole number of {dtype} tokens"
                )
            counts.append(max(0, (tokens - length) // self._stride + 1))
        super().__init__(files, counts)

    def _span(self, index: int) -> tuple[int, int, int]:
        file, record = self._place(index)
        size = self._dtype.itemsize
        first = record * self._stride * size
        return file, first, first + self._length * size

    def __getitem__(self, index: int) -> Tensor:
        data = self._files.read(*self._span(index))
        return torch.from_numpy(np.frombuffer(data, self._dtype).astype(np.int64))


def _check_encoding(encoding: Any) -> None:
    try:
        fits = b"\n".decode(encoding) == "\n"
    except (LookupError, TypeError, UnicodeError):
        fits = False
    if not fits:
        raise ValueError(
            f"Lines: encoding is {encoding!r}; write one that Python knows and in which a line "
            "break is one byte, such as utf-8 or latin-1"
        )


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"Tokens: {name} is {number!r}; write a whole number") from None


def _token_type(name: str) -> np.dtype:
    try:
        found = np.dtype(name)
    except TypeError:
        found = None
    if found is None or found.kind not in "iu":
        raise ValueError(
            f"Tokens: dtype is {name!r}; write a type of whole numbers, such as uint16 or uint32"
        )
    return found


def _find_lines(url: str, size_bytes: int) -> np.ndarray:
    """First byte and end of each line that is not empty, one row each."""
    breaks = [np.array([-1])]
    for first in range(0, size_bytes, SCAN_BYTES):
        (data,) = storage.read_ranges(url, [(first, min(first + SCAN_BYTES, size_bytes))])
        breaks.append(np.flatnonzero(np.frombuffer(data, np.uint8) == _LINE_BREAK) + first)
    ends = np.concatenate([*breaks[1:], [size_bytes]])
    firsts = np.concatenate([*breaks, [size_bytes]])[: len(ends)] + 1
    return np.stack([firsts, ends], axis=1)[firsts < ends]


def _kept(folder: str | None, url: str, size_bytes: int) -> np.ndarray:
    """Where the lines of a file are, from an entry of the folder where it is there and whole."""
    if folder is None:
        return _find_lines(url, size_bytes)
    name = sha256(f"{url} {size_bytes}".encode()).hexdigest()[:32]
    entry = storage.join(storage.absolute(folder), f"{name}.npy")
    try:
        bounds = np.load(BytesIO(storage.read_bytes(entry)), allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        pass
    else:
        if _are_bounds(bounds, size_bytes):
            return bounds
    found, file = _find_lines(url, size_bytes), BytesIO()
    np.save(file, found)
    storage.write_bytes(entry, file.getvalue())
    return found


def _are_bounds(found: Any, size_bytes: int) -> bool:
    """Whether these can be the lines of a file of this size."""
    if not isinstance(found, np.ndarray) or found.dtype != np.int64:
        return False
    if found.ndim != 2 or found.shape[1] != 2:
        return False
    ends = found.ravel()
    return not len(ends) or bool(
        ends[0] >= 0 and ends[-1] <= size_bytes and (np.diff(ends) > 0).all()
    )
