"""What one more is worth, in words."""

from io import StringIO

import pytest
from rich.console import Console

from orchestrator.reports.tables import worth_table
from orchestrator.reports.worth import Worth, device_rows, typical, worth_cells

VALUES = {
    "budget_samples_per_s": 2.0,
    "microbatch_samples_per_s": 0.01,
    "device_samples_per_s.fast": 12.0,
    "device_break_even_per_hour_usd.fast": 6.0,
    "device_same_cost_per_hour_usd.fast": 4.0,
    "device_samples_per_s.slow": 0.0,
    "device_break_even_per_hour_usd.slow": 0.0,
    "device_same_cost_per_hour_usd.slow": 0.0,
    "zone_samples_per_s.z2": 1.5,
    "share_samples_per_s.fast": -0.2,
}
PRICES = {"fast": 3.67, "slow": 0.35}


def a_worth(
    values: dict[str, float] = VALUES, idle: tuple[str, ...] = (), **prices: float
) -> Worth:
    prices = {**PRICES, **prices}
    return Worth("the chosen plan", tuple(values.items()), tuple(prices.items()), idle)


def test_pool_below_its_break_even_price_is_worth_renting() -> None:
    fast, slow = device_rows(a_worth())
    assert (fast.pool, fast.advice) == ("fast", "yes")
    assert (slow.pool, slow.advice) == ("slow", "no use")
    (dear,) = (r for r in device_rows(a_worth(fast=7.0)) if r.pool == "fast")
    assert dear.advice == "too dear"


def test_idle_device_of_the_pool_comes_before_renting_another() -> None:
    fast, _ = device_rows(a_worth(idle=("fast",)))
    assert fast.advice == "first the idle"


def test_device_pays_at_any_price_while_no_dollar_is_short() -> None:
    free = {k: v for k, v in VALUES.items() if "break_even" not in k}
    cells = worth_cells(a_worth(free))
    assert cells[0] == ("device of fast", "12.0", "$3.67/h", "any price", "$4.00/h", "yes")
    assert cells[1] == ("device of slow", "0", "$0.3500/h", "-", "-", "no use")


def test_everything_else_follows_the_devices_in_words() -> None:
    assert [row[:2] for row in worth_cells(a_worth())[2:]] == [
        ("$/h of budget", "2.00"),
        ("microbatch in batch", "0.0100"),
        ("$/h of limit on zone z2", "1.50"),
        ("% of least share of fast", "-0.200"),
    ]


def test_table_fits_a_terminal_of_eighty_columns() -> None:
    screen = StringIO()
    Console(file=screen, width=80).print(worth_table(a_worth()))
    text = screen.getvalue()
    assert "\u2026" not in text
    assert "rent it?" in text
    assert "yes" in text


def test_typical_value_is_the_median_of_the_slots_that_have_any() -> None:
    slots = [{"device_samples_per_s.a": x} for x in (1.0, 5.0, 2.0)]
    assert typical([{}, *slots]) == {"device_samples_per_s.a": 2.0}


@pytest.mark.parametrize(("told", "found"), [(1, None), (2, 7.0)])
def test_price_without_a_limit_in_most_slots_has_none(told: int, found: float | None) -> None:
    name = "device_break_even_per_hour_usd.a"
    slots = [{"device_samples_per_s.a": 1.0, **({name: 7.0} if i < told else {})} for i in range(3)]
    assert typical(slots).get(name) == found
