"""Small clusters, profiles and problems: every argument has a plain default."""

from collections.abc import Sequence

from orchestrator.core.cluster import ClusterState, Device, Link, Offer, Team
from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.core.training import ActivationCheckpointing

GIB = 2**30


def make_device(  # noqa: PLR0913 - a builder names every field
    device_id: str = "d-0",
    *,
    kind: str = "gpu",
    pool: str | None = None,
    node_id: str | None = None,
    zone: str = "z1",
    memory_bytes: int = 16 * GIB,
    slowdown: float = 1.0,
) -> Device:
    """A device whose pool is its id up to the dash, alone on a node of its own."""
    return Device(
        device_id=device_id,
        pool=pool or device_id.rsplit("-", 1)[0],
        kind=kind,
        node_id=node_id or f"{device_id}-node",
        zone=zone,
        memory_bytes=memory_bytes,
        slowdown=slowdown,
    )


def make_cluster(  # noqa: PLR0913 - a builder names every field
    devices: Sequence[Device],
    *,
    price_usd_per_s: float | dict[str, float] = 1e-3,
    links: Sequence[Link] | None = None,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = 1e12,
    egress_usd_per_byte: float = 0.0,
    now_s: float = 0.0,
) -> ClusterState:
    """Devices whose zones are all joined by one kind of link; a price, or one per pool."""
    zones = sorted({d.zone for d in devices})
    pools = {d.pool: d for d in devices}
    prices = (
        price_usd_per_s
        if isinstance(price_usd_per_s, dict)
        else dict.fromkeys(pools, float(price_usd_per_s))
    )
    if links is None:
        links = [
            Link(a, b, latency_s, bandwidth_bytes_per_s, egress_usd_per_byte if a != b else 0.0)
            for a in zones
            for b in zones
        ]
    offers = tuple(
        Offer(
            pool=name,
            kind=d.kind,
            zone=d.zone,
            price_usd_per_s=prices.get(name, 1e-3),
        )
        for name, d in pools.items()
    )
    return ClusterState(now_s=now_s, devices=tuple(devices), links=tuple(links), offers=offers)


def make_profile(  # noqa: PLR0913 - a builder names every field
    forward_s: dict[str, Sequence[float]] | None = None,
    *,
    num_layers: int = 4,
    microbatches: Sequence[int] = (1,),
    backward_ratio: float = 2.0,
    update_s: float = 0.0,
    param_bytes: float | Sequence[float] = 1e6,
    boundary_bytes: float | Sequence[float] = 0.0,
    stash_bytes: float | Sequence[float] = 0.0,
    optimizer_bytes_per_param_byte: float = 3.0,
    ties: tuple[tuple[int, ...], ...] = (),
    tie_bytes: tuple[float, ...] = (),
    step_overhead_s: float = 0.0,
) -> ModelProfile:
    """A profile with times per kind and layer for one sample, proportional to the microbatch."""
    forward_s = forward_s or {"gpu": [0.01] * num_layers}
    num_layers = len(next(iter(forward_s.values())))

    def column(value: float | Sequence[float]) -> tuple[float, ...]:
        return (float(value),) * num_layers if isinstance(value, int | float) else tuple(value)

    return ModelProfile(
        model="test",
        dtype="fp32",
        layers=tuple(f"layer{i}" for i in range(num_layers)),
        sizes=(LayerSizes(1, column(param_bytes), column(boundary_bytes), column(stash_bytes)),),
        times=tuple(
            LayerTimes(
                kind=kind,
                team_size=1,
                microbatch=m,
                forward_s=tuple(m * t for t in times),
                backward_s=tuple(m * backward_ratio * t for t in times),
                update_s=column(update_s),
            )
            for kind, times in forward_s.items()
            for m in microbatches
        ),
        ties=ties,
        tie_bytes=tie_bytes,
        optimizer_bytes_per_param_byte=optimizer_bytes_per_param_byte,
        step_overhead_s=step_overhead_s,
    )


def make_problem(  # noqa: PLR0913 - a builder names every field
    cluster: ClusterState,
    model: ModelProfile | None = None,
    *,
    batch_samples: int = 8,
    microbatch_samples: int = 1,
    schedules: tuple[str, ...] = ("1f1b",),
    overlap: bool = False,
    penalty_weight: float = 1.0,
    backlog_usd: float = 0.0,
    budget_usd_per_s: float = 1e-3,
    incumbent: Plan | None = None,
    memory_margin_ratio: float = 0.1,
    activation_checkpointing: ActivationCheckpointing = "auto",
    seed: int = 0,
) -> PlanningProblem:
    """A problem in which money does not count unless ``backlog_usd`` says so."""
    return PlanningProblem(
        cluster=cluster,
        model=model or make_profile(),
        batch_samples=batch_samples,
        microbatch_samples=microbatch_samples,
        schedules=schedules,
        max_team=1,
        overlap=overlap,
        penalty_weight=penalty_weight,
        backlog_usd=backlog_usd,
        budget_usd_per_s=budget_usd_per_s,
        incumbent=incumbent,
        memory_margin_ratio=memory_margin_ratio,
        activation_checkpointing=activation_checkpointing,
        seed=seed,
    )


def team_of(device: Device) -> Team:
    """The team of one device."""
    return Team(
        team_id=device.device_id,
        node_id=device.node_id,
        kind=device.kind,
        device_ids=(device.device_id,),
    )


def make_stages(devices: Sequence[Device], cuts: Sequence[int]) -> tuple[Stage, ...]:
    """One stage a device over layers ``cuts[s]`` to ``cuts[s + 1]``, with plain 1F1B's K_s."""
    count = len(devices)
    return tuple(
        Stage(team_of(d), cuts[s], cuts[s + 1], inflight=count - s) for s, d in enumerate(devices)
    )


def make_group(
    devices: Sequence[Device], cuts: Sequence[int], microbatches: Sequence[int]
) -> Group:
    """A pipeline over these devices."""
    return Group(make_stages(devices, cuts), tuple(microbatches))


def make_plan(*groups: Group, generation: int = 1, schedule: str = "1f1b") -> Plan:
    """A plan of these groups; none: idle."""
    return Plan(generation=generation, schedule=schedule, groups=groups)
