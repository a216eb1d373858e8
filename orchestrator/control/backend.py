"""The four methods by which the loop meets a cluster, real or simulated; options of both."""

from dataclasses import dataclass
from typing import Literal, Protocol

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
    kind: str
    price_per_hour: float
    count: int = 1
    devices_per_node: int = 1
    zone: str = "z1"
    spot: bool = False
    memory_gib: float | None = None
    """Overrides the catalogue."""

    speed_ratio: float | None = None
    """Speed relative to an a100-40; overrides the catalogue."""

    discount_ratio: float = 1.0
    max_price_per_hour: float | None = None
    minimum_s: float = 0.0
    quantum_s: float = 1.0
    billed: Literal["while_used", "while_present"] = "while_used"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """One entry of YAML ``cluster.links``; the most specific rule wins."""

    within: Literal["node", "zone"] | None = None
    between: tuple[str, str] | None = None
    latency_s: float = 0.0
    bandwidth_gbytes_per_s: float | None = None
    points: tuple[tuple[int, float], ...] = ()
    """(message bytes, bytes/s) instead of one bandwidth."""

    egress_usd_per_gb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFeedOptions:
    """YAML ``cluster.price_feed``."""

    path: str
    max_age_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """YAML section ``cluster``."""

    source: Literal["emulated", "ray", "file"]
    offers: tuple[OfferOptions, ...] = ()
    links: tuple[LinkOptions, ...] = ()
    price_feed: PriceFeedOptions | None = None
    profile: str | None = None
    """A profile file; measured at the start when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedEvent:
    """One entry of YAML ``emulation.events``: what happens to the emulated cluster at a step."""

    at_step: int
    device: str | None = None
    pool: str | None = None
    speed_ratio: float | None = None
    """Relative to the device's own normal speed."""

    price_per_hour: float | None = None
    lost: bool = False
    joined: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """YAML section ``emulation``; only with ``cluster.source: emulated``."""

    time_scale: float | Literal["auto"] = "auto"
    """Virtual seconds per second of profiled time; link times scale with it."""

    billing_speedup: float = 1.0
    """One second of the run is billed as this many."""

    events: tuple[EmulatedEvent, ...] = ()
