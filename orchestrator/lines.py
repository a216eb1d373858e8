"""Text files that grow by whole lines, on any storage; read and cut as one file each."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from orchestrator import storage
from orchestrator.retries import patiently

PART_BYTES = 2**20
"""An object store cannot append, so the last part is written anew with each call; a part that is
this large is followed by another: what a call costs does not grow with the file."""


def append_lines(url: str, lines: Iterable[str]) -> None:
    """Append lines, durable when this returns; all of them or none, and none twice.

    Locally a torn last line of a crash is cut off first. On other storages the lines may go into
    another part of the file: NAME, NAME.00001, NAME.00002, ...

    Raises:
        ValueError: If a line holds a line break.
        OSError: If the storage refuses.
    """
    wanted = list(lines)
    if any("\n" in line for line in wanted):
        raise ValueError("a line to append holds a line break; write one record a line")
    data = "".join(f"{line}\n" for line in wanted).encode()
    if not data:
        return
    parts = _parts(url)
    last = parts[-1] if parts else url
    path = storage.local_path(last)
    if path is not None:
        patiently(lambda: _append_local(path, data))
        return
    old = storage.read_bytes(last) if parts else b""
    if len(old) >= PART_BYTES:
        last, old = f"{url}.{len(parts):05d}", b""
    storage.write_bytes(last, old + data)


def read_lines(url: str) -> tuple[str, ...]:
    """Return the whole lines of a file, without a torn last one; none when it is absent."""
    return tuple(each_line(url))


def each_line(url: str) -> Iterator[str]:
    """As ``read_lines``, one after the other: no more of a local file is held, or of one part.

    Raises:
        ValueError: If a line is no text.
    """
    for part in _parts(url):
        path = storage.local_path(part)
        if path is None:
            yield from _lines_of(part)
            continue
        with path.open("rb") as file:
            yield from whole_lines(file)


def whole_lines(read: Iterable[bytes]) -> Iterator[str]:
    """The lines that end before the first torn one, without their line breaks.

    Whoever writes may finish a torn line between two reads: its other half is no line.

    Args:
        read: As a binary file gives its lines.

    Raises:
        ValueError: If a line is no text.
    """
    return (line[:-1].decode() for line in takewhile(lambda line: line.endswith(b"\n"), read))


def keep_lines(url: str, count: int) -> None:
    """Cut a file after its first ``count`` lines. The end goes first: a crash leaves no hole."""
    held = [(part, _lines_of(part)) for part in _parts(url)]
    for index in reversed(range(len(held))):
        part, lines = held[index]
        before = sum(len(lines) for _, lines in held[:index])
        if count >= before + len(lines):
            return
        if index and count <= before:
            storage.delete(part)
        else:
            kept = lines[: max(0, count - before)]
            storage.write_bytes(part, "".join(f"{line}\n" for line in kept).encode())


def _parts(url: str) -> tuple[str, ...]:
    """The URLs of a file's parts, in order."""
    folder, _, name = url.rpartition("/")
    part = re.compile(re.escape(name) + r"(\.\d{5})?")
    found = storage.list_names(folder or "/")
    return tuple(storage.join(folder or "/", other) for other in found if part.fullmatch(other))


def _lines_of(part: str) -> list[str]:
    data = storage.read_bytes(part)
    return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]


def _append_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        descriptor = file.fileno()
        _cut_torn_line(descriptor)
        size = os.fstat(descriptor).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        except OSError as error:
            with suppress(OSError):  # a whole line that stayed would be there twice after a retry
                os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(path)) from error


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    end = size
    while end:  # a torn line is short: look at the tail, block by block
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
