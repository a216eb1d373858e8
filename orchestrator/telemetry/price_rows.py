"""Rows of a price feed, as CSV or JSON: which pool costs how much, and since when."""

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CSV_COLUMNS = ("time_s", "pool", "price_per_hour")

MAX_TIME_S = 1e9
"""Longest time of a CSV row, before or after the start of the run."""

PRICES = (1e-6, 1e9)
"""Dollars an hour that may be a price: as in a run file."""

MAX_UNIX_S = 1e11
"""Latest time of a JSON row: milliseconds since 1970 are no seconds."""

_SHOWN = 40  # letters of what a server sent

JSON_FORM = '[{"pool": "fast", "price_per_hour": 3.67}, ...], or that list under "prices"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """The listed price of a pool. Without a time it is that of the moment it was read at."""

    pool: str
    price_per_hour: float  # dollars per device, before the offer's discount
    start_s: float | None = None  # billed seconds since the start of the run
    unix_s: float | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Reading:
    """All rows of a feed that are prices, and what was passed over, a line each."""

    rows: tuple[PriceRow, ...]
    passed_over: tuple[str, ...] = ()


def csv_reading(lines: Sequence[str], pools: Collection[str]) -> Reading:
    """The rows of a CSV text (time_s, pool, price_per_hour), in its order.

    Times are billed seconds since the start of the run. A price that is not a number of dollars
    within ``PRICES`` is passed over.

    Args:
        lines: Of the text, with its header.
        pools: Those that are on offer.

    Raises:
        ValueError: If a column is missing, a time or price is no number, or a pool is not on
            offer; names the line, the value and the mend.
    """
    found, passed_over = [], []
    rows = csv.DictReader(lines, skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or ()]
    if missing := set(CSV_COLUMNS) - set(names):
        header = f", but {', '.join(names)}" if names else ""
        raise ValueError(
            f"line 1 lacks {', '.join(sorted(missing))}{header}; the first line names the "
            f"columns: {','.join(CSV_COLUMNS)}"
        )
    rows.fieldnames = names
    for row in rows:
        line = f"line {rows.line_num}"
        start_s = _number(row["time_s"], f"{line}: time_s", "seconds since the start of the run")
        price = _number(row["price_per_hour"], f"{line}: price_per_hour", "a number of dollars")
        if not abs(start_s) <= MAX_TIME_S:
            raise ValueError(
                f"{line}: time_s is {row['time_s']}; write seconds since the start of the run, "
                f"at most {MAX_TIME_S:g} (no date, no seconds since 1970)"
            )
        if (pool := str(row["pool"]).strip()) not in pools:
            raise ValueError(
                f"{line}: pool is {pool!r}; write a pool of cluster.offers: "
                f"{', '.join(sorted(pools))}"
            )
        if PRICES[0] <= price <= PRICES[1]:
            found.append(PriceRow(pool=pool, price_per_hour=price, start_s=start_s))
        else:
            passed_over.append(f"{line}: {price} of pool {pool} is no price and is passed over")
    return Reading(tuple(found), tuple(passed_over))


def json_reading(text: str, pools: Collection[str]) -> Reading:
    """The newest row of each pool in a JSON list of ``{pool, price_per_hour[, time_s]}``.

    The list may stand in an object, under ``prices``; keys beside these are the server's own, and
    so are pools that are not on offer. Times are seconds since 1970. An entry that is no price
    is passed over.

    Args:
        text: Of the answer.
        pools: Those that are on offer.

    Raises:
        ValueError: If the text is no such list.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}: {error.msg})") from None
    except ValueError:  # more digits than Python reads
        raise ValueError("it holds a number of thousands of digits") from None
    entries = data.get("prices") if isinstance(data, dict) else data
    if not isinstance(entries, list):
        raise ValueError(f"it is no list of prices; {JSON_FORM} is wanted")  # noqa: TRY004
    newest: dict[str, PriceRow] = {}
    passed_over = []
    for index, entry in enumerate(entries):
        try:
            row = _json_row(entry)
        except ValueError as error:
            passed_over.append(f"entry {index} {error} and is passed over")
            continue
        known = newest.get(row.pool)
        if row.pool in pools and (known is None or _time_s(known) <= _time_s(row)):
            newest[row.pool] = row
    return Reading(tuple(newest.values()), tuple(passed_over))


def _json_row(entry: object) -> PriceRow:
    if not isinstance(entry, dict) or not isinstance(pool := entry.get("pool"), str):
        raise ValueError("names no pool")  # noqa: TRY004
    price = _within(entry.get("price_per_hour"), *PRICES)
    if price is None:
        raise ValueError(
            f"is no price of pool {pool[:_SHOWN]!a}: {_short(entry, 'price_per_hour')}"
        )
    if entry.get("time_s") is None:
        return PriceRow(pool=pool, price_per_hour=price)
    unix_s = _within(entry["time_s"], 0.0, MAX_UNIX_S)
    if unix_s is None:
        raise ValueError(f"has no seconds since 1970: {_short(entry, 'time_s')}")
    return PriceRow(pool=pool, price_per_hour=price, unix_s=unix_s)


def _time_s(row: PriceRow) -> float:
    return float("inf") if row.unix_s is None else row.unix_s


def _within(value: object, least: float, most: float) -> float | None:
    """The number of a JSON value within bounds, None where it is another or none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if least <= value <= most else None


def _short(entry: Mapping[str, object], key: str) -> str:
    return f"{key} is {ascii(entry.get(key))[:_SHOWN]}"


def _number(value: object, name: str, wanted: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        shown = "missing" if value is None else repr(value)
        raise ValueError(f"{name} is {shown}; write {wanted}") from None
