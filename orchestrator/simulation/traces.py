"""What happens to a simulated cluster: slow-downs, prices, losses and joins, by time or by step."""

import csv
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.slot import ClusterEvent, DeviceJoined, DeviceLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One change of the true cluster, due at a time of the run's clock or before a step.

    Exactly one of ``at_s`` and ``at_step`` is given, and a device or a pool.
    """

    at_s: float | None = None
    at_step: int | None = None
    device: str | None = None
    pool: str | None = None
    speed_ratio: float | None = None  # of the device's own normal speed
    price_usd_per_s: float | None = None
    read: bool = False  # the price is a row of a feed, which may fall silent
    lost: bool = False
    joined: int = 0

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_step is None):
            raise ValueError(f"a trace event needs exactly one of at_s and at_step: {self}")
        if (self.device is None) == (self.pool is None):
            raise ValueError(f"a trace event needs exactly one of device and pool: {self}")

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


class World:
    """The true cluster: what the simulation knows and the control loop has to find out."""

    def __init__(self, cluster: ClusterState, events: Iterable[TraceEvent] = ()) -> None:
        self.cluster = cluster
        self._template = {device.pool: device for device in reversed(cluster.devices)}
        self._num_of_pool: dict[str, int] = {}
        for device in cluster.devices:
            self._num_of_pool[device.pool] = self._num_of_pool.get(device.pool, 0) + 1
        self._left = list(events)

    def next_event_s(self) -> float:
        """Time of the next timed event, infinite when there is none."""
        return min((e.at_s for e in self._left if e.at_s is not None), default=math.inf)

    def advance(self, now_s: float, next_step: int) -> tuple[tuple[ClusterEvent, ...], bool]:
        """Let everything happen that is due, in the order given.

        Returns:
            The events that a backend would see, and whether a price changed. A slow-down is
            neither: nobody announces it.
        """
        due = [event for event in self._left if event.is_due(now_s, next_step)]
        self._left = [event for event in self._left if event not in due]
        seen: list[ClusterEvent] = []
        repriced = False
        self.cluster = replace(self.cluster, now_s=now_s)
        for event in due:
            if event.speed_ratio is not None:
                self._slow_down(event, 1.0 / event.speed_ratio)
            if event.price_usd_per_s is not None:
                repriced = self._reprice(event, event.price_usd_per_s, now_s) or repriced
            if event.lost:
                seen += self._lose(event)
            seen += [self._join(event.pool) for _ in range(event.joined) if event.pool]
        return tuple(seen), repriced

    def _slow_down(self, event: TraceEvent, slowdown: float) -> None:
        devices = tuple(
            replace(d, slowdown=slowdown) if event.touches(d) else d for d in self.cluster.devices
        )
        self.cluster = replace(self.cluster, devices=devices)

    def _reprice(self, event: TraceEvent, price_usd_per_s: float, now_s: float) -> bool:
        """Whether the price changed; a row of a feed that repeats it is a reading all the same."""
        old = self.cluster.offers
        offers = tuple(
            replace(o, price_usd_per_s=price_usd_per_s, valid_from_s=now_s)
            if o.pool == event.pool and o.price_usd_per_s != price_usd_per_s
            else o
            for o in old
        )
        read = tuple(
            replace(o, read_s=now_s) if event.read and o.pool == event.pool else o for o in offers
        )
        self.cluster = replace(self.cluster, offers=read)
        return offers != old

    def _lose(self, event: TraceEvent) -> list[ClusterEvent]:
        lost = [d for d in self.cluster.devices if event.touches(d)]
        devices = tuple(d for d in self.cluster.devices if not event.touches(d))
        self.cluster = replace(self.cluster, devices=devices)
        return [DeviceLost(d.device_id, "it left the simulated cluster") for d in lost]

    def _join(self, pool: str) -> ClusterEvent:
        index = self._num_of_pool[pool]
        self._num_of_pool[pool] += 1
        device = replace(
            self._template[pool],
            device_id=f"{pool}-{index}",
            node_id=f"{pool}-joined{index}",
            slowdown=1.0,
        )
        self.cluster = replace(self.cluster, devices=(*self.cluster.devices, device))
        return DeviceJoined(device)
