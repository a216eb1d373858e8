"""Which price of a pool is believed, and what it counts at once nobody knows the true one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.core.cluster import PRICE_JUMP, Offer
from orchestrator.core.durable import PriceMemory

CONFIRMING_READINGS = 3
"""A price that moves by more than ``PRICE_JUMP`` is believed at its third reading in a row."""

SAME_PRICE_RATIO = 1.05


@dataclass(frozen=True, slots=True)
class PriceDoubt:
    """Why the price of a pool is not the one that was read last; dollars per second of the run."""

    pool: str
    cause: Literal["jump", "missing", "stale"]
    counted_usd_per_s: float  # what it is billed and planned at
    read_usd_per_s: float | None = None  # not believed
    age_s: float = 0.0  # since the newest price that was believed


class Prices:
    """The offers of all pools, reading by reading.

    Args:
        offers: As known at ``now_s``.
        memory: What an earlier life of the run believed of pools that are still on offer.
        max_age_s: After which a price is not trusted: the pool counts at its upper price.

    Source: docs/model.md, section 6.
    """

    def __init__(
        self,
        offers: Iterable[Offer],
        now_s: float,
        memory: Iterable[PriceMemory],
        max_age_s: float,
    ) -> None:
        kept = {price.offer.pool: price for price in memory}
        self._max_age_s = max_age_s
        self._prices = {o.pool: kept.get(o.pool) or PriceMemory(o, now_s) for o in offers}

    @property
    def memory(self) -> tuple[PriceMemory, ...]:
        """What is known, to be kept over a restart."""
        return tuple(self._prices.values())

    def update(self, offers: Iterable[Offer], now_s: float) -> None:
        """Take in what a slot read; a pool that it says nothing of is missing."""
        prices = {pool: replace(price, missing=True) for pool, price in self._prices.items()}
        for offer in offers:
            known = prices.get(offer.pool) or PriceMemory(offer, now_s)
            prices[offer.pool] = _read(replace(known, missing=False), offer, now_s)
        self._prices = prices

    def counted(self, now_s: float) -> tuple[Offer, ...]:
        """The offers to plan and bill with: a stale one at its upper price."""
        return tuple(self._counted(price, now_s) for price in self._prices.values())

    def doubts(self, now_s: float) -> tuple[PriceDoubt, ...]:
        """Pools whose newest price was not believed, was missing from the last slot, or is old."""
        found = []
        for pool, price in sorted(self._prices.items()):
            stale = self._is_stale(price, now_s)
            if not (stale or price.doubted or price.missing):
                continue
            found.append(
                PriceDoubt(
                    pool,
                    "stale" if stale else "jump" if price.doubted else "missing",
                    self._counted(price, now_s).price_usd_per_s,
                    price.doubted[0] if price.doubted else None,
                    now_s - price.read_s,
                )
            )
        return tuple(found)

    def age_s(self, now_s: float) -> tuple[tuple[str, float], ...]:
        """Seconds since the price of each pool was last read and believed."""
        return tuple((pool, now_s - price.read_s) for pool, price in sorted(self._prices.items()))

    def _counted(self, price: PriceMemory, now_s: float) -> Offer:
        if not self._is_stale(price, now_s):
            return price.offer
        upper = price.offer.upper_usd_per_s
        return replace(
            price.offer,
            price_usd_per_s=upper,
            max_price_usd_per_s=upper,
            valid_from_s=price.read_s + self._max_age_s,
        )

    def _is_stale(self, price: PriceMemory, now_s: float) -> bool:
        """Whether the newest believed reading is too old."""
        return now_s - price.read_s > self._max_age_s


def _read(price: PriceMemory, offer: Offer, now_s: float) -> PriceMemory:
    """With a reading more: a feed's row counts once, any other price once a slot."""
    at_s = now_s if offer.read_s is None else offer.read_s
    if offer.read_s is not None and at_s <= price.seen_s:
        return price
    factor = offer.price_usd_per_s / price.offer.price_usd_per_s
    if not 1 / PRICE_JUMP <= factor <= PRICE_JUMP:
        first = price.doubted[0] if price.doubted else offer.price_usd_per_s
        ratio = offer.price_usd_per_s / first
        agrees = 1 / SAME_PRICE_RATIO <= ratio <= SAME_PRICE_RATIO
        doubted = (*price.doubted, first) if agrees else (offer.price_usd_per_s,)
        if len(doubted) < CONFIRMING_READINGS:
            return replace(price, seen_s=at_s, doubted=doubted)
    return PriceMemory(offer, at_s, seen_s=at_s)
