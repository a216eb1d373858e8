"""Seeded planning problems: unlike devices, uneven layers, thin or thick links, tight memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from orchestrator.core.cluster import ClusterState, Device, Link, Offer
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.slot import PlanningProblem

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a problem is."""

    devices: int
    layers: int
    batch: int
    microbatch: int
    classes: int = 3  # of devices: kind, zone and memory
    devices_per_node: int = 1
    zones: int = 2
    team_sizes: tuple[int, ...] = (1,)


def random_problem(rng: np.random.Generator, size: Size, *, money: float = 0.0) -> PlanningProblem:
    """A problem of that size; ``money`` is Q/V' in units of the most samples per dollar."""
    kinds = _kinds(rng, size)
    cluster = _cluster(rng, size, kinds)
    model = _model(rng, size, sorted({kind for kind, _, _ in kinds}))
    usd_per_sample = min(
        offer.price_usd_per_s * (sum(t.forward_s) + sum(t.backward_s)) / t.microbatch
        for offer in cluster.offers
        for t in model.times
        if t.kind == offer.kind and t.team_size == 1
    )
    return PlanningProblem(
        cluster=cluster,
        model=model,
        batch_samples=size.batch,
        microbatch_samples=size.microbatch,
        schedules=("1f1b",),
        max_team=max(size.team_sizes),
        overlap=False,
        penalty_weight=1.0,
        backlog_usd=money / usd_per_sample,
        budget_usd_per_s=1.0,
        incumbent=None,
        seed=int(rng.integers(2**31)),
    )


def _kinds(rng: np.random.Generator, size: Size) -> list[tuple[str, str, int]]:
    """Kind, zone and memory of every class; a third of them are short of memory."""
    return [
        (f"k{i}", f"z{rng.integers(size.zones)}", int(rng.choice([16, 16, 1])) * GIB)
        for i in range(size.classes)
    ]


def _cluster(
    rng: np.random.Generator, size: Size, kinds: Sequence[tuple[str, str, int]]
) -> ClusterState:
    devices = []
    counts = np.zeros(size.classes, dtype=int)
    while counts.sum() * size.devices_per_node < size.devices:
        counts[rng.integers(size.classes)] += 1
    for c, (kind, zone, memory_bytes) in enumerate(kinds):
        devices += [
            Device(f"c{c}-{n}.{i}", f"c{c}", kind, f"c{c}-node{n}", zone, memory_bytes)
            for n in range(counts[c])
            for i in range(size.devices_per_node)
        ]
    latency_s, rate = 10 ** rng.uniform(-5, -2.5), 10 ** rng.uniform(6.5, 9.5)
    zones = [f"z{z}" for z in range(size.zones)]
    links = [
        Link(a, b, latency_s, rate, 1e-11) if a != b else Link(a, b, latency_s / 10, 10 * rate)
        for a, b in product(zones, repeat=2)
    ]
    if size.devices_per_node > 1:
        links += [
            Link(node, node, latency_s / 100, 100 * rate)
            for node in dict.fromkeys(d.node_id for d in devices)
        ]
    offers = tuple(
        Offer(f"c{c}", kind, zone, float(rng.uniform(0.3, 4)) / 3600)
        for c, (kind, zone, _) in enumerate(kinds)
        if counts[c]
    )
    return ClusterState(0.0, tuple(devices), tuple(links), offers)


def _model(rng: np.random.Generator, size: Size, kinds: Sequence[str]) -> ModelProfile:
    weights = rng.uniform(0.3, 1.5, size.layers)
    overhead = float(rng.choice([0.0, 0.2, 0.5]))  # of a microbatch, whatever its samples
    times = []
    for kind, team in product(kinds, size.team_sizes):
        slowness = float(10 ** rng.uniform(0, 0.8)) / team ** float(rng.uniform(0.6, 0.95))
        for m in microbatch_sizes(size.microbatch):
            forward_s = tuple(0.01 * slowness * weights * (overhead + (1 - overhead) * m))
            times.append(
                LayerTimes(
                    kind, team, m, forward_s, tuple(2 * t for t in forward_s),
                    (1e-3 * slowness,) * size.layers,
                )
            )  # fmt: skip
    params, boundary = rng.uniform(1e5, 4e6, size.layers), rng.uniform(1e3, 1e5, size.layers)
    stash = rng.uniform(1e5, 3e7, size.layers)
    sizes = [
        LayerSizes(q, tuple(params / q), tuple(boundary), tuple(stash / q)) for q in size.team_sizes
    ]
    return ModelProfile(
        model="random",
        dtype="fp32",
        layers=tuple(f"layer{i}" for i in range(size.layers)),
        sizes=tuple(sizes),
        times=tuple(times),
        step_overhead_s=0.005,
    )
