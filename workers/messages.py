"""What travels between two workers: tensors behind a header that says their shapes."""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.device import host_tensor, ready, settled
from workers.lanes import Lane

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""The position is what travels: append, never reorder."""

HEADER = struct.Struct("<qdii")  # tag, virtual time, tensors, bytes of their description
_TENSOR = struct.Struct("<BB?")  # dtype, dimensions, by the lane; then one int64 a dimension
GOODBYE_TAG = -1


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Tensors as sent, on the CPU or from a lane, and the virtual time in s of their arrival.

    A virtual time of 0 is real time. ``read_s``: how long the bytes took to come, from the first
    to the last.
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


Parts = tuple[list[memoryview], list[torch.Tensor]]
"""Of a message: buffers for the connection, and tensors that take the lane behind them."""


def encoder(
    tensors: Sequence[torch.Tensor], tag: int, vtime: float, lane: Lane | None = None
) -> Callable[[], Parts]:
    """What makes the parts of a message, on the thread that writes them.

    It waits until the tensors are computed, which on a GPU may be later. The views share memory
    with (and keep alive) the tensors, or their copies in the machine's memory.

    Raises:
        ValueError: On a dtype that cannot travel.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"a tensor of dtype {tensor.dtype} cannot be sent; use one of {DTYPES}"
            )
    at, by_lane = ready(tensors), [_takes(lane, tensor) for tensor in tensors]

    def encoded() -> Parts:
        parts, given, description = [], [], bytearray()
        for tensor, apart in zip(settled(tensors, at, by_lane), by_lane, strict=True):
            description += _TENSOR.pack(DTYPES.index(tensor.dtype), tensor.dim(), apart)
            description += struct.pack(f"<{tensor.dim()}q", *tensor.shape)
            if apart:
                given.append(tensor)
            else:
                parts.append(_bytes_of(tensor))
        header = bytearray(HEADER.pack(tag, vtime, len(tensors), len(description)))
        return [memoryview(header), memoryview(description), *parts], given

    return encoded


def _takes(lane: Lane | None, tensor: torch.Tensor) -> bool:
    return lane is not None and tensor.device == lane.device and tensor.numel() > 0


def goodbye() -> Parts:
    """The last message."""
    return [memoryview(bytearray(HEADER.pack(GOODBYE_TAG, 0.0, 0, 0)))], []


def read_message(channel: Channel, lane: Lane | None = None) -> tuple[int, Message]:
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
    tensors, waiting, at = [], [], 0
    for _ in range(num_tensors):
        dtype, num_dims, apart = _TENSOR.unpack_from(description, at)
        shape = struct.unpack_from(f"<{num_dims}q", description, at + _TENSOR.size)
        at += _TENSOR.size + 8 * num_dims
        if apart:
            assert lane is not None, "both ends of a link have one, or none"
            tensor = torch.empty(shape, dtype=DTYPES[dtype], device=lane.device)
            waiting.append(tensor)
        else:
            tensor = host_tensor(shape, DTYPES[dtype])
            channel.read_into(_bytes_of(tensor))
        tensors.append(tensor)
    if lane is not None:
        for tensor in waiting:  # they come behind all that takes the connection
            lane.fill(tensor)
    return tag, Message(tuple(tensors), vtime, time.monotonic() - started_s)
