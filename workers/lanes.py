"""Tensors over torch.distributed, from where they lie to where they go, beside a connection.

torch's own messages say nothing of themselves: the receiver must know shape and dtype beforehand.
So each message begins on the connection, with a header that says what comes; only the tensors
take the lane. The connection also tells at once when the peer is gone, which NCCL does not.
"""

import math
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from workers.device import CUDA
from workers.sums import watch

_NEVER = timedelta(days=365)
"""A wait of gloo that expires closes the pair; ``receive`` keeps its own time."""


class Lane(Protocol):
    """Tensors to and from one peer; one thread gives, another fills."""

    device: torch.device
    """Tensors that lie here take the lane, the others the connection."""

    def give(self, tensor: Tensor) -> None:
        """Send it; returns when it may be written again. Raises RuntimeError: the peer is gone."""

    def fill(self, tensor: Tensor) -> None:
        """Receive into it; returns when it is there. Raises RuntimeError: the peer is gone."""

    def close(self) -> None:
        """Free both threads as far as torch can. Safe to call twice."""


@dataclass(slots=True)
class GroupLane:
    """A Lane with one process group for each direction, made with the first tensor of it.

    Of one's own for each: NCCL works through the messages of a group one after another, and two
    that wait for each other's receiver would wait for ever.
    """

    rank: int
    peer: int
    store: Store
    timeout_s: float
    device: torch.device
    _groups: dict[tuple[int, int], Any] = field(default_factory=dict)
    _closing: threading.Lock = field(default_factory=threading.Lock)
    _open: bool = True

    def give(self, tensor: Tensor) -> None:
        """Send it, as bytes: not every dtype has a name there."""
        group = self._group(self.rank, self.peer)
        self._finish(group.send([_as_bytes(tensor)], 1, 0))

    def fill(self, tensor: Tensor) -> None:
        """Receive into it."""
        group = self._group(self.peer, self.rank)
        self._finish(group.recv([_as_bytes(tensor)], 0, 0))

    def _group(self, source: int, target: int) -> Any:
        group = self._groups.get((source, target))
        if group is None:
            store = PrefixStore(f"{source}-{target}", self.store)
            group = _made(self.device, store, int(self.rank == target), self.timeout_s)
            with self._closing:
                self._groups[source, target] = group
        if not self._open:
            raise RuntimeError("the lane is closed")
        return group

    def _finish(self, work: Any) -> None:
        if self.device.type == CUDA:
            watch(work, math.inf, lambda: self._open)
        else:
            work.wait(_NEVER)  # of gloo's messages nothing else says that they have ended

    def close(self) -> None:
        """Free both threads: NCCL's are broken off, gloo's end with the peer's."""
        with self._closing:
            self._open, groups = False, list(self._groups.values())
        for group in groups if self.device.type == CUDA else ():
            group.abort()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _made(device: torch.device, store: Store, place: int, timeout_s: float) -> Any:
    """The process group of one direction: the sender is 0, the receiver 1."""
    if device.type != CUDA:
        return ProcessGroupGloo(store, place, 2, timedelta(seconds=timeout_s))
    nccl = distributed_c10d.ProcessGroupNCCL  # not in every torch
    return nccl(store, place, 2, nccl.Options())
