"""Metrics stay cheap: the short form of benchmarks.telemetry_load."""

from benchmarks.telemetry_load import growth, share


def test_the_page_of_a_thousand_devices_is_there_within_a_second() -> None:
    row, _ = share(1000, 5, seed=0)
    assert row["scrape_s"] <= 1
    assert row["page_kb"] <= 5000


def test_a_hundred_devices_take_less_than_a_twentieth_of_a_core_beside_planning() -> None:
    row, _ = share(100, 10, seed=0)
    assert row["core_pct"] <= 5


def test_nothing_is_shown_of_devices_that_are_gone() -> None:
    """ray-project/ray#47289: ids of what is gone blow up the number of series."""
    figures = {figure.name: figure for figure in growth(30, 100, seed=0)}
    assert figures["departed_devices_shown"].holds
    assert figures["series_max"].value <= 1.1 * figures["series_after_a_fifth"].value
