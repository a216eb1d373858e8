from math import log

import numpy as np
import pytest

from orchestrator.core.durable import Trend
from orchestrator.telemetry.flapping import FLAPPING_LEGS
from orchestrator.telemetry.trends import (
    MOST_TRIALS,
    RETRY_SLOTS,
    WINDOW_SLOTS,
    WINDOW_STEPS,
    Trends,
)

SLOW = log(2.5)
ROW = np.array([0])


def measured(trend: Trend, steps: list[float]) -> Trend:
    (found,) = Trends([("it", trend)]).measured(ROW, [steps])
    return found[1]


def judged(trend: Trend, *, slow: bool) -> Trend:
    (found,) = Trends([("it", trend)]).judged(ROW, np.array([slow]))
    return found[1]


def unseen(trend: Trend, usual: float) -> Trend:
    (found,) = Trends([("it", trend)]).unseen(ROW, np.array([usual]))
    return found[1]


def after(*slots: list[float], start: Trend | None = None) -> Trend:
    trend = start or Trend()
    for steps in slots:
        trend = measured(trend, steps)
    return trend


def test_a_change_and_the_way_back_are_believed_at_once() -> None:
    healthy = after([0.0] * 10, [0.0] * 10)
    changed = after([SLOW] * 10, start=healthy)
    assert changed.level == pytest.approx(SLOW, abs=1e-4)
    assert after([0.0] * 10, start=changed).level == 0.0


def test_what_flaps_is_planned_with_as_it_is_on_average() -> None:
    slots = [[SLOW * (k % 2)] * 10 for k in range(40)]
    trend, levels = Trend(), []
    for steps in slots:
        trend = measured(trend, steps)
        levels.append(trend.level)
    assert levels[-1] == pytest.approx(SLOW / 2, abs=SLOW / 4)
    assert len(set(levels[FLAPPING_LEGS + 2 :])) <= 2


def test_what_flapped_is_believed_again_once_it_has_been_steady() -> None:
    flapping = after(*([SLOW * (k % 2)] * 10 for k in range(6)))
    trend, waited = flapping, 0
    while trend.level > 0.1:
        trend, waited = measured(trend, [0.0] * 10), waited + 1
    assert 1 < waited <= WINDOW_SLOTS


def test_one_odd_slot_is_passed_over_and_odd_steps_in_every_slot_are_not() -> None:
    """marin#7681, #4236: what happens once and what is chronic are told apart."""
    odd = [*[0.0] * 9, log(20.0)]
    healthy = after(*([0.0] * 10 for _ in range(6)))
    once = after(odd, start=healthy)
    assert once.level == 0.0
    assert after(*([0.0] * 10 for _ in range(6)), start=once).level == 0.0
    chronic = after(*(odd for _ in range(6)), start=healthy)
    assert chronic.level > log(1.2)
    # One step in ten takes twenty times as long: 2.9 times as long on average.
    chronic = after(*(odd for _ in range(WINDOW_SLOTS)), start=chronic)
    assert chronic.level == pytest.approx(log(2.9), abs=0.11)


def test_windows_are_bounded_however_long_the_run() -> None:
    """FlagScale#1215: the detector kept its samples for ever.

    flagos-ai/FlagScale#1215: the detector keeps samples for ever.
    """
    rng = np.random.default_rng(3)
    trend = Trend()
    for _ in range(300):
        trend = measured(trend, rng.normal(0.0, 0.2, 50).tolist())
    slots = (trend.noise, trend.means, trend.nows)
    assert {len(window) for window in slots} == {WINDOW_SLOTS}
    assert max(len(trend.since_up), len(trend.since_down)) <= WINDOW_STEPS


def test_an_estimate_that_nothing_confirms_is_given_up_and_takes_the_usual_level() -> None:
    slow = judged(after([SLOW] * 10), slow=True)
    trend = slow
    for _ in range(RETRY_SLOTS - 1):
        trend = unseen(trend, 0.3)
        assert trend.level == slow.level
    trend = unseen(trend, 0.3)
    assert (trend.level, trend.on_trial, trend.slots_slow) == (0.3, True, 0)


def slots_until_given_up(trend: Trend) -> int:
    count = 0
    while trend.num_steps:
        trend, count = unseen(trend, 0.0), count + 1
    return count


def test_every_trial_that_fails_doubles_the_wait_and_one_that_succeeds_ends_that() -> None:
    trend, waits = judged(after([SLOW] * 10), slow=True), []
    for _ in range(MOST_TRIALS + 2):
        waits.append(slots_until_given_up(trend))
        for _ in range(waits[-1]):
            trend = unseen(trend, 0.0)
        trend = judged(measured(trend, [SLOW] * 10), slow=True)
        assert trend.level == pytest.approx(SLOW, abs=1e-4)
    assert waits == [RETRY_SLOTS * 2**k for k in (*range(MOST_TRIALS + 1), MOST_TRIALS)]
    for _ in range(slots_until_given_up(trend)):
        trend = unseen(trend, 0.0)
    for _ in range(RETRY_SLOTS):
        assert trend.num_trials
        trend = judged(measured(trend, [0.0] * 10), slow=False)
    assert (trend.num_trials, trend.on_trial) == (0, False)


def test_what_is_slow_at_a_trial_is_at_once_as_slow_as_it_was() -> None:
    """Else it would be re-balanced first and dropped a slot later: two changes of plan."""
    trend = judged(after([log(10.0)] * 10), slow=True)
    while trend.num_steps:
        trend = unseen(trend, 0.0)
    again = judged(measured(trend, [0.0, 0.0, log(1.5)]), slow=True)
    assert again.level == pytest.approx(log(10.0), abs=1e-4)
