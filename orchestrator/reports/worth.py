"""What one more device, dollar or microbatch is worth, in words a person can decide by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, isfinite
from statistics import median

from orchestrator.reports import figures
from orchestrator.reports.svg import table

WORTH_HEAD = (
    "one more", "samples/s", "price", "pays below", "cheaper below", "rent it?",
)  # fmt: skip
WORTH_FIGURES = (1, 2, 3, 4)
WORTH_HELP = (
    "Pays below: up to this price, one more device brings more samples than its dollars would "
    "bring elsewhere. Cheaper below: up to this price, it lowers the dollars per sample."
)

_WORDS = {
    "budget": "$/h of budget",
    "microbatch": "microbatch in batch",
    "egress": "$/h of limit on egress",
    "zone": "$/h of limit on zone {}",
    "share": "% of least share of {}",
}


@dataclass(frozen=True, slots=True)
class Worth:
    """Marginal values of a plan, and what a reader needs beside them."""

    beside: str  # which plan, as words that follow "beside"
    values: tuple[tuple[str, float], ...]  # names as in a SlotRecord
    prices: tuple[tuple[str, float], ...]  # dollars per billed hour of a device, by pool
    idle: tuple[str, ...] = ()  # pools of which a device is there and idle


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One more device of a pool; prices per billed hour."""

    pool: str
    samples_per_s: float
    price_per_hour: float | None
    break_even_per_hour: float  # infinite: at any price
    same_cost_per_hour: float
    idle: bool  # one is there and idle

    @property
    def advice(self) -> str:
        """Whether to rent it, in a few words."""
        if self.samples_per_s <= 0:
            return "no use"
        if self.price_per_hour is None:
            return ""
        if self.price_per_hour >= self.break_even_per_hour:
            return "too dear"
        return "first the idle" if self.idle else "yes"


def device_rows(worth: Worth) -> list[DeviceRow]:
    """One row a pool that has a worth, best samples per dollar first."""
    values, prices = dict(worth.values), dict(worth.prices)
    pools = [name.partition(".")[2] for name in values if name.startswith("device_samples_per_s.")]
    rows = [
        DeviceRow(
            pool=pool,
            samples_per_s=values[f"device_samples_per_s.{pool}"],
            price_per_hour=prices.get(pool),
            break_even_per_hour=values.get(f"device_break_even_per_hour_usd.{pool}", inf),
            same_cost_per_hour=values.get(f"device_same_cost_per_hour_usd.{pool}", 0.0),
            idle=pool in worth.idle,
        )
        for pool in pools
    ]
    return sorted(rows, key=lambda r: (-r.samples_per_s / (r.price_per_hour or inf), r.pool))


def worth_cells(worth: Worth) -> list[tuple[str, ...]]:
    """The table's rows: devices first, then the rest in a fixed order."""
    cells: list[tuple[str, ...]] = []
    for row in device_rows(worth):
        below = row.break_even_per_hour
        pays = f"{figures.usd(below)}/h" if isfinite(below) else "any price"
        cheaper = f"{figures.usd(row.same_cost_per_hour)}/h"
        cells.append(
            (
                f"device of {row.pool}",
                figures.number(row.samples_per_s),
                f"{figures.usd(row.price_per_hour)}/h",
                *((pays, cheaper) if row.samples_per_s > 0 else ("-", "-")),
                row.advice,
            )
        )
    for name, value in worth.values:
        what, _, where = name.partition(".")
        words = _WORDS.get(what.removesuffix("_samples_per_s"))
        if words:
            cells.append((words.format(where), figures.number(value), "", "", "", ""))
    return cells


def worth_parts(worth: Worth | None) -> list[str]:
    """What one more would add, as a table with its title; nothing where it is not known."""
    if worth is None or not worth.values:
        return []
    cells = worth_cells(worth)
    return [
        "<h2>What one more would add</h2>",
        f'<p class="soft">Beside {escape(worth.beside)}; prices per billed hour. '
        f"{escape(WORTH_HELP)}</p>",
        table(WORTH_HEAD, cells, right=WORTH_FIGURES),
    ]


def typical(slots: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The medians over slots; a price without a limit in most slots has none.

    Args:
        slots: ``marginal_values`` of each; slots without any say nothing.
    """
    told = [values for values in slots if values]
    found = {}
    for name in dict.fromkeys(name for values in told for name in values):
        missing = inf if name.startswith("device_break_even") else 0.0
        value = median(values.get(name, missing) for values in told)
        if isfinite(value):
            found[name] = value
    return found
