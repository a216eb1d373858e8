"""What a worker's process allocates while it runs steps: every byte that torch accounts for.

torch's profiler tells what one thread allocates and frees. What others do is added here: messages
that a transport's threads read, and what this thread made and another one, of a transport or of
gloo, is the last to let go of.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import finalize

import torch
from torch.distributed.distributed_c10d import Store
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from workers.links import LinkTransport
from workers.messages import Channel
from workers.peak import allocations
from workers.tcp import tcp_channels
from workers.transport import TRANSPORTS
from workers.worker import Worker

WATCHED = "watched"
"""Name of the transport, in every process that has imported this module."""

_elsewhere: list[tuple[int, int]] = []
"""In threads that are not profiled: ns, and bytes allocated (freed: below 0)."""


def _ends(tensor: torch.Tensor, unless: int | None = None) -> None:
    """Take note of where a tensor's memory is freed, unless by the thread ``unless``."""

    def end() -> None:
        if threading.get_ident() != unless:
            _elsewhere.append((time.time_ns(), -size_bytes))

    storage = tensor.untyped_storage()
    size_bytes = storage.nbytes()
    finalize(storage, end)


class _WatchedChannel:
    """A channel that takes note of the tensors that are read from it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.close = channel, channel.close
        self.write = channel.write

    def read_into(self, buffer: memoryview) -> None:
        tensor = getattr(buffer.obj, "base", None)  # beneath the array that lends the buffer
        if isinstance(tensor, torch.Tensor):
            _elsewhere.append((time.time_ns(), tensor.untyped_storage().nbytes()))
            _ends(tensor)
        self._channel.read_into(buffer)


class _Watched(LinkTransport):
    """A transport that takes note of what it is given."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int, **options: Any) -> None:
        for tensor in tensors:
            _ends(tensor, threading.get_ident())
        super().send(tensors, dst, tag, **options)


def _watched(
    rank: int, world_size: int, store: Store, *, secret: bytes, timeout_s: float
) -> LinkTransport:
    channels = tcp_channels(rank, world_size, store, secret=secret, timeout_s=timeout_s)
    return _Watched(rank, {peer: _WatchedChannel(c) for peer, c in channels.items()})


TRANSPORTS[WATCHED] = _watched  # in every worker's process, which imports this module


class _Joined(TorchFunctionMode):
    """Takes note of tensors that are put together, gradients for their sum among them."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.cat:
            _ends(found, threading.get_ident())
        return found


def run_measured(worker: Worker) -> int:
    """Peak bytes, beyond what a worker holds, until the end of its window.

    Its transport is ``WATCHED``.
    """
    _elsewhere.clear()
    with (
        _Joined(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told,
    ):
        worker.run()
    changes = [size for _, size in sorted([*allocations(told), *_elsewhere])]
    return max(accumulate(changes, initial=0))
