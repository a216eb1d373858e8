"""Random plans for the exactness tests: unlike splits and shares, short last microbatches."""

import numpy as np

from benchmarks.fleet import make_plan
from orchestrator.core.plan import Plan

Chain = tuple[list[tuple[str, int]], tuple[int, ...]]


def random_plan(
    rng: np.random.Generator,
    devices: tuple[str, ...],
    *,
    num_layers: int,
    batch: int,
    generation: int = 1,
) -> Plan:
    """Draw 1-4 groups of 1-5 stages on some of the devices, in an order of their own.

    Every group has its own microbatch size, its last microbatch may be shorter, and with
    several groups one has a single microbatch.
    """
    num_groups = int(rng.integers(1, 5))
    order = [str(d) for d in rng.permutation(devices)]
    while True:
        sizes = [int(n) for n in rng.integers(1, min(5, num_layers) + 1, num_groups)]
        if sum(sizes) <= len(devices):
            break
    cuts = np.sort(rng.choice(np.arange(1, batch), num_groups - 1, replace=False))
    shares = np.diff([0, *cuts, batch])
    groups: list[Chain] = []
    single = int(rng.integers(num_groups))
    for index, (num_stages, share) in enumerate(zip(sizes, shares, strict=True)):
        borders = np.sort(rng.choice(np.arange(1, num_layers), num_stages - 1, replace=False))
        widths = np.diff([0, *borders, num_layers])
        chain = [(order.pop(), int(width)) for width in widths]
        size = int(share) if index == single and num_groups > 1 else int(rng.integers(1, share + 1))
        full, rest = divmod(int(share), size)
        groups.append((chain, (size,) * full + ((rest,) if rest else ())))
    return make_plan(
        groups,
        generation=generation,
        schedule=str(rng.choice(["1f1b", "gpipe"])),
        extra=int(rng.integers(0, 3)),
    )
