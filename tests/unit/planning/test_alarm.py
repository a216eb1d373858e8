import pytest

from orchestrator.core.durable import AlarmMark
from orchestrator.planning.alarm import InfeasibilityAlarm, Shortage, alarm_window_s

WINDOW_S, BUDGET = 400.0, 0.5  # $/s; a rise of 2 $ over a window is 1 % of it


def after(seconds: float, *, owed: float, missing: float = 0.0, weight: float = 1.0) -> AlarmMark:
    """Both queues grow by so many dollars a window; 0.6 $/s and 3 samples/s are reached."""
    share = seconds / WINDOW_S
    return AlarmMark(
        seconds, owed * share, missing * share, weight, 0.6 * seconds, round(3 * seconds)
    )


def run(alarm: InfeasibilityAlarm, *, num_windows: float = 1, **grows: float) -> list[float]:
    """Times at which the alarm went off, looking every second."""
    found = []
    for second in range(int(num_windows * WINDOW_S) + 1):
        alarm, shortage = alarm.look(after(float(second), **grows))
        if shortage:
            found.append(float(second))
    return found


def test_it_goes_off_after_one_window_and_then_every_quarter_of_it() -> None:
    alarm = InfeasibilityAlarm(WINDOW_S, BUDGET, floor_samples_per_s=4.0)
    assert run(alarm, num_windows=1.5, owed=3.0, missing=3.0) == [400.0, 500.0, 600.0]


@pytest.mark.parametrize(("owed", "missing"), [(3.0, 1.0), (1.0, 3.0), (0.0, 0.0)])
def test_with_a_floor_both_queues_must_rise(owed: float, missing: float) -> None:
    alarm = InfeasibilityAlarm(WINDOW_S, BUDGET, floor_samples_per_s=4.0)
    assert run(alarm, owed=owed, missing=missing) == []


def test_idling_keeps_any_budget() -> None:
    assert run(InfeasibilityAlarm(WINDOW_S, BUDGET), owed=3.0) == []


def test_where_idling_is_forbidden_the_backlog_alone_decides() -> None:
    assert run(InfeasibilityAlarm(WINDOW_S, BUDGET, allow_idle=False), owed=3.0) == [400.0]


def test_it_says_what_was_reached_and_by_how_much_that_falls_short() -> None:
    alarm = InfeasibilityAlarm(WINDOW_S, BUDGET, floor_samples_per_s=4.0)
    found: Shortage | None = None
    for second in range(401):
        alarm, found = alarm.look(after(float(second), owed=3.0, missing=4.0))
    assert found == Shortage(400.0, pytest.approx(0.6), pytest.approx(3.0), 3.0, 4.0)
    text = found.message(BUDGET, 4.0, hour_s=3600.0)
    assert "cost 2160 $/h, 20 % above the budget.average_per_hour_usd of 1800" in text
    assert "made 3 samples/s, 25 % below the budget.min_samples_per_s of 4" in text


def test_a_rise_that_only_a_new_weight_made_is_none() -> None:
    """V and both queues doubled together: nothing more is owed than before, in its terms."""
    alarm = InfeasibilityAlarm(WINDOW_S, BUDGET, floor_samples_per_s=4.0)
    for quarter in range(5):
        scale = 2.0 if quarter == 4 else 1.0
        mark = AlarmMark(100.0 * quarter, 50.0 * scale, 50.0 * scale, scale, 0.0, 0)
        alarm, found = alarm.look(mark)
        assert found is None


def test_an_alarm_goes_on_where_a_run_stopped() -> None:
    alarm = InfeasibilityAlarm(WINDOW_S, BUDGET, allow_idle=False)
    for second in range(350):
        alarm, _ = alarm.look(after(float(second), owed=3.0))
    resumed = InfeasibilityAlarm(WINDOW_S, BUDGET, allow_idle=False, marks=alarm.marks)
    assert resumed.look(after(400.0, owed=3.0))[1] is not None


def test_the_window_is_a_day_or_two_thousand_slots() -> None:
    assert alarm_window_s(60.0, 3600.0) == 86400.0
    assert alarm_window_s(10.0, 3600.0) == 20000.0
