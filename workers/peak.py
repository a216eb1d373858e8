"""How many bytes torch allocates at most while something runs, as its own accounts tell."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workers.device import forget_peak, peak_memory_bytes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says a line at every start


class Peak:
    """``peak_bytes`` beyond what was allocated before; known once ``measured_peak`` has ended."""

    peak_bytes = 0


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """What this thread allocates on a device inside, what operations free themselves included.

    What was allocated before should live until the end: on a CPU its end is not seen.
    """
    found = Peak()
    forget_peak(device)
    if (before := peak_memory_bytes(device)) is not None:
        yield found
        found.peak_bytes = (peak_memory_bytes(device) or before) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        yield found
    found.peak_bytes = max(accumulate((size for _, size in allocations(told)), initial=0))


def allocations(told: profile) -> list[tuple[int, int]]:
    """Time in ns and bytes, below 0 where they were freed, of all that the profiled thread did."""
    results: Any = told.profiler
    events = results.kineto_results.events()
    found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return sorted(found, key=lambda one: one[0])
