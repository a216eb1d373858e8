"""Which devices a Ray cluster has: nodes, labels and accelerator types become priced devices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.control.backend import ClusterOptions, OfferOptions
from orchestrator.errors import ConfigError

KIND_LABEL, POOL_LABEL, ZONE_LABEL = "lyray.kind", "lyray.pool", "lyray.zone"
_ACCELERATOR = "accelerator_type:"

ACCELERATOR_KINDS: Mapping[str, str] = {
    "A100": "a100-40",
    "A100-40G": "a100-40",
    "A100-80G": "a100-80",
    "V100": "v100-16",
    "T4": "t4",
    "L4": "l4",
    "A10G": "a10g",
    "P100": "p100",
    "H100": "h100",
}
"""Accelerator type as Ray reports it, to the kind of the catalogue; any other in lower case."""


@dataclass(frozen=True, slots=True)
class FoundNode:
    """A living Ray node with devices of one kind, as its labels and resources say."""

    ray_node_id: str
    name: str
    kind: str
    pool: str | None
    zone: str | None
    num_devices: int
    num_gpus: int  # 0: its devices are processors, one worker each


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device of the run and the Ray node that its worker must start on."""

    device_id: str
    pool: str
    node_id: str
    ray_node_id: str
    num_gpus: int


def found_nodes(nodes: Iterable[Mapping[str, object]]) -> tuple[FoundNode, ...]:
    """Return the nodes that offer devices, from dictionaries as ``ray.nodes()`` returns them.

    A node counts when it is alive and has a label ``lyray.kind`` or GPUs whose accelerator
    type Ray reports. It has as many devices as GPUs; a labelled node without GPUs has as many
    as its resource ``lyray`` says, else one.

    Raises:
        ConfigError: If a node has GPUs but nothing says of which kind.
    """
    found = []
    for node in nodes:
        if not node.get("Alive"):
            continue
        labels, resources = _strings(node.get("Labels")), _amounts(node.get("Resources"))
        name = str(node.get("NodeName") or node["NodeID"])
        num_gpus = int(resources.get("GPU", 0))
        kind = labels.get(KIND_LABEL) or _accelerator_kind(labels, resources)
        if kind is None and num_gpus:
            raise ConfigError(
                f"Ray node {name} has {num_gpus} GPUs of unknown type; start it with "
                f"--labels {KIND_LABEL}=KIND,{POOL_LABEL}=POOL"
            )
        if kind is None:
            continue
        found.append(
            FoundNode(
                ray_node_id=str(node["NodeID"]),
                name=name,
                kind=kind,
                pool=labels.get(POOL_LABEL),
                zone=labels.get(ZONE_LABEL),
                num_devices=num_gpus or int(resources.get("lyray", 1)),
                num_gpus=num_gpus,
            )
        )
    return tuple(sorted(found, key=lambda n: (n.pool or "", n.kind, n.name, n.ray_node_id)))


def price_nodes(
    nodes: Sequence[FoundNode], options: ClusterOptions
) -> tuple[ClusterOptions, tuple[FoundDevice, ...]]:
    """Match found nodes with the offers that price them.

    Returns:
        The options with each offer's ``count`` and ``devices_per_node`` as found (offers
        without devices left out), and the devices: ids ``pool-index``, nodes in a fixed order.

    Raises:
        ConfigError: If there is no device, a device has no price, an offer fits more than one
            way, or the nodes of one pool hold unlike numbers of devices.
    """
    if not nodes:
        raise ConfigError(
            "cluster.source is 'ray', but no Ray node has GPUs or a label "
            f"{KIND_LABEL}; start nodes with --labels {KIND_LABEL}=KIND,{POOL_LABEL}=POOL"
        )
    by_pool: dict[str, list[FoundNode]] = {}
    for node in nodes:
        by_pool.setdefault(_offer_of(node, options.offers).pool, []).append(node)
    offers, devices = [], []
    for offer in options.offers:
        members = by_pool.get(offer.pool, [])
        if not members:
            continue
        sizes = {node.num_devices for node in members}
        if len(sizes) > 1:
            raise ConfigError(
                f"the nodes of pool {offer.pool!r} have {sorted(sizes)} devices; give "
                f"nodes of unlike size pools of their own (label {POOL_LABEL}, cluster.offers)"
            )
        offers.append(_as_found(offer, members))
        places = [(j, node) for j, node in enumerate(members) for _ in range(node.num_devices)]
        devices += [
            FoundDevice(
                device_id=f"{offer.pool}-{i}",
                pool=offer.pool,
                node_id=f"{offer.pool}-node{j}",
                ray_node_id=node.ray_node_id,
                num_gpus=1 if node.num_gpus else 0,
            )
            for i, (j, node) in enumerate(places)
        ]
    return replace(options, offers=tuple(offers)), tuple(devices)


def _offer_of(node: FoundNode, offers: Sequence[OfferOptions]) -> OfferOptions:
    """The offer that prices a node: by pool label, else the only one of its kind."""
    if node.pool is not None:
        fitting = [o for o in offers if o.pool == node.pool]
        wanted = f"pool {node.pool!r}"
        if fitting and fitting[0].kind != node.kind:
            raise ConfigError(
                f"Ray node {node.name} says kind {node.kind!r}, but cluster.offers prices pool "
                f"{node.pool!r} as kind {fitting[0].kind!r}; make them agree"
            )
    else:
        fitting = [o for o in offers if o.kind == node.kind]
        wanted = f"kind {node.kind!r}"
    if not fitting:
        raise ConfigError(
            f"Ray node {node.name} has {node.num_devices} device(s) of {wanted} without a price; "
            f"add an entry for it to cluster.offers"
        )
    if len(fitting) > 1:
        pools = ", ".join(repr(o.pool) for o in fitting)
        raise ConfigError(
            f"Ray node {node.name} of {wanted} fits the pools {pools}; "
            f"say which with its label {POOL_LABEL}"
        )
    return fitting[0]


def _as_found(offer: OfferOptions, members: Sequence[FoundNode]) -> OfferOptions:
    return replace(
        offer,
        count=sum(node.num_devices for node in members),
        devices_per_node=members[0].num_devices,
        zone=members[0].zone or offer.zone,
    )


def _accelerator_kind(labels: Mapping[str, str], resources: Mapping[str, float]) -> str | None:
    named = [r.removeprefix(_ACCELERATOR) for r in resources if r.startswith(_ACCELERATOR)]
    if label := labels.get("ray.io/accelerator-type"):
        named.append(label)
    if not named:
        return None
    longest = max(named, key=len)  # A100-40G says more than A100
    return ACCELERATOR_KINDS.get(longest, longest.lower())


def _strings(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _amounts(value: object) -> dict[str, float]:
    return {str(k): float(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
