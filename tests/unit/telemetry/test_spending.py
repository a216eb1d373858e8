from collections.abc import Iterable
from dataclasses import replace

from orchestrator.core.budget import BudgetOptions
from orchestrator.telemetry.spending import Spending
from tests.unit.reports.samples import a_record

HOUR = 3600.0
CAP = BudgetOptions(average_per_hour_usd=1.0, horizon_hours=10.0, total_usd=20.0)


def lasts_hours(
    marks: Iterable[tuple[float, float]], budget: BudgetOptions = CAP
) -> list[float | None]:
    """After each slot, by billed hours and the dollars spent by then."""
    spending = Spending()
    slots = (a_record(time_s=hours * HOUR, spent_usd=usd, budget=budget) for hours, usd in marks)
    found = [spending.lasts_s(slot) for slot in slots]
    return [None if seconds is None else seconds / HOUR for seconds in found]


def test_what_is_left_lasts_as_long_as_the_rate_says() -> None:
    assert lasts_hours([(0.0, 0.0), (0.5, 1.0), (1.0, 4.0)]) == [None, 9.5, 4.0]


def test_without_a_cap_it_is_the_money_of_the_horizon() -> None:
    budget = replace(CAP, total_usd=None)  # 10 $
    assert lasts_hours([(0.0, 0.0), (1.0, 2.0)], budget)[-1] == 4.0


def test_only_the_last_hour_counts_however_long_slots_are() -> None:
    early = [(0.1 * slot, slot) for slot in range(10)]
    late = [(1.0 + 0.25 * slot, 10.0 + 0.5 * slot) for slot in range(7)]
    assert lasts_hours(early + late)[-1] == (20 - 13) / 2.0
    assert lasts_hours([(0.0, 0.0), (5.0, 5.0), (10.0, 15.0)])[-1] == 5 / 2.0


def test_what_is_not_being_spent_is_never_used_up() -> None:
    marks = [(0.0, 5.0), (0.5, 6.0), (1.0, 6.0), (1.5, 6.0), (2.0, 6.0)]
    assert lasts_hours(marks)[2:] == [14.0, None, None]


def test_more_than_there_is_was_used_up_before_now() -> None:
    assert lasts_hours([(9.0, 19.0), (10.0, 21.0)])[-1] == -0.5
