"""The ledger added up: what each pool cost, and whether lines of it are gone."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import fsum

from orchestrator.core.durable import LedgerEntry
from orchestrator.reports import figures
from orchestrator.reports.rows import SlotRow

_HELD = ("use", "block", "standing")
_ROUNDING_USD, _ROUNDING_RATIO = 1e-6, 1e-9  # of sums of the same dollars in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBill:
    """What one pool cost, and what of it was for what."""

    pool: str
    device_hours: float
    usd: float  # without egress
    egress_usd: float
    standing_usd: float = 0.0  # of devices that were present and in no plan
    estimated_usd: float = 0.0  # at prices that were guessed


@dataclass(frozen=True, slots=True)
class Accounts:
    """The ledger as far as a report needs it; it may have millions of lines."""

    pools: tuple[PoolBill, ...]
    gap: str = ""
    """Where lines are gone, as a person reads it; empty: none are known to be."""


def add_up(charges: Iterable[LedgerEntry], slots: Sequence[SlotRow] = ()) -> Accounts:
    """Add the ledger up by pool, and compare it with what the slots say was spent.

    Args:
        charges: Every line in its order; devices do not count.
        slots: What had been spent at the end of each, which was written after its lines.
    """
    pools: dict[str, _Pool] = {}
    check = _Check(slots)
    for entry, count in _counted(charges):
        if entry.pool not in pools:
            pools[entry.pool] = _Pool()
        pools[entry.pool].add(entry, count)
        check.add(entry, count)
    return Accounts(tuple(pools[name].bill(name) for name in sorted(pools)), check.gap())


def _counted(charges: Iterable[LedgerEntry]) -> Iterator[tuple[LedgerEntry, int]]:
    """The same object several times in a row once, with how often it came."""
    last: LedgerEntry | None = None
    count = 0
    for entry in charges:
        if last is not None and entry is not last:
            yield last, count
            count = 0
        last, count = entry, count + 1
    if last is not None:
        yield last, count


def _amounts() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class _Pool:
    """Amounts of one pool, summed without rounding on the way."""

    held_s: "array[float]" = field(default_factory=_amounts)
    usd: "array[float]" = field(default_factory=_amounts)
    egress_usd: "array[float]" = field(default_factory=_amounts)
    standing_usd: "array[float]" = field(default_factory=_amounts)
    estimated_usd: "array[float]" = field(default_factory=_amounts)

    def add(self, entry: LedgerEntry, count: int) -> None:
        for amounts, amount in (
            (self.held_s, entry.to_s - entry.from_s if entry.cause in _HELD else 0.0),
            (self.usd, entry.usd),
            (self.egress_usd, entry.egress_usd),
            (self.standing_usd, entry.usd if entry.cause == "standing" else 0.0),
            (self.estimated_usd, entry.usd if entry.estimated else 0.0),
        ):
            if amount:
                amounts.extend(repeat(amount, count))

    def bill(self, pool: str) -> PoolBill:
        return PoolBill(
            pool=pool,
            device_hours=fsum(self.held_s) / 3600,
            usd=fsum(self.usd),
            egress_usd=fsum(self.egress_usd),
            standing_usd=fsum(self.standing_usd),
            estimated_usd=fsum(self.estimated_usd),
        )


class _Check:
    """Finds the first slot at whose end more was spent than the lines up to then add up to.

    A line counts to a slot that ends after it begins: at least all that was written before the
    slot was, however far ahead a device was paid.
    """

    def __init__(self, slots: Sequence[SlotRow]) -> None:
        self._slots = slots
        self._ends_s = [slot.time_s for slot in slots]
        self._usd = [0.0] * (len(slots) + 1)
        self._lines = [0] * (len(slots) + 1)  # number of the last one
        self._num_lines = 0

    def add(self, entry: LedgerEntry, count: int) -> None:
        self._num_lines += count
        ends_s = self._ends_s
        i = min(bisect_left(ends_s, entry.to_s), bisect_right(ends_s, entry.from_s))
        self._usd[i] += count * (entry.usd + entry.egress_usd)
        self._lines[i] = self._num_lines

    def gap(self) -> str:
        usd, last = 0.0, 0
        for slot, own_usd, lines in zip(self._slots, self._usd, self._lines, strict=False):
            usd, last = usd + own_usd, max(last, lines)
            if usd < slot.spent_usd - _ROUNDING_USD - _ROUNDING_RATIO * slot.spent_usd:
                return (
                    f"lines are missing at or before line {last + 1}: up to the end of slot "
                    f"{slot.slot} they add up to {figures.usd(usd)}, and "
                    f"{figures.usd(slot.spent_usd)} had been spent by then"
                )
        return ""
