"""Prices while a run goes on: read by a thread of their own, and put on what is on offer."""

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.control.backend import PriceFeedOptions
from orchestrator.core.cluster import Offer
from orchestrator.price_sources import ANSWER_S, PriceSource
from orchestrator.runtime.presence import Presence, Sight
from orchestrator.telemetry.price_rows import PriceRow, Reading

logger = logging.getLogger(__name__)

MAX_PASSED_OVER = 20
"""So many entries that are no prices are told of in a life of the run."""

Listed = tuple[float, float]
"""When a price was read, on the run's clock, and dollars an hour."""


class PriceFeed:
    """Asks a source now and then; the thread that calls ``look`` never waits for it.

    While readings fail, pools of the feed are missing from what is on offer: their last price
    counts, is called a guess, and grows old.
    """

    def __init__(
        self,
        source: PriceSource,
        options: PriceFeedOptions,
        *,
        billing_speedup: float = 1.0,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """Take note of where to read.

        Args:
            source: Where to read.
            options: How often, and how old a price may be.
            billing_speedup: Billed seconds per second of the run.
            warn: Takes a line on a reading that fails or holds what is no price, once each.
        """
        self._source, self._options, self._speedup = source, options, billing_speedup
        self._warn = warn
        self._complaint, self._passed_over = "", set[str]()
        self._asking: _Asking | None = None  # under way
        self._asked_s = -math.inf
        # The run's clock stood still between its lives: what is read in this one is newer than
        # all that an earlier one has seen.
        self._soonest_s: float | None = None
        self._now_s = 0.0
        self._fails = False
        self._listed: dict[str, list[Listed]] | None = None  # by pool; None: nothing was read yet
        self._stamps: dict[str, tuple[float, float]] = {}  # by pool: seconds since 1970, read_s

    def wait(self) -> None:
        """Ask, and wait for the answer: before the first slot there is time for it."""
        self._ask().join(ANSWER_S)

    def look(self, now_s: float) -> None:
        """Take over what a reading brought, and begin one when it is due; takes no time.

        ``now_s``: On the run's clock.
        """
        if self._soonest_s is None:
            self._soonest_s = math.nextafter(now_s, math.inf)
        self._now_s = max(now_s, self._soonest_s)
        asking = self._asking
        if asking is not None and not asking.is_alive():
            self._asking = None
            self._take(asking)
        elif asking is not None and time.monotonic() - self._asked_s > 2.0 * ANSWER_S:
            self._fail(f"no answer within {2.0 * ANSWER_S:.0f} s")
        if self._asking is None and time.monotonic() - self._asked_s >= self._options.every_s:
            self._ask()

    def priced(self, offers: Iterable[Offer]) -> tuple[Offer, ...]:
        """The offers at the prices of the last look; without those whose price failed to come.

        Until the feed has answered once, it counts as that of every pool.
        """
        return tuple(found for offer in offers if (found := self._priced(offer)) is not None)

    def _priced(self, offer: Offer) -> Offer | None:
        if self._listed is not None and offer.pool not in self._listed:
            return offer
        if self._fails:
            return None
        rows = (self._listed or {}).get(offer.pool, [])
        index = bisect_right(rows, (self._now_s, math.inf))
        if not index:  # nothing read, or nothing yet that has come into force
            return replace(offer, read_s=self._soonest_s) if self._listed is None else offer
        read_s, per_hour = rows[index - 1]
        return replace(offer.listed_at(per_hour / 3600 * self._speedup, read_s), read_s=read_s)

    def _ask(self) -> "_Asking":
        self._asked_s = time.monotonic()
        self._asking = _Asking(self._source)
        self._asking.start()
        return self._asking

    def _take(self, asking: "_Asking") -> None:
        if asking.reading is None:
            self._fail(asking.problem)
            return
        self._fails, self._complaint = False, ""
        for line in asking.reading.passed_over:
            self._pass_over(line, line)
        listed: dict[str, list[Listed]] = {}
        for row in asking.reading.rows:
            if (read_s := self._read_s(row)) is not None:
                listed.setdefault(row.pool, []).append((read_s, row.price_per_hour))
        known = self._listed or {}
        self._listed = known | {
            pool: sorted(rows, key=lambda row: row[0]) for pool, rows in listed.items()
        }

    def _read_s(self, row: PriceRow) -> float | None:
        """When a row was read, on the run's clock; None: too long ago."""
        if row.start_s is not None:
            return row.start_s / self._speedup
        if row.unix_s is None:
            return self._now_s
        stamp, read_s = self._stamps.get(row.pool, (-math.inf, 0.0))
        if row.unix_s == stamp:
            return read_s  # the same reading: when it was must not waver with two clocks
        age_s = max(0.0, time.time() - row.unix_s)
        if age_s * self._speedup > self._options.max_age_s:
            minutes = f"{age_s * self._speedup / 60.0:.0f} billed minutes"
            line = f"the price of pool {row.pool} is passed over: it is {minutes} old"
            self._pass_over(row.pool, line)
            return None
        read_s = max(self._now_s - age_s, self._soonest_s or 0.0)
        self._stamps[row.pool] = (row.unix_s, read_s)
        return read_s

    def _fail(self, problem: str) -> None:
        """Say it once, not at every reading."""
        self._fails = True
        if problem != self._complaint:
            self._complaint = problem
            self._warn(
                f"price_feed: {self._source.name}: {problem}; the last prices count and grow old"
            )

    def _pass_over(self, what: str, line: str) -> None:
        """Say it once, and of the first few only: a server may send anything."""
        if what not in self._passed_over and len(self._passed_over) < MAX_PASSED_OVER:
            self._passed_over.add(what)
            self._warn(f"price_feed: {self._source.name}: {line}")


class _Asking(threading.Thread):
    """One reading: the run does not stand still while it takes its time."""

    def __init__(self, source: PriceSource) -> None:
        super().__init__(name="prices", daemon=True)
        self._source = source
        self.reading: Reading | None = None
        self.problem = ""

    def run(self) -> None:
        """Read; ``reading`` or ``problem`` say the rest."""
        try:
            self.reading = self._source.read()
        except (OSError, ValueError) as error:
            self.problem = str(error)
        except Exception as error:  # the shell of a thread: nobody else would hear of it
            self.problem = f"{type(error).__name__}: it could not be read"


class PricedPresence:
    """A cluster whose prices a feed tells; implements ``Presence``."""

    def __init__(self, presence: Presence, feed: PriceFeed) -> None:
        """``presence`` looks at the devices; ``feed`` at prices."""
        self._presence, self._feed = presence, feed

    def look(self, next_step: int, now_s: float) -> Sight:
        """What is there."""
        self._feed.look(now_s)
        return self._presence.look(next_step, now_s)

    def offers(self) -> tuple[Offer, ...]:
        """Prices in force at the last look."""
        return self._feed.priced(self._presence.offers())

    def is_preemption(self, device_id: str) -> bool:
        """Whether a device that is gone was taken away rather than broke."""
        return self._presence.is_preemption(device_id)
