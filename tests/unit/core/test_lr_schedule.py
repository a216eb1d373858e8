"""Learning rates as functions of the step."""

import pytest

from orchestrator.core.training import ScheduleOptions


def factors(num_steps: int = 10, **options: object) -> list[float]:
    schedule = ScheduleOptions(**options)
    return [schedule.factor(step, num_steps) for step in range(num_steps)]


def test_wsd_stays_between_its_warm_up_and_its_decay() -> None:
    found = factors(name="wsd", warmup_steps=2, decay_steps=4, final_ratio=0.2)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_wsd_of_a_run_shorter_than_its_parts_still_falls() -> None:
    assert factors(4, name="wsd", warmup_steps=2, decay_steps=9) == pytest.approx([0.5, 1, 1, 0.5])


def test_inverse_sqrt_is_1_where_its_warm_up_ends_and_half_of_it_at_four_times_the_step() -> None:
    found = factors(16, name="inverse_sqrt", warmup_steps=4)
    assert found[3] == 1.0
    assert found[15] == pytest.approx(0.5)
    assert factors(4, name="inverse_sqrt")[0] == 1.0
