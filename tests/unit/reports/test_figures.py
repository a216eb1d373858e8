"""Figures as people read them."""

import math

import pytest

from orchestrator.reports import figures


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (math.nan, "-"), (0, "0"), (1234567.0, "1,234,567"), (123.4, "123"),
     (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123"), (-0.5, "-0.500"), (3e-7, "3.00e-07")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert figures.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "0 s"), (5e-6, "5.00 µs"), (0.0123, "12.3 ms"), (0.62, "620 ms"),
     (2.0, "2.00 s"), (600.0, "10.0 min"), (7200.0, "2.00 h"), (864000.0, "10.0 d")],
)  # fmt: skip
def test_durations_take_the_unit_that_fits(value: float | None, shown: str) -> None:
    assert figures.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "$0.00"), (0.05, "$0.0500"), (1e-9, "$0.00"), (3.5, "$3.50"),
     (1234.5, "$1,234.50"),     (-2.0, "-$2.00")],
)  # fmt: skip
def test_dollars_below_one_show_more_digits(value: float | None, shown: str) -> None:
    assert figures.usd(value) == shown


def test_dollars_of_many_digits_are_rounded_as_numbers_are() -> None:
    shown = [figures.usd_number(v) for v in (None, math.nan, 0.0123, 432.24, 1109.4)]
    assert shown == ["-", "-", "$0.0123", "$432", "$1,109"]


def test_sizes_and_ratios() -> None:
    sizes = [figures.size(v) for v in (None, 512, 2048, 3 * 2**30)]
    assert sizes == ["-", "512 B", "2.00 KiB", "3.00 GiB"]
    assert [figures.percent(v) for v in (None, 0.034, 0.5)] == ["-", "3.4 %", "50 %"]
    assert figures.difference(1.1, 1.0) == "+10.0 %"
    assert figures.difference(None, 1.0) == figures.difference(1.0, 0.0) == "-"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (512.0, "512"), (8192.0, "8.19 k"), (3.41e6, "3.41 M"), (8e8, "800 M"),
     (1.2e10, "12.0 G"), (5e13, "50.0 T"), (None, "-")],
)  # fmt: skip
def test_counts_take_the_unit_that_fits(value: float | None, shown: str) -> None:
    assert figures.count(value) == shown
