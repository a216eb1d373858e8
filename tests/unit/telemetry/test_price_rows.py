"""Rows of a price feed: which are believed to be prices, and what is said of the others."""

import json

import pytest

from orchestrator.telemetry.price_rows import PriceRow, json_reading

FAST = {"pool": "fast", "price_per_hour": 3.5}


def rows(data: object) -> tuple[PriceRow, ...]:
    return json_reading(json.dumps(data), {"fast", "slow"}).rows


@pytest.mark.parametrize("data", [[FAST], {"prices": [FAST], "region": "x"}])
def test_a_list_is_read_alone_or_under_prices(data: object) -> None:
    assert rows(data) == (PriceRow(pool="fast", price_per_hour=3.5),)


def test_other_keys_and_other_pools_are_the_servers_own() -> None:
    own = {**FAST, "currency": "USD"}
    reading = json_reading(json.dumps([own, {**FAST, "pool": "other"}]), {"fast"})
    assert [row.pool for row in reading.rows] == ["fast"]
    assert not reading.passed_over


def test_of_several_rows_of_a_pool_the_newest_counts() -> None:
    new, old = {**FAST, "time_s": 1.8e9}, {**FAST, "time_s": 1.7e9, "price_per_hour": 1}
    assert rows([new, old]) == rows([old, new]) == rows([new])
    assert rows([old, new])[0].unix_s == 1.8e9
    assert rows([new, FAST])[0].unix_s is None  # the price of this moment


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (3, "entry 0 names no pool and is passed over"),
        ({}, "entry 0 names no pool"),
        ({"pool": 3, "price_per_hour": 1}, "entry 0 names no pool"),
        ({"pool": "fast"}, "entry 0 is no price of pool 'fast': price_per_hour is None"),
        ({**FAST, "price_per_hour": "3.5"}, "entry 0 is no price of pool 'fast': price_per_hour"),
        ({**FAST, "price_per_hour": True}, "entry 0 is no price of pool 'fast': price_per_hour"),
        ({**FAST, "price_per_hour": 0}, "price_per_hour is 0 and is passed over"),
        ({**FAST, "price_per_hour": -1.5}, "price_per_hour is -1.5"),
        ({**FAST, "price_per_hour": 1e10}, "price_per_hour is 1"),
        ({**FAST, "price_per_hour": 10**400}, "price_per_hour is 1000"),
        ({**FAST, "price_per_hour": float("nan")}, "price_per_hour is nan"),
        ({**FAST, "price_per_hour": float("inf")}, "price_per_hour is inf"),
        ({**FAST, "time_s": "now"}, "entry 0 has no seconds since 1970: time_s is 'now'"),
        ({**FAST, "time_s": -1}, "entry 0 has no seconds since 1970: time_s is -1"),
        ({**FAST, "time_s": 1.7e12}, "entry 0 has no seconds since 1970: time_s is 17"),
        ({**FAST, "price_per_hour": "\ud800\n\x1b[2J"}, r"price_per_hour is '\ud800\n\x1b[2J'"),
        ({"pool": "\u202ex", "price_per_hour": 0}, r"of pool '\u202ex': price"),
        ({"pool": "x" * 9999, "price_per_hour": 0}, f"of pool '{'x' * 40}': price"),
    ],
)
def test_an_entry_that_is_no_price_is_passed_over_and_named(entry: object, told: str) -> None:
    reading = json_reading(json.dumps([entry, {**FAST, "pool": "slow"}]), {"fast", "slow"})
    assert [row.pool for row in reading.rows] == ["slow"]
    (line,) = reading.passed_over
    assert told in line
    assert len(line) < 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"it is no JSON \(line 1: Expecting value\)"),
        ("<html>", "it is no JSON"),
        ('[{"pool": ', "it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        (f"[{5000 * '9'}]", "it holds a number of thousands of digits"),
        ("{}", "it is no list of prices; "),
        ('{"prices": 3}', "it is no list of prices; "),
        ("null", "it is no list of prices; "),
        ('"fast"', "it is no list of prices; "),
    ],
)
def test_what_is_no_list_of_prices_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        json_reading(text, {"fast"})


def test_an_empty_list_is_a_reading_without_rows() -> None:
    assert rows([]) == ()
