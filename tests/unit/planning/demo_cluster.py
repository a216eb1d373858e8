"""The demo's cluster in small: fast, three times slower, and slower still behind a thin link."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile
from orchestrator.core.cluster import ClusterState, Device, Link
from orchestrator.core.model import LayerTimes, ModelProfile
from orchestrator.core.slot import PlanningProblem

PRICES_USD_PER_S = {"fast": 3.67 / 60, "mid": 0.90 / 60, "slow": 0.35 / 60}
SLOWNESS = {"fast": 1.0, "mid": 3.0, "slow": 4.5}


def demo_devices(
    counts: Sequence[int] = (2, 2, 2), slowdowns: Mapping[str, float] | None = None
) -> list[Device]:
    """Fast and middling devices two to a node in z1, slow ones alone in z2."""
    devices = []
    for pool, count, per_node, zone in zip(
        ("fast", "mid", "slow"), counts, (2, 2, 1), ("z1", "z1", "z2"), strict=True
    ):
        devices += [
            make_device(
                f"{pool}-{i}",
                kind=pool,
                zone=zone,
                node_id=f"{pool}-node{i // per_node}",
                slowdown=(slowdowns or {}).get(f"{pool}-{i}", 1.0),
            )
            for i in range(count)
        ]
    return devices


def demo_links(devices: Sequence[Device]) -> list[Link]:
    """50 GB/s in a node, 3 GB/s in a zone, 20 MB/s and 2 ms between the zones."""
    inside = [Link(n, n, 1e-5, 50e9) for n in sorted({d.node_id for d in devices})]
    zones = [Link(z, z, 1e-4, 3e9) for z in ("z1", "z2")]
    between = [Link(a, b, 2e-3, 20e6, 1e-11) for a, b in (("z1", "z2"), ("z2", "z1"))]
    return [*inside, *zones, *between]


def demo_cluster(devices: Sequence[Device] | None = None) -> ClusterState:
    """The devices with their prices and links."""
    devices = demo_devices() if devices is None else devices
    return make_cluster(devices, price_usd_per_s=PRICES_USD_PER_S, links=demo_links(devices))


def demo_profile(num_layers: int = 10, *, call_share: float = 0.2) -> ModelProfile:
    """0.1 s for four samples on a fast device; ``call_share`` of it does not shrink with them."""
    weights = [0.3, *[1.0] * (num_layers - 2), 0.7]
    forward_s = [0.1 / 3 * w / sum(weights) for w in weights]
    base = make_profile(
        dict.fromkeys(SLOWNESS, forward_s),
        param_bytes=200e3,
        boundary_bytes=8192.0,
        stash_bytes=3e5,
        step_overhead_s=0.03,
    )
    backward_s, update_s = tuple(2 * t for t in forward_s), (0.0,) * num_layers
    times = [
        LayerTimes(pool, 1, size, tuple(forward_s), backward_s, update_s).scaled(
            slowness * (call_share + (1 - call_share) * size / 4)
        )
        for pool, slowness in SLOWNESS.items()
        for size in (1, 2, 4)
    ]
    return replace(base, times=tuple(times))


def demo_problem(
    cluster: ClusterState | None = None, profile: ModelProfile | None = None, **changes: object
) -> PlanningProblem:
    """64 samples in microbatches of at most 4."""
    problem = make_problem(
        cluster or demo_cluster(),
        profile or demo_profile(),
        batch_samples=64,
        microbatch_samples=4,
        budget_usd_per_s=4.0 / 60,
    )
    return replace(problem, **changes)  # type: ignore[arg-type]  # fields of the problem
