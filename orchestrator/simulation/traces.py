"""What happens to a simulated cluster: slow-downs, prices, losses and joins, by time or by step."""

import csv
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.cluster import Device

logger = logging.getLogger(__name__)

FEED_COLUMNS = ("time_s", "pool", "price_per_hour")

MAX_TIME_S = 1e9
"""Longest time of a feed, before or after the start of the run."""

PRICES = (1e-6, 1e9)
"""Dollars an hour that may be a price: as in a run file."""


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
    price_usd_per_s: float | None = None
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
    last one of a pool counts. A price that is not a number of dollars within ``PRICES`` is
    passed over with a warning: the last good one stays in force.

    Args:
        lines: Of the file, with its header.
        pools: Those that are on offer.
        billing_speedup: Billed seconds per second of the run.

    Raises:
        ValueError: If a column is missing, a time or price is no number, or a pool is not on
            offer; names the line, the value and the mend.
    """
    events = []
    rows = csv.DictReader(lines, skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or ()]
    if missing := set(FEED_COLUMNS) - set(names):
        found = f", but {', '.join(names)}" if names else ""
        raise ValueError(
            f"line 1 lacks {', '.join(sorted(missing))}{found}; the first line names the "
            f"columns: {','.join(FEED_COLUMNS)}"
        )
    rows.fieldnames = names
    for row in rows:
        line = f"line {rows.line_num}"
        at_s = _number(row["time_s"], f"{line}: time_s", "seconds since the start of the run")
        price = _number(row["price_per_hour"], f"{line}: price_per_hour", "a number of dollars")
        if not abs(at_s) <= MAX_TIME_S:
            raise ValueError(
                f"{line}: time_s is {row['time_s']}; write seconds since the start of the run, "
                f"at most {MAX_TIME_S:g} (no date, no seconds since 1970)"
            )
        if (pool := str(row["pool"]).strip()) not in pools:
            raise ValueError(
                f"{line}: pool is {pool!r}; write a pool of cluster.offers: "
                f"{', '.join(sorted(pools))}"
            )
        if not PRICES[0] <= price <= PRICES[1]:
            logger.warning(
                "price feed, %s: %s of pool %s is no price and is passed over", line, price, pool
            )
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


def _number(value: object, name: str, wanted: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        shown = "missing" if value is None else repr(value)
        raise ValueError(f"{name} is {shown}; write {wanted}") from None
