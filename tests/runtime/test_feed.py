"""Batches are loaded ahead: in order, so many at most, and nothing is lost or left behind."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from orchestrator.errors import UserCodeError
from workers.data import SampleSource
from workers.feed import Feed
from workers.process_groups import LostContactError

pytestmark = pytest.mark.runtime

PATIENCE_S = 30.0
CPU = torch.device("cpu")


class Counted:
    """Gives the index back; notes which samples it was asked for, and by which thread."""

    def __init__(self, fails_at: int = -1) -> None:
        self.calls: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.fails_at = fails_at
        self.may_go = threading.Event()
        self.may_go.set()

    def __iter__(self) -> Iterator[int]:
        for item in range(10_000):
            self.may_go.wait(PATIENCE_S)
            self.threads.add(threading.current_thread())
            self.calls.append(item)
            if item == self.fails_at:
                raise OSError("torn")
            yield item


def shares(step: int) -> list[range]:
    """Two microbatches a step, of 3 and 2 samples of the step's ten; step 2 has none."""
    first = 10 * step + 4
    return [] if step == 2 else [range(first, first + 3), range(first + 3, first + 5)]


def make_feed(dataset: Any, ahead: int, num_steps: int = 6) -> Feed:
    return Feed(SampleSource(dataset, list, 0), shares, num_steps, CPU, ahead)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "samples"]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not loaders())


@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 100])
def test_every_batch_is_that_of_its_positions(ahead: int) -> None:
    feed = make_feed(Counted(), ahead)
    for step in range(6):
        for positions in shares(step):
            assert feed.take(step, positions) == list(positions)
    feed.stop()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_so_many_microbatches_are_loaded_ahead_across_steps_and_no_more(ahead: int) -> None:
    dataset = Counted()
    feed = make_feed(dataset, ahead)
    ends = [p.stop for step in range(6) for p in shares(step)]
    feed.begin(0)
    wait_until(lambda: len(dataset.calls) >= ends[ahead - 1])
    time.sleep(0.05)  # in which it could go on
    assert dataset.calls == list(range(ends[ahead - 1]))
    feed.take(0, shares(0)[0])
    time.sleep(0.05)
    assert dataset.calls == list(range(ends[ahead - 1]))  # whoever took it computes now
    feed.resume()
    wait_until(lambda: len(dataset.calls) >= ends[ahead])
    time.sleep(0.05)
    assert dataset.calls == list(range(ends[ahead]))
    feed.stop()


def test_the_dataset_is_called_by_one_thread_and_not_by_the_one_that_waits() -> None:
    dataset = Counted()
    feed = make_feed(dataset, 2)
    for step in (0, 1):
        for positions in shares(step):
            feed.take(step, positions)
    assert len(dataset.threads) == 1
    assert threading.current_thread() not in dataset.threads
    feed.stop()


def test_without_prefetch_there_is_no_thread() -> None:
    dataset = Counted()
    feed = make_feed(dataset, 0)
    feed.begin(0)
    assert not dataset.calls
    feed.take(0, shares(0)[0])
    assert dataset.threads == {threading.current_thread()}


def test_an_error_is_told_where_its_batch_is_asked_for() -> None:
    dataset = Counted(fails_at=15)
    feed = make_feed(dataset, 3)
    assert feed.take(0, shares(0)[0]) == [4, 5, 6]
    wait_until(lambda: 15 in dataset.calls)
    assert feed.take(0, shares(0)[1]) == [7, 8]
    message = r"^step 1: Task.dataset, at position 15, raised OSError: torn$"
    with pytest.raises(UserCodeError, match=message) as caught:
        feed.take(1, shares(1)[0])
    assert "raise OSError" in caught.value.user_traceback
    assert "/workers/" not in caught.value.user_traceback
    feed.stop()


def test_what_is_going_on_goes_on() -> None:
    """The end of a window is no reason to load anew."""
    dataset = Counted()
    feed = make_feed(dataset, 4)
    for step in (0, 1):
        feed.begin(step)
        for positions in shares(step):
            feed.take(step, positions)
    assert dataset.calls == list(range(len(dataset.calls)))
    feed.begin(3)  # step 2 has nothing for this group
    feed.begin(2)
    assert feed.take(3, shares(3)[0]) == list(shares(3)[0])
    assert dataset.calls == list(range(len(dataset.calls)))
    feed.stop()


def test_a_step_that_is_run_again_gets_the_same_samples() -> None:
    dataset = Counted()
    feed = make_feed(dataset, 4)
    feed.take(3, shares(3)[0])
    feed.begin(3)
    assert [feed.take(3, p) for p in shares(3)] == [list(p) for p in shares(3)]
    feed.begin(1)
    assert [feed.take(1, p) for p in shares(1)] == [list(p) for p in shares(1)]
    feed.stop()


def test_whoever_waits_is_freed_though_the_dataset_hangs() -> None:
    dataset = Counted()
    dataset.may_go.clear()
    feed = make_feed(dataset, 2)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            feed.take(0, shares(0)[0])
        except LostContactError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: bool(loaders()))
    feed.stop()
    waiting.join(PATIENCE_S)
    assert len(caught) == 1
    with pytest.raises(LostContactError):
        feed.take(0, shares(0)[0])
    dataset.may_go.set()


def test_a_new_plan_begins_while_the_last_call_of_the_old_one_goes_on() -> None:
    dataset = Counted()
    source = SampleSource(dataset, list, 0)
    old = Feed(source, shares, 6, CPU, 3)
    old.take(0, shares(0)[0])
    old.stop()
    new = Feed(source, lambda step: [range(10 * step, 10 * step + 10)], 6, CPU, 3)
    assert new.take(1, range(10, 20)) == list(range(10, 20))
    assert len({*dataset.calls}) == len(dataset.calls)  # nothing was read twice
    new.stop()


@pytest.mark.parametrize("ahead", [0, 2])
def test_which_call_of_the_dataset_is_waited_for_can_be_asked_by_another_thread(ahead: int) -> None:
    dataset = Counted()
    dataset.may_go.clear()
    feed = make_feed(dataset, ahead)
    assert feed.waits_for == ""
    taker = threading.Thread(target=feed.take, args=(0, shares(0)[0]))
    taker.start()
    wait_until(lambda: bool(feed.waits_for))
    assert feed.waits_for.startswith("step 0: Task.dataset, at position ")
    dataset.may_go.set()
    taker.join()
    assert feed.waits_for == ""
    feed.stop()
