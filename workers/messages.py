"""What travels between two workers: tensors behind a header that says their shapes."""

import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""The position is what travels: append, never reorder."""

HEADER = struct.Struct("<qdii")  # tag, virtual time, tensors, bytes of their description
_TENSOR = struct.Struct("<BB")  # dtype, dimensions; then one int64 a dimension
GOODBYE_TAG = -1


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Tensors on the CPU, as sent, and the virtual time in s of their arrival (0: real time).

    ``read_s``: how long the bytes took to come, from the first to the last.
    """

    tensors: tuple[torch.Tensor, ...]
    vtime: float = 0.0
    read_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class Channel(Protocol):
    """An ordered stream of bytes to and from one peer; one thread reads, another writes."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Send all the bytes. Raises OSError or RuntimeError when the peer is gone."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer. Raises OSError, EOFError or RuntimeError when the peer is gone."""

    def close(self) -> None:
        """Free both threads as far as possible. Safe to call twice."""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # A view as bytes needs no copy and works for every dtype; empty tensors have no buffer.
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer


def encode(tensors: Iterable[torch.Tensor], tag: int, vtime: float) -> list[memoryview]:
    """Buffers to write for a message; the views share memory with (and keep alive) the tensors.

    Raises:
        ValueError: On a dtype that cannot travel.
    """
    parts, description, num_tensors = [], bytearray(), 0
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"a tensor of dtype {tensor.dtype} cannot be sent; use one of {DTYPES}"
            )
        flat = tensor.detach().cpu().contiguous()
        description += _TENSOR.pack(DTYPES.index(flat.dtype), flat.dim())
        description += struct.pack(f"<{flat.dim()}q", *flat.shape)
        parts.append(_bytes_of(flat))
        num_tensors += 1
    header = bytearray(HEADER.pack(tag, vtime, num_tensors, len(description)))
    return [memoryview(header), memoryview(description), *parts]


def read_message(channel: Channel) -> tuple[int, Message]:
    """Block for the next message and return its tag and content.

    Raises:
        EOFError: When the peer said goodbye.
        OSError: When the connection broke.
    """
    header = bytearray(HEADER.size)
    channel.read_into(memoryview(header))
    started_s = time.monotonic()
    tag, vtime, num_tensors, description_bytes = HEADER.unpack(header)
    if tag == GOODBYE_TAG:
        raise EOFError("it closed its transport")
    description = bytearray(description_bytes)
    channel.read_into(memoryview(description))
    tensors, at = [], 0
    for _ in range(num_tensors):
        dtype, num_dims = _TENSOR.unpack_from(description, at)
        shape = struct.unpack_from(f"<{num_dims}q", description, at + _TENSOR.size)
        at += _TENSOR.size + 8 * num_dims
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        if prod(shape):
            channel.read_into(_bytes_of(tensor))
        tensors.append(tensor)
    return tag, Message(tuple(tensors), vtime, time.monotonic() - started_s)
