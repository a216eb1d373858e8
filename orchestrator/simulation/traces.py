"""What happens to a simulated cluster: slow-downs, prices, losses and joins, by time or by step."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.cluster import Device
from orchestrator.telemetry.price_rows import csv_reading

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
    input_s_per_sample: float | None = None  # what drawing a sample takes from now on
    links: tuple[str, ...] = ()  # ("all",) or the two zones between which links are touched
    cause: str = ""  # slow-downs and congestion of unlike causes add up
    bandwidth_ratio: float | None = None  # of the links' own
    price_ratio: float | None = None  # of the offer's first price
    price_usd_per_s: float | None = None  # listed, before the offer's discount
    read: bool = False  # the price is a row of a feed, which may fall silent
    lost: bool = False
    joined: int = 0
    notice_s: float | None = None  # the device is announced to be lost so many seconds later

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
            notice_s=event.notice_s,
        )
        for event in events
    )


def price_trace(
    lines: Sequence[str], pools: Collection[str], *, billing_speedup: float = 1.0
) -> tuple[TraceEvent, ...]:
    """The rows of a price feed (CSV: time_s, pool, price_per_hour) as trace events.

    Times of the feed are billed seconds since the start of the run; of the rows before it the
    last one of a pool counts. What is no price is passed over with a warning: the last good one
    stays in force.

    Args:
        lines: Of the file, with its header.
        pools: Those that are on offer.
        billing_speedup: Billed seconds per second of the run.

    Raises:
        ValueError: As ``csv_reading``.
    """
    reading = csv_reading(lines, pools)
    for text in reading.passed_over:
        logger.warning("price feed, %s", text)
    return tuple(
        TraceEvent(
            at_s=(row.start_s or 0.0) / billing_speedup,
            pool=row.pool,
            price_usd_per_s=row.price_per_hour / 3600 * billing_speedup,
            read=True,
        )
        for row in reading.rows
    )
