"""A provider's bill against the ledger of a run, pool by pool, and why they differ."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.reports import figures
from orchestrator.reports.accounts import PoolBill

TOLERANCE_RATIO, TOLERANCE_USD = 0.01, 0.01
"""Bill and ledger agree within so much of the ledger, or so many dollars: providers round."""

EGRESS = "egress"
"""Of a bill that lists it apart from devices: then so does the ledger."""

UNTAGGED = "(no pool)"
"""Stands for lines of a bill that name none."""

_COLUMNS = ("pool", "usd", "currency")
_AMOUNT = re.compile(
    r"([+-]?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+(?=\.))(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?"
)


@dataclass(frozen=True, slots=True)
class BillLine:
    """What one pool cost by the ledger and by the bill; ``why`` they differ, as far as is known."""

    pool: str
    ledger_usd: float
    bill_usd: float
    tolerance_usd: float
    agrees: bool
    why: str

    @property
    def difference_usd(self) -> float:
        """The bill less the ledger."""
        return self.bill_usd - self.ledger_usd


def bill_columns(given: Sequence[str]) -> dict[str, str]:
    """What the columns of a bill are called.

    Args:
        given: Of the command line, each ``pool=NAME``, ``usd=NAME`` or ``currency=NAME``.

    Raises:
        ConfigError: If one is of another form.
    """
    found = {name: name for name in _COLUMNS}
    for text in given:
        what, _, name = text.partition("=")
        if what not in found or not name:
            raise ConfigError(
                f"--bill-column {text!r}: write one of pool, usd, currency, then = and the name "
                "of the bill's column"
            )
        found[what] = name
    return found


def read_bill(text: str, columns: Mapping[str, str]) -> dict[str, float]:
    """Dollars by pool; several lines of a pool are added up.

    Args:
        text: CSV with a header, its fields apart by commas, semicolons or tabs.
        columns: As ``bill_columns`` gives them.

    Raises:
        ConfigError: If a column is missing, an amount is no number or not in dollars.
    """
    lines = text.splitlines()
    head = next((line for line in lines if line.strip()), "")
    separator = next((s for s in ",;\t" if _has(head, s, columns)), ",")
    rows = csv.DictReader(lines, delimiter=separator, skipinitialspace=True)
    names = {name.strip().lower(): name for name in rows.fieldnames or ()}
    pool_in, usd_in = names.get(columns["pool"].lower()), names.get(columns["usd"].lower())
    if pool_in is None or usd_in is None:
        raise ConfigError(
            f"the bill has the columns {', '.join(names) or '(none)'}; it needs "
            f"{columns['pool']} and {columns['usd']}: say what they are called with "
            "--bill-column pool=NAME --bill-column usd=NAME"
        )
    currency_in = names.get(columns["currency"].lower())
    if currency_in is None and columns["currency"] != "currency":
        raise ConfigError(
            f"the bill has no column {columns['currency']!r}; it has {', '.join(names)}"
        )
    billed: dict[str, list[float]] = {}
    try:
        for row in rows:
            place = f"line {rows.line_num} of the bill"
            currency = (row.get(currency_in) or "").strip() if currency_in else ""
            if currency.upper() not in ("", "USD", "US$", "$"):
                raise ConfigError(f"{place} is in {currency!r}; convert the bill to USD")
            amount = _amount(row.get(usd_in), place)
            billed.setdefault((row.get(pool_in) or "").strip() or UNTAGGED, []).append(amount)
    except csv.Error as error:
        raise ConfigError(f"line {rows.line_num} of the bill is no CSV: {error}") from None
    return {pool: math.fsum(amounts) for pool, amounts in billed.items()}


def compare_bill(ledger: Sequence[PoolBill], billed: Mapping[str, float]) -> tuple[BillLine, ...]:
    """Every pool of the ledger, added up, or of the bill.

    A pool's egress counts to it, unless the bill lists ``EGRESS`` as a pool of its own.
    """
    pools = {own.pool: own for own in ledger}
    apart = EGRESS in billed and EGRESS not in pools
    lines = [
        _line(pool, pools.get(pool), billed.get(pool), with_egress=not apart)
        for pool in sorted({*pools, *billed} - ({EGRESS} if apart else set()))
    ]
    if apart:
        usd = math.fsum(own.egress_usd for own in ledger)
        lines.append(_made(EGRESS, usd, billed[EGRESS], "messages of other jobs, or another rate"))
    return tuple(lines)


def _has(head: str, separator: str, columns: Mapping[str, str]) -> bool:
    names = [name.strip().lower() for name in next(csv.reader([head], delimiter=separator), [])]
    return columns["usd"].lower() in names


def _amount(text: str | None, place: str) -> float:
    found = _AMOUNT.fullmatch((text or "").strip())
    if found is None:
        raise ConfigError(
            f"{place} has the amount {text!r}; write dollars as a number, for example 1234.50"
        )
    return float("".join(part or "" for part in found.groups()).replace(",", ""))


def _line(
    pool: str, own: PoolBill | None, bill_usd: float | None, *, with_egress: bool
) -> BillLine:
    if own is None:
        why = "not in the ledger: another job, or a pool that is called otherwise here"
        return _made(pool, 0.0, bill_usd or 0.0, why)
    egress_usd = own.egress_usd if with_egress else 0.0
    ledger_usd = own.usd + egress_usd
    if bill_usd is None:
        return _made(pool, ledger_usd, 0.0, "not in the bill: not billed yet, or called otherwise")
    standing_usd, estimated_usd = own.standing_usd, own.estimated_usd
    less_usd, tolerance_usd = ledger_usd - bill_usd, _tolerance(ledger_usd)
    reasons = []
    idle = "devices present and idle"
    for usd, what in (
        (egress_usd, "egress"),
        (standing_usd, idle),
        (egress_usd + standing_usd, f"egress and no {idle}"),
    ):
        if usd > tolerance_usd and abs(less_usd - usd) <= tolerance_usd:
            reasons.append(f"the bill has no {what}: {figures.usd(usd)} of the ledger")
            break
    if estimated_usd:
        reasons.append(f"{figures.usd(estimated_usd)} of the ledger are at estimated prices")
    if not reasons and less_usd < 0:
        reasons.append("held before or after the run, by another job, or at another price")
    if not reasons:
        reasons.append("discounts or credits of the bill, or time that is not billed yet")
    return _made(pool, ledger_usd, bill_usd, "; ".join(reasons))


def _made(pool: str, ledger_usd: float, bill_usd: float, why: str) -> BillLine:
    tolerance_usd = _tolerance(ledger_usd)
    agrees = abs(bill_usd - ledger_usd) <= tolerance_usd
    return BillLine(pool, ledger_usd, bill_usd, tolerance_usd, agrees, "" if agrees else why)


def _tolerance(ledger_usd: float) -> float:
    return max(TOLERANCE_USD, TOLERANCE_RATIO * ledger_usd)


RECONCILED_HEAD = ("pool", "ledger", "bill", "difference", "", "why")


def reconciled_cells(lines: Sequence[BillLine]) -> list[tuple[str, ...]]:
    """The rows of a table, with their sum."""
    rows = [
        (
            line.pool,
            figures.usd(line.ledger_usd),
            figures.usd(line.bill_usd),
            figures.usd(line.difference_usd),
            "agrees" if line.agrees else "differs",
            line.why,
        )
        for line in lines
    ]
    own = math.fsum(line.ledger_usd for line in lines)
    theirs = math.fsum(line.bill_usd for line in lines)
    total = ("all", figures.usd(own), figures.usd(theirs), figures.usd(theirs - own), "", "")
    return [*rows, total]


def tolerance_text() -> str:
    """How far bill and ledger may lie apart."""
    return (
        f"They agree within {figures.percent(TOLERANCE_RATIO)} of the ledger "
        f"or {figures.usd(TOLERANCE_USD)}."
    )
