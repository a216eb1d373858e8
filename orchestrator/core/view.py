"""Parts of a SlotRecord: rates, and of each device what it does and where its time went."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Spread(NamedTuple):
    """A time that differs from step to step: the least, the median and the most, in s."""

    least_s: float
    median_s: float
    most_s: float


class StepSpreads(NamedTuple):
    """Of the steps of a slot that one device took part in; its own are the first and the last."""

    compute: Spread
    wait: Spread  # for neighbours, for the sums and for the vote
    input: Spread


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device in a SlotRecord."""

    device_id: str
    kind: str
    pool: str
    state: Literal["used", "idle", "lost"]
    slowdown: float
    straggler: bool
    price_per_hour: float
    steps: StepSpreads | None = None  # in the slot that ended; None: no steps of its plan
    memory_bytes: int = 0  # all that it has; a lost one: 0
    utilization_ratio: float | None = None  # computing, of the time held; None: not held


@dataclass(frozen=True, slots=True)
class ZonePath:
    """The slowest path from one zone to another, or inside one, that planning reckons with."""

    source_zone: str
    target_zone: str
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Step time, rate and money of one slot, in the user's units; nothing measured: None."""

    step_s: float | None
    samples_per_s: float | None
    cost_per_hour_usd: float | None
    peak_memory_bytes: tuple[tuple[str, int], ...] = ()
