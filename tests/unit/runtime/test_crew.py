"""Where workers that are left after a fault go on from."""

import pytest

from orchestrator.runtime.crew import last_applied
from workers.update import Verdict
from workers.worker import Standing


def verdict(loss_sum: float) -> Verdict:
    return Verdict(1.0, 8.0, loss_sum, finite=True, hold=False, end_step=9, end_s=0.0)


def standing(
    next_step: int, loss_sum: float, *, summed: bool = False, layers: tuple[int, ...] = (0,)
) -> Standing:
    return Standing(next_step, summed, verdict(loss_sum), layers)


def test_a_step_that_anybody_left_has_applied_is_applied_by_all() -> None:
    standings = {"a": standing(4, 1.0, summed=True), "b": standing(5, 2.0)}
    assert last_applied(standings) == (5, verdict(2.0))


def test_a_step_that_nobody_left_has_applied_is_discarded() -> None:
    standings = {"a": standing(4, 1.0, summed=True), "b": standing(4, 1.0)}
    assert last_applied(standings) == (4, verdict(1.0))


@pytest.mark.parametrize("idle_at", [0, 3, 9])
def test_a_worker_without_layers_has_no_say(idle_at: int) -> None:
    standings = {"a": standing(4, 1.0), "idle": standing(idle_at, 7.0, layers=())}
    assert last_applied(standings) == (4, verdict(1.0))
