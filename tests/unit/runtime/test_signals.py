"""Who handles SIGINT and SIGTERM, and for how long."""

import signal
from threading import Thread

from orchestrator.runtime.signals import StopSignals, handled

BOTH = (signal.SIGINT, signal.SIGTERM)


def test_inside_the_block_both_are_handled_and_after_it_as_before() -> None:
    before = [signal.getsignal(number) for number in BOTH]
    with handled(signal.SIG_IGN):
        for number in BOTH:
            signal.raise_signal(number)
    assert [signal.getsignal(number) for number in BOTH] == before


def test_a_stop_that_comes_while_things_are_taken_down_inside_is_passed_over() -> None:
    """What is taken down ignores signals; the wish to stop hears the others."""
    signals = StopSignals()
    with signals.caught():
        with handled(signal.SIG_IGN):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signals.seen == ["SIGINT"]


def test_in_another_thread_nothing_changes() -> None:
    seen: list[object] = []

    def look() -> None:
        with handled(signal.SIG_IGN):
            seen.extend(signal.getsignal(number) for number in BOTH)

    thread = Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(number) for number in BOTH]
