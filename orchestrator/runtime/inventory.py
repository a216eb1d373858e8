"""Which devices a Ray cluster has: nodes, labels and accelerator types become priced devices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.control.backend import ClusterOptions, OfferOptions
from orchestrator.core.cluster import known_kinds
from orchestrator.core.products import product_kind
from orchestrator.errors import ConfigError

KIND_LABEL, POOL_LABEL, ZONE_LABEL = "lyray.kind", "lyray.pool", "lyray.zone"
POOL_RESOURCE = "lyray.pool."
"""How the custom resource begins that names a node's pool, one for every device: what Ray's
autoscaler can be asked for, and what its node types can have where they cannot have labels."""

_ACCELERATOR = "accelerator_type:"
_LABEL_IT = f"start it with --labels {KIND_LABEL}=KIND,{POOL_LABEL}=POOL"

ACCELERATOR_KINDS: Mapping[str, str] = {
    "A100": "a100-40",
    "A100-40G": "a100-40",
    "A100-80G": "a100-80",
    "V100": "v100-16",
    "T4": "t4",
    "L4": "l4",
    "L40S": "l40s",
    "A10G": "a10g",
    "P100": "p100",
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "GeForce-RTX-3090": "rtx-3090",
    "GeForce-RTX-4090": "rtx-4090",
}
"""Accelerator type as Ray reports it, to the kind of the catalogue; any other in lower case.

It leaves open what the driver's name and memory say, which count first (``core/products.toml``).
"""


@dataclass(frozen=True, slots=True)
class Product:
    """A GPU as its driver calls it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class FoundNode:
    """A living Ray node with devices of one kind, as its labels and resources say."""

    ray_node_id: str
    name: str
    kind: str | None  # None: that of its pool's offer
    pool: str | None
    zone: str | None
    num_devices: int
    num_gpus: int  # 0: its devices are processors, one worker each
    num_threads: int  # of each device's worker
    resource: str | None = None  # of which each device's worker takes one


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device of the run and the Ray node that its worker must start on."""

    device_id: str
    pool: str
    node_id: str
    ray_node_id: str
    num_gpus: int
    num_threads: int
    resource: str | None = None


@dataclass(slots=True)
class Numbering:
    """Which place in its pool each Ray node has: a node keeps its own while it is there.

    A node that comes for one that went takes the lowest free place, and with it the names of
    its devices: names do not pile up, however often spot nodes are replaced.
    """

    _places: dict[str, dict[str, int]] = field(default_factory=dict)  # by pool, by Ray node

    def place(self, pool: str, present: Sequence[str]) -> dict[str, int]:
        """Places of the nodes of a pool that are there now, by Ray node id."""
        known = self._places.get(pool, {})
        places = {node: known[node] for node in present if node in known}
        free = (i for i in range(len(known) + len(present) + 1) if i not in places.values())
        for node in present:
            if node not in places:
                places[node] = next(free)
        self._places[pool] = places
        return places


def unlabelled_gpus(nodes: Iterable[Mapping[str, object]]) -> dict[str, int]:
    """Number of GPUs by Ray node, of the living nodes without a label ``lyray.kind``."""
    return {
        str(node["NodeID"]): int(_amounts(node.get("Resources")).get("GPU", 0))
        for node in nodes
        if node.get("Alive")
        and KIND_LABEL not in _strings(node.get("Labels"))
        and int(_amounts(node.get("Resources")).get("GPU", 0))
    }


def found_nodes(
    nodes: Iterable[Mapping[str, object]],
    refuse: Callable[[str], None] | None = None,
    products: Mapping[str, tuple[Product, ...] | None] | None = None,
) -> tuple[FoundNode, ...]:
    """Return the nodes that offer devices, from dictionaries as ``ray.nodes()`` returns them.

    A node counts when it is alive and has a label ``lyray.kind``, a custom resource
    ``lyray.pool.POOL``, or GPUs of a known kind, as their driver calls them, else as the
    accelerator type says that Ray reports. It has as many devices as of that resource, or as
    GPUs; a labelled node without either has as many as its resource ``lyray`` says, else one.
    They share the CPUs that the node offers to Ray.

    Args:
        nodes: The dictionaries.
        refuse: Told of nodes that cannot be used, and why; None: the first such node raises.
        products: GPUs by Ray node, of nodes that were asked; None: it has not answered yet, and
            is passed over.

    Raises:
        ConfigError: If a node has GPUs of no known kind, or of several.
    """
    found = []
    for node in nodes:
        if not node.get("Alive"):
            continue
        labels, resources = _strings(node.get("Labels")), _amounts(node.get("Resources"))
        name = str(node.get("NodeName") or node["NodeID"])
        num_gpus = int(resources.get("GPU", 0))
        told = (products or {}).get(str(node["NodeID"]), ())
        if told is None:
            continue
        try:
            pool = _pool(name, labels, resources)
            kind = labels.get(KIND_LABEL) or _gpu_kind(name, told, labels, resources)
        except ConfigError as error:
            if refuse is None:
                raise
            refuse(str(error))
            continue
        resource = f"{POOL_RESOURCE}{pool}" if f"{POOL_RESOURCE}{pool}" in resources else None
        if kind is None and resource is None:
            continue
        num_devices = num_gpus or int(resources.get(resource or "lyray", 1))
        found.append(
            FoundNode(
                ray_node_id=str(node["NodeID"]),
                name=name,
                kind=kind,
                pool=pool,
                zone=labels.get(ZONE_LABEL),
                num_devices=num_devices,
                num_gpus=num_gpus,
                num_threads=max(1, int(resources.get("CPU", 1)) // max(1, num_devices)),
                resource=resource,
            )
        )
    return tuple(sorted(found, key=lambda n: (n.pool or "", n.kind or "", n.name, n.ray_node_id)))


def price_nodes(
    nodes: Sequence[FoundNode], options: ClusterOptions, numbering: Numbering | None = None
) -> tuple[ClusterOptions, tuple[FoundDevice, ...]]:
    """Match found nodes with the offers that price them.

    Args:
        nodes: What is there.
        options: The offers.
        numbering: Remembers the names, where nodes may come and go later.

    Returns:
        The options with each offer's ``count`` and ``devices_per_node`` as found (offers
        without devices left out, but for those whose first can be asked for), and the devices:
        ids ``pool-index``, nodes in a fixed order.

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
    offers: list[OfferOptions] = []
    devices: list[FoundDevice] = []
    for offer in options.offers:
        members = by_pool.get(offer.pool, [])
        if not members:
            if options.autoscaler.enabled and offer.max_count:
                offers.append(replace(offer, count=0))
            continue
        sizes = {node.num_devices for node in members}
        if len(sizes) > 1:
            raise ConfigError(
                f"the nodes of pool {offer.pool!r} have {sorted(sizes)} devices; give "
                f"nodes of unlike size pools of their own (label {POOL_LABEL}, cluster.offers)"
            )
        offers.append(_as_found(offer, members))
        devices += _devices(offer.pool, members, numbering or Numbering())
    return replace(options, offers=tuple(offers)), tuple(devices)


def number_nodes(
    nodes: Sequence[FoundNode],
    options: ClusterOptions,
    numbering: Numbering,
    refuse: Callable[[str], None],
) -> tuple[FoundDevice, ...]:
    """The devices of a cluster that has changed; those in use before keep their names.

    Args:
        nodes: What is there now.
        options: As ``price_nodes`` returned them at the start.
        numbering: As it left them.
        refuse: Told of nodes that cannot be used, and why: a running job does not end for it.
    """
    by_pool: dict[str, list[FoundNode]] = {}
    for node in nodes:
        try:
            offer = _offer_of(node, options.offers)
        except ConfigError as error:
            refuse(str(error))
            continue
        if node.num_devices != offer.devices_per_node:
            refuse(
                f"Ray node {node.name} has {node.num_devices} devices, the others of pool "
                f"{offer.pool!r} have {offer.devices_per_node}"
                if offer.count
                else f"Ray node {node.name} has {node.num_devices} devices; write that as "
                f"devices_per_node of pool {offer.pool!r}, where it is {offer.devices_per_node}"
            )
            continue
        by_pool.setdefault(offer.pool, []).append(node)
    return tuple(
        device for pool, members in by_pool.items() for device in _devices(pool, members, numbering)
    )


def _devices(
    pool: str, members: Sequence[FoundNode], numbering: Numbering
) -> Iterable[FoundDevice]:
    """The devices of a pool whose nodes are all alike."""
    places = numbering.place(pool, [node.ray_node_id for node in members])
    for node in sorted(members, key=lambda member: places[member.ray_node_id]):
        place = places[node.ray_node_id]
        for i in range(node.num_devices):
            yield FoundDevice(
                device_id=f"{pool}-{place * node.num_devices + i}",
                pool=pool,
                node_id=f"{pool}-node{place}",
                ray_node_id=node.ray_node_id,
                num_gpus=1 if node.num_gpus else 0,
                num_threads=node.num_threads,
                resource=node.resource,
            )


def _offer_of(node: FoundNode, offers: Sequence[OfferOptions]) -> OfferOptions:
    """The offer that prices a node: by pool label, else the only one of its kind."""
    if node.pool is not None:
        fitting = [o for o in offers if o.pool == node.pool]
        wanted = f"pool {node.pool!r}"
        if fitting and node.kind not in (None, fitting[0].kind):
            raise ConfigError(
                f"Ray node {node.name} says kind {node.kind!r}, but cluster.offers prices pool "
                f"{node.pool!r} as kind {fitting[0].kind!r}; make them agree"
            )
    else:
        fitting = [o for o in offers if o.kind == node.kind]
        wanted = f"kind {node.kind!r}"
    if not fitting:
        sheet = known_kinds().get(node.kind or "")
        usual = f" (usual: {'; '.join(map(str, sheet.prices))})" if sheet and sheet.prices else ""
        raise ConfigError(
            f"Ray node {node.name} has {node.num_devices} device(s) of {wanted} without a price; "
            f"add an entry for it to cluster.offers{usual}"
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


def _pool(name: str, labels: Mapping[str, str], resources: Mapping[str, float]) -> str | None:
    """The pool that a label names, or a custom resource of which each device has one."""
    named, num_gpus = _named_pools(resources), int(resources.get("GPU", 0))
    label = labels.get(POOL_LABEL)
    if len({*named, *([label] if label else [])}) > 1:
        raise ConfigError(
            f"Ray node {name} is of several pools ({', '.join(sorted({*named, label or named[0]}))}"
            f"); give it one, by its label {POOL_LABEL} and its resource {POOL_RESOURCE}POOL"
        )
    for pool in named:
        amount = int(resources[f"{POOL_RESOURCE}{pool}"])
        if num_gpus and amount != num_gpus:
            raise ConfigError(
                f"Ray node {name} has {num_gpus} GPUs and {amount} of its resource "
                f"{POOL_RESOURCE}{pool}; give it as many"
            )
    return label or next(iter(named), None)


def _named_pools(resources: Mapping[str, float]) -> list[str]:
    return [r.removeprefix(POOL_RESOURCE) for r in resources if r.startswith(POOL_RESOURCE)]


def _gpu_kind(
    name: str,
    told: Sequence[Product],
    labels: Mapping[str, str],
    resources: Mapping[str, float],
) -> str | None:
    """The kind of an unlabelled node's GPUs; None: it has none, nor any other accelerator."""
    kind, num_gpus = _told_kind(name, told), int(resources.get("GPU", 0))
    kind = kind or _accelerator_kind(labels, resources)
    if kind is None and num_gpus and not _named_pools(resources):
        raise ConfigError(f"Ray node {name} has {num_gpus} GPUs of unknown type; {_LABEL_IT}")
    return kind


def _told_kind(name: str, told: Sequence[Product]) -> str | None:
    """The kind of all GPUs of a node, as the driver calls them; None: it told nothing."""
    if not told:
        return None
    kinds = {product.name: product_kind(product.name, product.memory_bytes) for product in told}
    unknown = [product for product, kind in kinds.items() if kind is None]
    if unknown:
        raise ConfigError(
            f"Ray node {name} has a {unknown[0]!r}, which is not in the catalogue; {_LABEL_IT}, "
            "where KIND is the kind of its offer, and give that offer speed_ratio and memory_gib"
        )
    if len(set(kinds.values())) > 1:
        raise ConfigError(
            f"Ray node {name} has unlike GPUs ({', '.join(sorted(kinds))}); start one Ray node for "
            "each kind, with CUDA_VISIBLE_DEVICES and --num-gpus"
        )
    return next(iter(kinds.values()))


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
