"""What a worker's process allocates while it runs steps: every byte that torch accounts for."""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from unittest.mock import patch
from weakref import finalize

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from workers import links, reduction
from workers.lanes import Lane
from workers.messages import Channel, Message, Parts, encoder, read_message
from workers.peak import allocations
from workers.worker import Worker

_Event = tuple[int, int]  # ns, bytes allocated (freed: below 0)


def run_measured(worker: Worker) -> int:
    """Peak bytes of a worker that runs to the end of its window."""
    elsewhere: list[_Event] = []  # in other threads, of which the profiler is not told
    here = threading.get_ident()
    flatten = reduction._flatten

    def reading(channel: Channel, lane: Lane | None = None) -> tuple[int, Message]:
        tag, message = read_message(channel, lane)
        for tensor in message.tensors:
            storage = tensor.untyped_storage()
            elsewhere.append((time.time_ns(), storage.nbytes()))
            finalize(storage, end, -storage.nbytes(), None)
        return tag, message

    def sending(
        tensors: Sequence[Tensor], tag: int, vtime: float, lane: Lane | None = None
    ) -> Callable[[], Parts]:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            finalize(storage, end, -storage.nbytes(), here)
        return encoder(tensors, tag, vtime, lane)

    def flattening(parameters: Sequence[nn.Parameter]) -> Tensor:
        flat = flatten(parameters)
        finalize(flat.untyped_storage(), end, -flat.untyped_storage().nbytes(), here)
        return flat

    def end(size: int, unless: int | None) -> None:
        if threading.get_ident() != unless:
            elsewhere.append((time.time_ns(), size))

    state = worker._holding.state
    layers = [state.layers[i] for i in state.held]
    held = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    before = sum(storages.values())
    with (
        patch.object(links, "read_message", reading),
        patch.object(links, "encoder", sending),
        patch.object(reduction, "_flatten", flattening),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told,
    ):
        worker.run()
    changes = [size for _, size in sorted([*allocations(told), *elsewhere])]
    return before + max(accumulate(changes, initial=0))
