"""In the processes of forked workers: a transport that counts the layers that are moved."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from workers.links import LinkTransport
from workers.moving import MOVE_TAGS
from workers.tcp import tcp_channels
from workers.transport import TRANSPORTS
from workers.worker import Worker

COUNTED = "counted"
"""Name of the transport, in every process that has imported this module."""

_SENT: list[tuple[int, int]] = []  # (layer, bytes) of every move


class _Counted(LinkTransport):
    """A transport that takes note of the layers that are sent."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int, **options: Any) -> None:
        super().send(tensors, dst, tag, **options)
        if tag >= MOVE_TAGS:
            _SENT.append((tag - MOVE_TAGS, sum(tensor.nbytes for tensor in tensors)))


def _counted(
    rank: int, world_size: int, store: Store, *, secret: bytes, timeout_s: float
) -> LinkTransport:
    channels = tcp_channels(rank, world_size, store, secret=secret, timeout_s=timeout_s)
    return _Counted(rank, channels)


TRANSPORTS[COUNTED] = _counted  # in every worker's process, which imports this module


def take_sent(worker: Worker) -> list[tuple[int, int]]:
    """In a worker's process: layers sent since the last call, with their bytes."""
    taken, _SENT[:] = list(_SENT), []
    return taken


def layer_bytes(worker: Worker) -> dict[int, int]:
    """In a worker's process: bytes of parameters, buffers and optimizer state by layer held."""
    if not worker._holding.has_begun:
        return {}
    state = worker._holding.state
    worker.checksums()  # takes what the optimizer holds
    return {
        layer: sum(tensor.nbytes for tensor in state.tensors(layer).values())
        for layer in state.held
    }
