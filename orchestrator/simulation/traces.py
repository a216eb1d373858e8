"""What happens to a simulated cluster: slow-downs, prices, losses and joins, by time or by step."""

import csv
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.cluster import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One change of the true cluster, due at a time of the run's clock or before a step.

    Exactly one of ``at_s`` and ``at_step`` is given, and a device, a pool or links.
    """

    at_s: float | None = None
    at_step: int | None = None
    device: str | None = None
    pool: str | None = None
    speed_ratio: float | None = None  # of the device's own normal speed
    links: tuple[str, ...] = ()  # ("all",) or the two zones between which links are touched
    cause: str = ""  # slow-downs and congestion of unlike causes add up
    bandwidth_ratio: float | None = None  # of the links' own
    price_ratio: float | None = None  # of the offer's first price
    price_usd_per_s: float | None = None
    read: bool = False  # the price is a row of a feed, which may fall silent
    lost: bool = False
    joined: int = 0

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_step is None):
            raise ValueError(f"a trace event needs exactly one of at_s and at_step: {self}")
        if (self.device is not None) + (self.pool is not None) + bool(self.links) != 1:
            raise ValueError(f"a trace event needs exactly one of device, pool and links: {self}")

    def is_due(self, now_s: float, next_step: int) -> bool:
        """Whether it has happened once ``next_step`` is the next one to run."""
        if self.at_s is not None:
            return now_s >= self.at_s
        return self.at_step is not None and next_step >= self.at_step

    def touches(self, device: Device) -> bool:
        """Whether it is about this device."""
        return self.device == device.device_id or self.pool == device.pool


def emulated_trace(
    events: Iterable[EmulatedEvent], *, billing_speedup: float = 1.0
) -> tuple[TraceEvent, ...]:
    """The events of YAML ``emulation.events`` as trace events."""
    return tuple(
        TraceEvent(
            at_step=event.at_step,
            device=event.device,
            pool=event.pool,
            speed_ratio=event.speed_ratio,
            price_usd_per_s=None
            if event.price_per_hour is None
            else event.price_per_hour / 3600 * billing_speedup,
            lost=event.lost,
            joined=event.joined,
        )
        for event in events
    )


def price_trace(
    lines: Sequence[str], pools: Collection[str], *, billing_speedup: float = 1.0
) -> tuple[TraceEvent, ...]:
    """The rows of a price feed (CSV: time_s, pool, price_per_hour) as trace events.

    Times of the feed are billed seconds. A price that is not a positive number is passed over
    with a warning: the last good one stays in force.

    Args:
        lines: Of the file, with its header.
        pools: Those that are on offer.
        billing_speedup: Billed seconds per second of the run.

    Raises:
        ValueError: If a column is missing, a time is no number or a pool is not on offer;
            names the line.
    """
    events = []
    rows = csv.DictReader(lines)
    if missing := {"time_s", "pool", "price_per_hour"} - set(rows.fieldnames or ()):
        raise ValueError(
            f"line 1 lacks {', '.join(sorted(missing))}; write time_s,pool,price_per_hour"
        )
    for number, row in enumerate(rows, start=2):
        try:
            at_s, pool, price = float(row["time_s"]), row["pool"], float(row["price_per_hour"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"price feed, line {number}: {row} needs the columns time_s, pool and "
                "price_per_hour, two of them numbers"
            ) from error
        if pool not in pools or not math.isfinite(at_s):
            raise ValueError(
                f"price feed, line {number}: time {at_s}, pool {pool!r}; write a finite time and "
                f"a pool of cluster.offers: {', '.join(sorted(pools))}"
            )
        if not (price > 0 and math.isfinite(price)):
            logger.warning("price feed, line %s: %s of pool %s is no price", number, price, pool)
            continue
        events.append(
            TraceEvent(
                at_s=at_s / billing_speedup,
                pool=pool,
                price_usd_per_s=price / 3600 * billing_speedup,
                read=True,
            )
        )
    return tuple(events)
