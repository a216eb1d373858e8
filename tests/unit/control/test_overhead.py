import pytest

from orchestrator.control.overhead import MOST, Overhead


def after(overhead: Overhead, slots: int, working_s: float, *, runs: bool = True) -> Overhead:
    for _ in range(slots):
        overhead = overhead.after(60.0, working_s, runs=runs)
    return overhead


def test_the_share_is_what_steps_leave_of_the_time_in_which_plans_are_held() -> None:
    """54 of 60 s, for so long that the prior has faded."""
    assert after(Overhead.prior(60.0), 2000, 54.0).ratio == pytest.approx(0.1)


def test_one_slow_start_says_little() -> None:
    """60 s lost of 11 slots of 60 s."""
    assert after(Overhead.prior(60.0), 1, 0.0).ratio == pytest.approx(0.09)


def test_idle_slots_count_nothing_but_the_end_of_a_step_under_way() -> None:
    first = after(Overhead.prior(60.0), 50, 54.0)
    assert after(first, 50, 0.0, runs=False) == first
    assert after(first, 1, 3.0, runs=False).ratio <= first.ratio


def test_steps_longer_than_a_slot_are_no_overhead() -> None:
    """Every third slot commits a step of 180 s."""
    overhead = Overhead.prior(60.0)
    for slot in range(300):
        overhead = overhead.after(60.0, 180.0 if slot % 3 == 2 else 0.0, runs=True)
    assert overhead.ratio <= 0.01


def test_a_share_beyond_half_is_no_rate_to_plan_with() -> None:
    assert after(Overhead.prior(60.0), 2000, 0.0).ratio == MOST
