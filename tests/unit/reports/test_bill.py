"""A provider's bill, as providers write it, against a ledger."""

import pytest

from orchestrator.core.durable import LedgerEntry
from orchestrator.errors import ConfigError
from orchestrator.reports.accounts import add_up
from orchestrator.reports.bill import (
    BillLine,
    bill_columns,
    compare_bill,
    read_bill,
    reconciled_cells,
)

PLAIN = bill_columns(())


def an_entry(usd: float, pool: str = "fast", **more: object) -> LedgerEntry:
    return LedgerEntry(0.0, 3600.0, f"{pool}-0", pool, usd, usd, **more)  # type: ignore[arg-type]


def one(ledger: list[LedgerEntry], billed: dict[str, float]) -> BillLine:
    (line,) = compare_bill(add_up(ledger).pools, billed)
    return line


def test_hours_of_a_pool_are_added_up_whatever_else_the_rows_say() -> None:
    text = "date,hour,pool,usd,note\n2026-05-01,0,fast,1.25,\n2026-05-01,1,fast,1.50,x\n\n,,slow,1,"
    assert read_bill(text, PLAIN) == {"fast": 2.75, "slow": 1.0}


def test_other_names_separators_signs_and_thousands_are_read() -> None:
    columns = bill_columns(("pool=resourceTags/user:pool", "usd=lineItem/UnblendedCost"))
    text = (
        "lineItem/UnblendedCost;resourceTags/user:pool\n"
        '"$1,234.50";fast\n-34.5;fast\n2e-3;slow\n1;\n'
    )
    assert read_bill(text, columns) == {"fast": 1200.0, "slow": 0.002, "(no pool)": 1.0}
    assert read_bill("Pool\tUSD\tCurrency\nfast\t1\tusd\n", PLAIN) == {"fast": 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"has the columns \(none\); it needs pool and usd"),
        ("pool,price\nfast,1\n", "has the columns pool, price; .*--bill-column usd=NAME"),
        ("pool,usd\nfast,one\n", "line 2 of the bill has the amount 'one'"),
        ("pool,usd\nfast,1\nfast,nan\n", "line 3 of the bill has the amount 'nan'"),
        ("pool,usd\nfast\n", "line 2 of the bill has the amount None"),
        (
            'pool;usd\nfast;"1,50"\n',
            "amount '1,50'; write dollars as a number, for example 1234.50",
        ),
        ("pool,usd,currency\nfast,1,USD\nfast,1,EUR\n", "line 3 of the bill is in 'EUR'"),
    ],
)
def test_a_bill_that_cannot_be_read_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_bill(text, PLAIN)


@pytest.mark.parametrize("given", ["pool", "pool=", "cost=x", "=x"])
def test_a_column_of_no_meaning_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="write one of pool, usd, currency"):
        bill_columns((given,))


def test_a_currency_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no column 'curr'"):
        read_bill("pool,usd\nfast,1\n", bill_columns(("currency=curr",)))


def test_rounding_agrees_and_more_than_a_hundredth_differs() -> None:
    ledger = [an_entry(100.0)]
    assert one(ledger, {"fast": 100.99}).agrees
    assert not one(ledger, {"fast": 101.01}).agrees
    assert one([an_entry(0.001)], {"fast": 0.01}).agrees


@pytest.mark.parametrize(
    ("ledger", "billed", "said"),
    [
        ([an_entry(8.0), an_entry(0.0, egress_usd=2.0, cause="egress")], 8.0,
         "the bill has no egress: $2.00"),
        ([an_entry(8.0), an_entry(3.0, cause="standing")], 8.0,
         "the bill has no devices present and idle: $3.00"),
        ([an_entry(8.0), an_entry(0.0, egress_usd=2.0), an_entry(3.0, cause="standing")], 8.0,
         "the bill has no egress and no devices present and idle: $5.00"),
        ([an_entry(8.0, estimated=True)], 9.0, "$8.00 of the ledger are at estimated prices"),
        ([an_entry(8.0)], 9.0, "held before or after the run"),
        ([an_entry(8.0)], 7.0, "discounts or credits"),
    ],
)  # fmt: skip
def test_a_difference_is_explained_where_it_can_be(
    ledger: list[LedgerEntry], billed: float, said: str
) -> None:
    assert said in one(ledger, {"fast": billed}).why


def test_pools_of_one_side_only_are_listed() -> None:
    found = {x.pool: x for x in compare_bill(add_up([an_entry(1.0)]).pools, {"disk": 2.0})}
    assert found["disk"].why.startswith("not in the ledger")
    assert found["fast"].why.startswith("not in the bill")


def test_egress_that_the_bill_lists_apart_is_compared_apart() -> None:
    ledger = [an_entry(8.0), an_entry(0.0, egress_usd=2.0), an_entry(1.0, "slow", egress_usd=0.5)]
    found = compare_bill(add_up(ledger).pools, {"fast": 8.0, "slow": 1.0, "egress": 2.5})
    assert [(x.pool, x.ledger_usd, x.agrees) for x in found] == [
        ("fast", 8.0, True), ("slow", 1.0, True), ("egress", 2.5, True),
    ]  # fmt: skip
    assert reconciled_cells(found)[-1][:4] == ("all", "$11.50", "$11.50", "$0.00")
