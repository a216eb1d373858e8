"""Devices of which less memory is free than their offers say: plans go by what is free."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from orchestrator.core.cluster import Device

MARGIN_RATIO = 0.10
"""Of a device's memory: as much as plans keep free may be in use from the start."""

GIB = 2**30


class _Info(Protocol):
    """What a worker says of its device's memory."""

    @property
    def free_bytes(self) -> float: ...

    @property
    def shares_memory(self) -> bool: ...


def with_free_memory(
    devices: Sequence[Device], infos: Mapping[str, _Info], say: Callable[[str], None]
) -> Iterator[Device]:
    """The devices, with less memory where another process or a limit has taken more than a margin.

    Processors of one machine share what is free there.

    Args:
        devices: As their offers have them.
        infos: What workers said, by device; of others nothing is known.
        say: Takes one line on a device that has less.
    """
    sharing = Counter(
        d.node_id for d in devices if d.device_id in infos and infos[d.device_id].shares_memory
    )
    for device in devices:
        info = infos.get(device.device_id)
        if info is None or info.free_bytes == inf:
            yield device
            continue
        free_bytes = int(info.free_bytes) // (sharing[device.node_id] if info.shares_memory else 1)
        if free_bytes >= (1 - MARGIN_RATIO) * device.memory_bytes:
            yield device
            continue
        say(
            f"warning: {device.device_id} has {free_bytes / GIB:.3g} GiB free of the "
            f"{device.memory_bytes / GIB:.3g} GiB that its offer says; plans go by that. End what "
            "else uses it, raise its limit, or write memory_gib in its offer"
        )
        yield replace(device, memory_bytes=max(1, free_bytes))
