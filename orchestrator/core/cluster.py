"""The cluster as planning sees it: devices, teams, priced offers, links, and one state of all."""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Literal

Billed = Literal["while_used", "while_present"]

PRICE_JUMP = 5.0
"""Largest sudden factor of a price that is believed at once (docs/model.md, section 6): what the
estimator doubts and the hard cap counts with is the same."""


@dataclass(frozen=True, slots=True)
class UsualPrice:
    """What a device of a kind cost somewhere on some day: a hint, never what a run is billed."""

    provider: str
    market: Literal["on demand", "spot"]
    usd_per_hour: float
    date: str  # YYYY-MM-DD, or YYYY-MM
    source: str

    def __str__(self) -> str:
        return f"${self.usd_per_hour:.2f}/h {self.market} at {self.provider} ({self.date})"


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What a data sheet says of one kind of device; a measured profile overrides it."""

    kind: str
    fp32_flop_per_s: float
    fp16_flop_per_s: float
    bf16_flop_per_s: float | None  # None: the kind has no bf16 units
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float | None = None
    source: str = ""
    prices: tuple[UsualPrice, ...] = ()

    def peak_flop_per_s(self, precision: str) -> float:
        """Peak rate at ``fp32``, ``fp16`` or ``bf16``; fp32's where the kind lacks the units."""
        peaks = {
            "fp32": self.fp32_flop_per_s,
            "fp16": self.fp16_flop_per_s,
            "bf16": self.bf16_flop_per_s,
        }
        return peaks[precision] or self.fp32_flop_per_s


@cache
def known_kinds() -> Mapping[str, DeviceKind]:
    """The built-in catalogue, kind name to data sheet (``core/devices.toml``)."""
    table = tomllib.loads((files("orchestrator.core") / "devices.toml").read_text("utf-8"))
    for row in table.values():
        row["prices"] = tuple(UsualPrice(**price) for price in row.get("prices", ()))
    return {
        name: DeviceKind(**{"kind": name, "bf16_flop_per_s": None, **row})
        for name, row in table.items()
    }


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. ``slowdown``: measured time over its own predicted time, 1 if healthy.

    ``input_s_per_sample`` is what its first or last stage takes to draw a sample, whatever its
    layers, beyond what hardly counts.
    ``surcharge_usd_per_s`` counts in J beside the price and is on no bill: what a block costs
    that would begin, negative for time paid ahead (docs/model.md, section 3.7). So does
    ``entry_usd_per_sample`` for every sample whose first stage it runs (section 5.2).
    """

    device_id: str
    pool: str
    kind: str
    node_id: str
    zone: str
    memory_bytes: int
    slowdown: float = 1.0
    input_s_per_sample: float = 0.0
    surcharge_usd_per_s: float = 0.0
    entry_usd_per_sample: float = 0.0

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ValueError(
                f"device {self.device_id!r} has memory_bytes {self.memory_bytes}; it must be "
                "positive"
            )
        if not (self.slowdown > 0 and math.isfinite(self.slowdown)):
            raise ValueError(
                f"device {self.device_id!r} has slowdown {self.slowdown}; it must be positive"
            )


def pool_of(device_id: str) -> str:
    """The pool of a device that may be gone: ids are a pool's name, a dash and a number."""
    return device_id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Team:
    """One to eight like devices of one node that run a stage; a plain device is a team of one."""

    team_id: str
    node_id: str
    kind: str
    device_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.device_ids) <= 8 or len(set(self.device_ids)) != len(self.device_ids):
            raise ValueError(
                f"team {self.team_id!r} has devices {self.device_ids}; it needs one to eight "
                "distinct ones"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.device_ids)


def make_team(devices: Iterable[Device]) -> Team:
    """Return the team of these devices.

    Raises:
        ValueError: If they are not of one kind and one node.
    """
    members = tuple(devices)
    kinds, nodes = {d.kind for d in members}, {d.node_id for d in members}
    if len(kinds) != 1 or len(nodes) != 1:
        raise ValueError(
            f"a team needs like devices of one node, not kinds {sorted(kinds)} on nodes "
            f"{sorted(nodes)}"
        )
    ids = tuple(sorted(d.device_id for d in members))
    return Team(
        team_id="+".join(ids), node_id=members[0].node_id, kind=members[0].kind, device_ids=ids
    )


@dataclass(frozen=True, slots=True)
class Offer:
    """The price of one pool of like devices, from ``valid_from_s`` on."""

    pool: str
    kind: str
    zone: str
    price_usd_per_s: float  # per device and second of the run's own clock
    spot: bool = False
    minimum_s: float = 0.0
    quantum_s: float = 1.0
    valid_from_s: float = 0.0
    max_price_usd_per_s: float | None = None
    billed: Billed = "while_used"
    discount_ratio: float = 1.0  # of the listed price, that is paid
    read_s: float | None = None  # when a feed last gave the price; None: it needs no reading

    def __post_init__(self) -> None:
        if not (self.price_usd_per_s > 0 and math.isfinite(self.price_usd_per_s)):
            raise ValueError(
                f"pool {self.pool!r} is priced {self.price_usd_per_s} $/s; a price must be "
                "positive and finite"
            )

    def listed_at(self, listed_usd_per_s: float, valid_from_s: float) -> "Offer":
        """The offer at another listed price, of which its discount is taken."""
        price = listed_usd_per_s * self.discount_ratio
        return replace(self, price_usd_per_s=price, valid_from_s=valid_from_s)

    @property
    def is_too_dear(self) -> bool:
        """Whether the price is above the most that the user pays."""
        most = self.max_price_usd_per_s
        return most is not None and self.price_usd_per_s > most

    @property
    def upper_usd_per_s(self) -> float:
        """Most that the price may be after a jump: the declared limit, else ``PRICE_JUMP`` times.

        Source: docs/model.md, section 4.5.
        """
        if self.max_price_usd_per_s is not None:
            return max(self.price_usd_per_s, self.max_price_usd_per_s)
        return self.price_usd_per_s * PRICE_JUMP


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way network path between two nodes, or any two nodes of two pools or two zones.

    ``source`` and ``target`` name nodes, pools or zones, so these must have unlike names;
    ``source == target`` is the path inside the node, pool or zone. ``points`` (message bytes,
    bytes/s), when given, replace the constant bandwidth; between points the rate is
    interpolated in the logarithm of the size.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float
    egress_usd_per_byte: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not (
            self.latency_s >= 0 and self.bandwidth_bytes_per_s > 0 and self.egress_usd_per_byte >= 0
        ):
            raise ValueError(
                f"link {self.source} -> {self.target}: latency {self.latency_s} s, bandwidth "
                f"{self.bandwidth_bytes_per_s} bytes/s, egress {self.egress_usd_per_byte} $/byte; "
                "latency and egress must not be negative, bandwidth must be positive"
            )
        if any(
            later[0] <= earlier[0]
            for earlier, later in zip(self.points, self.points[1:], strict=False)
        ):
            raise ValueError(
                f"link {self.source} -> {self.target}: points must grow in bytes, not {self.points}"
            )

    @property
    def figures(self) -> tuple[object, ...]:
        """All but the names of its ends: paths that share them serve alike."""
        return self.latency_s, self.bandwidth_bytes_per_s, self.egress_usd_per_byte, self.points

    def scaled(self, bandwidth_ratio: float) -> "Link":
        """The link with another bandwidth; latency stays."""
        if bandwidth_ratio == 1:
            return self
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * bandwidth_ratio,
            points=tuple((size, rate * bandwidth_ratio) for size, rate in self.points),
        )

    def rate_bytes_per_s(self, size_bytes: float) -> float:
        """Bandwidth at a message size."""
        if not self.points:
            return self.bandwidth_bytes_per_s
        index = bisect_left(self.points, (size_bytes, 0.0))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (low, low_rate), (high, high_rate) = self.points[index - 1], self.points[index]
        weight = math.log(size_bytes / low) / math.log(high / low)
        return float(low_rate * (high_rate / low_rate) ** weight)

    def occupied_s(self, size_bytes: float) -> float:
        """Time the link is busy with ``size_bytes``; latency delays, it does not occupy."""
        return size_bytes / self.rate_bytes_per_s(size_bytes) if size_bytes else 0.0

    def transfer_s(self, size_bytes: float) -> float:
        """Time to move ``size_bytes`` over the idle link (alpha-beta model)."""
        return self.latency_s + self.occupied_s(size_bytes)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What is present, what it costs and how it is joined, at ``now_s`` of the run's clock."""

    now_s: float
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    offers: tuple[Offer, ...]
    _devices_by_id: dict[str, Device] = field(init=False, repr=False, compare=False)
    _links_by_ends: dict[tuple[str, str], Link] = field(init=False, repr=False, compare=False)
    _offers_by_pool: dict[str, Offer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_devices_by_id", {d.device_id: d for d in self.devices})
        object.__setattr__(self, "_links_by_ends", {(k.source, k.target): k for k in self.links})
        object.__setattr__(self, "_offers_by_pool", {o.pool: o for o in self.offers})
        if len(self._devices_by_id) != len(self.devices):
            raise ValueError("two devices share an id; ids must be unique")
        for device in self.devices:
            if device.pool not in self._offers_by_pool:
                raise ValueError(
                    f"device {device.device_id!r} of pool {device.pool!r} has no price; add "
                    "the pool to cluster.offers"
                )

    def __reduce__(self) -> tuple[object, ...]:
        return (ClusterState, (self.now_s, self.devices, self.links, self.offers))

    def device(self, device_id: str) -> Device:
        """The present device of that id. Raises KeyError when it has left."""
        return self._devices_by_id[device_id]

    def has(self, device_id: str) -> bool:
        """Whether the device is present."""
        return device_id in self._devices_by_id

    def offer(self, pool: str) -> Offer:
        """The price in force for a pool."""
        return self._offers_by_pool[pool]

    def price_usd_per_s(self, device_id: str) -> float:
        """What one second of this device costs now."""
        return self.offer(self.device(device_id).pool).price_usd_per_s

    @property
    def standing_usd_per_s(self) -> float:
        """What the devices cost that are billed while present, used or not."""
        return math.fsum(
            self.price_usd_per_s(device.device_id)
            for device in self.devices
            if self.offer(device.pool).billed == "while_present"
        )

    def link(self, source: Device, target: Device) -> Link:
        """The path between two devices: that of their nodes, else of their pools, their zones.

        Raises:
            ValueError: If nobody described it.
        """
        links = self._links_by_ends
        found = (
            links.get((source.node_id, target.node_id))
            or links.get((source.pool, target.pool))
            or links.get((source.zone, target.zone))
        )
        if found is None:
            raise ValueError(
                f"no link from {_place(source)} to {_place(target)}; add one of "
                f"{_rules(source, target)} to cluster.links"
            )
        return found


def _place(device: Device) -> str:
    return f"{device.device_id!r} (node {device.node_id}, pool {device.pool}, zone {device.zone})"


def _rules(source: Device, target: Device) -> str:
    """The rules that would describe a path, the most specific one first."""
    if source.node_id == target.node_id:
        return f"{{within: node, pool: {source.pool}, ...}} and {{within: node, ...}}"
    if source.pool == target.pool:
        return f"{{within: zone, pool: {source.pool}, ...}} and {{within: zone, ...}}"
    wider = "within: zone"
    if source.zone != target.zone:
        wider = f"between: [{source.zone}, {target.zone}]"
    return f"{{between: [{source.pool}, {target.pool}], ...}} and {{{wider}, ...}}"
