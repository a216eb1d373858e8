"""The four methods by which the loop meets a cluster, real or simulated; options of both."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol
from urllib.parse import urlsplit

from orchestrator.control.faults import Fault
from orchestrator.control.scaling import AutoscalerOptions
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.slot import Decision, Observation


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can run; every plan is drawn from this."""

    max_team: int
    schedules: tuple[str, ...]
    overlap: bool


class Backend(Protocol):
    """A cluster. Time passes in ``observe`` only."""

    @property
    def capabilities(self) -> Capabilities:
        """What plans may ask for."""

    def observe(self) -> Observation:
        """Let the slot pass, or an event end it early, and return what happened.

        A loss, a join or a change of price ends the slot; so do ``run_until_s`` and the last
        step. Returns at once, with what is still unreported, when nothing was applied since
        the start or since ``checkpoint``, or when ``apply`` or ``checkpoint`` raised.

        Raises:
            OrchestratorError: If the cluster itself is beyond use.
        """

    def apply(self, decision: Decision) -> None:
        """Run ``decision.plan`` from the next step boundary on; a kept plan does not pause."""

    def checkpoint(self) -> CheckpointManifest | None:
        """Stop at a step boundary, write all layers; ``apply`` resumes. None: nothing ran yet."""

    def close(self) -> None:
        """Release every device. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferOptions:
    """One entry of YAML ``cluster.offers``: a priced pool of like devices."""

    pool: str
    """Name of the pool; its devices are called pool-0, pool-1, ..."""

    kind: str
    """A row of core/devices.toml, or any name together with speed_ratio and memory_gib."""

    price_per_hour: float
    """Dollars per device and hour, before ``discount_ratio``."""

    count: int = 1
    """Devices of the pool. 0: this is a price only, in a file that others include or overlay."""

    min_count: int = 0
    """With ``max_count``: so many devices of the pool are never given back."""

    max_count: int | None = None
    """With ``cluster.autoscaler``: the pool may grow to so many devices; absent: let it alone."""

    devices_per_node: int = 1
    """How many of them one node has."""

    zone: str = "z1"
    """Where the pool is; traffic between zones may cost."""

    spot: bool = False
    """Whether its devices may be taken away."""

    memory_gib: float | None = None
    """Overrides the catalogue."""

    speed_ratio: float | None = None
    """Speed relative to an a100-40; overrides the catalogue."""

    discount_ratio: float = 1.0
    """What is paid over the listed price."""

    max_price_per_hour: float | None = None
    """Most of the listed price at which the pool is used; ``total_usd`` counts with it."""

    minimum_s: float = 0.0
    """Least time that is charged once a device is taken, in billed seconds."""

    quantum_s: float = 1.0
    """Charged time is rounded up to a multiple of this, in billed seconds."""

    billed: Literal["while_used", "while_present"] = "while_used"
    """``while_present``: an idle device still costs."""

    def __post_init__(self) -> None:
        for name in ("pool", "zone", "kind"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", getattr(self, name)):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; write letters, digits, '-', '_' and '.'"
                )
        for name in (
            "price_per_hour", "count", "devices_per_node", "memory_gib", "speed_ratio",
            "discount_ratio", "max_price_per_hour", "quantum_s",
        ):  # fmt: skip
            value = getattr(self, name)
            may_come = name == "count" and value == 0 and self.max_count
            if value is not None and not may_come and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value} in pool {self.pool!r}; it must be positive")
        if self.max_count is None and self.min_count:
            raise ValueError(
                f"min_count is {self.min_count} in pool {self.pool!r}, which has no max_count: "
                "without it the pool is let alone; write max_count, too, or neither"
            )
        if self.max_count is not None and not 0 <= self.min_count <= self.max_count:
            raise ValueError(
                f"min_count is {self.min_count} and max_count {self.max_count} in pool "
                f"{self.pool!r}; write 0 <= min_count <= max_count"
            )
        if not self.minimum_s >= 0:
            raise ValueError(f"minimum_s is {self.minimum_s}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """One entry of YAML ``cluster.links``; the most specific rule wins."""

    within: Literal["node", "zone"] | None = None
    """Links inside every node, or between the nodes inside every zone."""

    pool: str | None = None
    """With ``within``: of this pool only."""

    between: tuple[str, str] | None = None
    """Links between these two zones, or these two pools, both ways."""

    latency_s: float = 0.0
    """What a message takes beside its bytes."""

    bandwidth_gbytes_per_s: float | None = None
    """Bandwidth in 10^9 bytes/s; this or ``points``."""

    points: tuple[tuple[int, float], ...] = ()
    """(message bytes, bytes/s) instead of one bandwidth."""

    egress_usd_per_gb: float = 0.0
    """Dollars per 10^9 bytes that leave a zone."""

    def __post_init__(self) -> None:
        if (self.within is None) == (self.between is None):
            raise ValueError(
                "a link is in one place; write within: node, within: zone or between: [z1, z2]"
            )
        if self.pool is not None and self.within is None:
            raise ValueError(
                f"pool is {self.pool!r} without within; write within: node, within: zone, or "
                f"between: [{self.pool}, another pool]"
            )
        if self.between is not None and self.between[0] == self.between[1]:
            name = self.between[0]
            raise ValueError(
                f"between is {list(self.between)}, the same zone twice; write within: zone "
                f"(with pool: {name}, if {name} is a pool)"
            )
        if (self.bandwidth_gbytes_per_s is None) == (not self.points):
            raise ValueError(
                "a link has one bandwidth: write bandwidth_gbytes_per_s or points, not both"
            )
        rates = [r for _, r in self.points] or [self.bandwidth_gbytes_per_s or 0.0]
        if not all(r > 0 and math.isfinite(r) for r in rates):
            name = "points" if self.points else "bandwidth_gbytes_per_s"
            raise ValueError(f"{name} is {self.points or rates[0]}; a bandwidth must be positive")
        if any(size < 1 for size, _ in self.points) or any(
            b[0] <= a[0] for a, b in pairwise(self.points)
        ):
            raise ValueError(f"points is {self.points}; message sizes must be positive and grow")
        for name in ("latency_s", "egress_usd_per_gb"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFeedOptions:
    """YAML ``cluster.price_feed``: where listed prices are read, before ``discount_ratio``."""

    path: str | None = None
    """CSV file with the columns time_s (billed seconds since the start of the run), pool,
    price_per_hour; this or ``url``."""

    url: str | None = None
    """http or https address that answers with a JSON list of {pool, price_per_hour[, time_s]},
    time_s in seconds since 1970."""

    every_s: float = 60.0
    """How often the prices are read, in seconds of the run's own clock."""

    token_file: str | None = None
    """File with a token that is sent to the server of ``url`` as ``Authorization: Bearer``."""

    max_age_s: float = 900.0
    """Billed seconds after which a price is not trusted: the pool counts at its upper price."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.url is None):
            given = "both" if self.url else "neither"
            raise ValueError(f"prices come from one place; write path or url, not {given}")
        if self.url is not None:
            self._check_url(self.url)
        if self.token_file is not None and (self.url is None or not self.token_file.strip()):
            raise ValueError(
                f"token_file is {self.token_file!r}; write the path of a file, beside url only"
            )
        if not self.max_age_s > 0:
            raise ValueError(f"max_age_s is {self.max_age_s}; it must be positive")
        if not self.every_s >= 1:
            raise ValueError(f"every_s is {self.every_s}; write 1 or more seconds")

    def _check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets, or a port that is no number
            fine = False
        if not fine or not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError(f"url is {url!r}; write http://HOST/... or https://HOST/...")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """YAML section ``cluster``."""

    source: Literal["emulated", "ray", "file"]
    """Devices emulated here, found in the Ray cluster, or only listed here (planning)."""

    offers: tuple[OfferOptions, ...] = ()
    """Priced pools of like devices."""

    links: tuple[LinkOptions, ...] = ()
    """What joins the devices; the most specific rule wins."""

    price_feed: PriceFeedOptions | None = None
    """Where prices that move are read."""

    profile: str | None = None
    """A profile file; measured at the start when absent."""

    autoscaler: AutoscalerOptions = field(default_factory=AutoscalerOptions)

    def __post_init__(self) -> None:
        if not self.offers and self.source != "ray":
            raise ValueError(
                "offers is empty; write a list of pools, for example "
                "- {pool: fast, kind: a100-40, count: 2, price_per_hour: 3.67}"
            )
        doubled = [pool for pool, n in Counter(o.pool for o in self.offers).items() if n > 1]
        if doubled:
            raise ValueError(
                f"offers names pool {doubled[0]!r} twice; give every pool a name of its own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEvent:
    """One entry of YAML ``emulation.events``: what happens to the emulated cluster at a step."""

    at_step: int
    """The step before which it happens."""

    device: str | None = None
    """The device it happens to; this or ``pool``."""

    pool: str | None = None
    """The pool it happens to; this or ``device``."""

    speed_ratio: float | None = None
    """Relative to the device's own normal speed."""

    price_per_hour: float | None = None
    """The pool's new listed price, before ``discount_ratio``."""

    lost: bool = False
    """The device vanishes."""

    joined: int = 0
    """So many devices join the pool."""

    notice_s: float | None = None
    """The device is announced to be taken away so many seconds later, and is."""

    def __post_init__(self) -> None:
        if self.at_step < 0:
            raise ValueError(f"at_step is {self.at_step}; it must not be negative")
        if (self.device is None) == (self.pool is None):
            raise ValueError("an event happens to one device or one pool; write device: or pool:")
        given = {
            "speed_ratio": self.speed_ratio is not None,
            "price_per_hour": self.price_per_hour is not None,
            "lost": self.lost,
            "joined": self.joined != 0,
            "notice_s": self.notice_s is not None,
        }
        if sum(given.values()) != 1:
            raise ValueError(f"an event says one thing; write exactly one of {', '.join(given)}")
        for name in ("speed_ratio", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.notice_s is not None and not 0 <= self.notice_s < math.inf:
            raise ValueError(f"notice_s is {self.notice_s}; write the seconds, 0 or more")
        if self.joined < 0:
            raise ValueError(f"joined is {self.joined}; it must be positive")
        if self.device is not None and (given["price_per_hour"] or given["joined"]):
            raise ValueError("prices and joining devices belong to a pool; write pool: not device:")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """YAML section ``emulation``; only with ``cluster.source: emulated``."""

    time_scale: float | Literal["auto"] = "auto"
    """Virtual seconds per second of profiled time; link times scale with it."""

    billing_speedup: float = 1.0
    """One second of the run is billed as this many."""

    events: tuple[EmulatedEvent, ...] = ()
    """What happens to the cluster."""

    faults: tuple[Fault, ...] = ()
    """What breaks in this run, to test what it survives; ``--chaos FILE`` fills it."""

    def __post_init__(self) -> None:
        if not isinstance(self.time_scale, str) and not self.time_scale > 0:
            raise ValueError(f"time_scale is {self.time_scale}; write auto or a positive number")
        if not self.billing_speedup > 0:
            raise ValueError(f"billing_speedup is {self.billing_speedup}; it must be positive")

    @property
    def happenings(self) -> tuple[EmulatedEvent, ...]:
        """The events, and those of the faults that happen to the cluster rather than a process."""
        return (*self.events, *(event for fault in self.faults for event in _events_of(fault)))


def _events_of(fault: Fault) -> tuple[EmulatedEvent, ...]:
    match fault.kind:
        case "price":
            price = fault.price_per_hour
            return (EmulatedEvent(at_step=fault.at_step, pool=fault.pool, price_per_hour=price),)
        case "notice":
            at_step, device, notice_s = fault.at_step, fault.device, fault.warning_s
            return (EmulatedEvent(at_step=at_step, device=device, notice_s=notice_s),)
        case "join":
            return (EmulatedEvent(at_step=fault.at_step, pool=fault.pool, joined=1),)
        case _:
            return ()
