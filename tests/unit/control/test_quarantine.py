"""A device that is lost again and again waits ever longer."""

from orchestrator.control.quarantine import FORGIVEN, Quarantine


def test_the_first_loss_costs_no_wait_and_each_further_one_twice_the_one_before() -> None:
    quarantine, now_s, waits = Quarantine(60.0), 0.0, []
    for _ in range(10):
        now_s += 1.0
        until_s = quarantine.lost("a-0", now_s)
        assert quarantine.holds("a-0", now_s) == (until_s > now_s)
        waits.append(until_s - now_s)
        assert not quarantine.holds("a-0", until_s)
        now_s = until_s
    assert waits == [0.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 3840.0, 3840.0]


def test_devices_are_held_one_by_one() -> None:
    quarantine = Quarantine(60.0)
    quarantine.lost("a-0", 0.0)
    quarantine.lost("a-0", 0.0)
    assert quarantine.holds("a-0", 59.0)
    assert not quarantine.holds("b-0", 59.0)


def test_a_device_that_worked_for_long_is_as_good_as_a_new_one() -> None:
    quarantine = Quarantine(60.0)
    for _ in range(3):
        quarantine.lost("a-0", 0.0)
    later_s = 120.0 + FORGIVEN * 240.0 + 1.0
    assert quarantine.lost("a-0", later_s) == later_s
