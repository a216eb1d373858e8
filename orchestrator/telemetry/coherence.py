"""For how long the state of the cluster lasts: from how prices, speeds and devices moved."""

from collections import Counter
from dataclasses import dataclass
from math import exp, log

from orchestrator.core.cluster import ClusterState

MIN_SLOTS = 60
"""Slots that must be seen before anything is said."""

MIN_CHANGES = 8
"""Changes of one series before its correlation means anything: a single one is a trend."""


@dataclass(slots=True)
class _Series:
    """Running sums of one quantity at successive slots, about its first value."""

    origin: float
    last: float = 0.0
    num: int = 0
    num_changes: int = 0
    total: float = 0.0
    squares: float = 0.0
    products: float = 0.0  # of neighbours

    def add(self, value: float) -> None:
        centred = value - self.origin
        if self.num:
            self.products += centred * self.last
            self.num_changes += centred != self.last
        self.num += 1
        self.total += centred
        self.squares += centred * centred
        self.last = centred

    @property
    def correlation(self) -> float | None:
        """Of neighbours; None while too little has happened."""
        if self.num < MIN_SLOTS or self.num_changes < MIN_CHANGES:
            return None
        mean = self.total / self.num
        variance = self.squares / self.num - mean * mean
        if variance <= 0:
            return None
        return (self.products / (self.num - 1) - mean * mean) / variance


class Coherence:
    """Coherence time of the slowest of the quantities that move.

    Each is taken as a process whose correlation falls exponentially: with ``q`` between
    neighbouring slots it lasts ``-slot_s / ln q``. What moved a few times only is not judged,
    and nothing is remembered over a restart: unknown is said as unknown.

    Source: docs/model.md, sections 4.4 and 6.
    """

    def __init__(self, slot_s: float) -> None:
        self._slot_s = slot_s
        self._series: dict[tuple[str, str], _Series] = {}

    def add(self, cluster: ClusterState) -> None:
        """Take in the state at a slot's end."""
        present = Counter(device.pool for device in cluster.devices)
        values = {
            **{("price", o.pool): log(o.price_usd_per_s) for o in cluster.offers},
            **{("speed", d.device_id): log(d.slowdown) for d in cluster.devices},
            **{("devices", o.pool): float(present[o.pool]) for o in cluster.offers},
        }
        for key, value in values.items():
            self._series.setdefault(key, _Series(value)).add(value)

    @property
    def coherence_s(self) -> float | None:
        """Seconds of the run's clock; None: not known, or nothing moves."""
        found = [q for series in self._series.values() if (q := series.correlation) is not None]
        if not found:
            return None
        slowest = max(found)
        if slowest >= 1:
            return None  # a drift: its end was not seen
        return -self._slot_s / log(slowest) if slowest > exp(-1.0) else self._slot_s
