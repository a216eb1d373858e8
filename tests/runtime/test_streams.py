"""Iterable datasets: their own order is the order, whoever reads which part of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError
from workers.data import SampleSource

pytestmark = pytest.mark.runtime


class Stream(IterableDataset[int]):
    """Counts from 0; ``reads`` says what was ever read of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __iter__(self) -> Iterator[int]:
        yield from self.read(0)

    def read(self, start: int) -> Iterator[int]:
        for item in range(start, self.length):
            self.reads.append(item)
            yield item


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Seeking(Stream):
    def iter_from(self, epoch: int, start: int) -> Iterator[int]:
        return self.read(start)


class SizedSeeking(Seeking, Sized):
    pass


def take(source: SampleSource, positions: range | list[int]) -> list[int]:
    return source.batch(positions)


KINDS = [Stream, Sized, Seeking, SizedSeeking]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 7, 100])
def test_position_p_is_the_pth_item_and_the_stream_starts_anew(kind: type, length: int) -> None:
    source = SampleSource(kind(length), list, seed=4)
    assert take(source, range(30)) == [p % length for p in range(30)]


@pytest.mark.parametrize("kind", KINDS)
def test_any_way_of_asking_gives_the_same_samples(kind: type) -> None:
    source = SampleSource(kind(7), list, seed=0)
    positions = [2, 3, 9, 9, 0, 25, 24, 70, 6, 7, 13, 14, 20, 21, 1]
    assert take(source, positions) == [p % 7 for p in positions]


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_several_workers_are_the_stream_in_order(kind: type) -> None:
    """The committed samples, as a multiset, are the first N items whatever the plan was."""
    plans = [(4, 4), (1, 5, 2), (8,)]  # of each step: samples of the groups
    found: list[int] = []
    sources = [SampleSource(kind(11), list, seed=0) for _ in range(3)]
    for step in range(9):
        first = 8 * step
        for source, share in zip(sources, plans[step // 3], strict=False):
            found += take(source, range(first, first + share))
            first += share
    assert found == [p % 11 for p in range(72)]


def test_one_that_seeks_reads_its_own_samples_only() -> None:
    stream = SizedSeeking(100)
    source = SampleSource(stream, list, seed=0)
    for first in range(0, 100, 10):
        take(source, range(first + 2, first + 5))
    assert stream.reads == [p for first in range(0, 100, 10) for p in range(first + 2, first + 5)]


def test_what_a_running_step_has_read_is_not_read_again() -> None:
    """A change of plan gives a worker samples that it has skipped."""
    stream = Stream(100)
    source = SampleSource(stream, list, seed=0)
    source.release(32)
    take(source, range(40, 44))
    take(source, range(52, 56))  # ahead
    assert take(source, range(32, 48)) == list(range(32, 48))
    assert stream.reads == list(range(56))
    source.release(48)
    assert take(source, range(48, 50)) == [48, 49]
    assert take(source, range(40, 42)) == [40, 41]  # a checkpoint was restored
    assert stream.reads == [*range(56), *range(42)]


def test_what_a_stream_draws_is_a_function_of_the_position() -> None:
    class Drawing(Stream):
        def read(self, start: int) -> Iterator[Any]:
            for _ in super().read(start):
                yield torch.rand(1).item()

    whole = take(SampleSource(Drawing(20), list, seed=0), range(20))
    part = take(SampleSource(Drawing(20), list, seed=0), range(12, 18))
    assert part == whole[12:18]
    assert len(set(whole)) == 20


def test_a_stream_is_told_its_epoch() -> None:
    class Turned(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return ((self.epoch, item) for item in range(3))

    source = SampleSource(Turned(3), list, seed=0)
    assert take(source, range(4, 8)) == [(1, 1), (1, 2), (2, 0), (2, 1)]


def test_an_iterable_of_any_kind_is_a_stream() -> None:
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter((5, 6, 7))

    assert take(SampleSource(Plain(), list, seed=0), range(4)) == [5, 6, 7, 5]


@pytest.mark.parametrize("kind", [Sized, SizedSeeking])
def test_one_that_ends_before_its_length_is_refused(kind: type) -> None:
    stream = kind(5)
    source = SampleSource(stream, list, seed=0)
    stream.length = 3
    with pytest.raises(UserCodeError, match=r"position 3 .*: the stream ended before sample 3 of"):
        take(source, range(8))


def test_one_of_another_length_the_second_time_is_refused() -> None:
    stream = Stream(5)
    source = SampleSource(stream, list, seed=0)
    take(source, range(6))
    stream.length = 4
    with pytest.raises(UserCodeError, match="ended before sample 4 of 5; it must give as many"):
        take(source, range(6, 16))


def test_one_that_goes_on_beyond_its_length_is_cut_there() -> None:
    stream = Sized(5)
    source = SampleSource(stream, list, seed=0)
    stream.length = 9
    assert take(source, range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_an_empty_one_is_refused() -> None:
    for stream in (Stream(0), Seeking(0)):
        with pytest.raises(UserCodeError, match="the stream has no sample"):
            take(SampleSource(stream, list, seed=0), range(1))
    with pytest.raises(ConfigError, match="is empty"):
        SampleSource(Sized(0), list, seed=0)


def test_what_it_raises_is_told_with_its_position() -> None:
    class Torn(Stream):
        def read(self, start: int) -> Iterator[int]:
            yield from (0, 1, 2)
            raise ConnectionError("gone")

    source = SampleSource(Torn(9), list, seed=0)
    message = r"^step 1: Task.dataset, at position 4, raised ConnectionError: gone$"
    with pytest.raises(UserCodeError, match=message):
        source.batch(range(4, 6), "step 1: ")


def test_epochs_need_a_length_and_steps_do_not() -> None:
    options = {"task": "m:t", "global_batch": 4}
    assert TrainingOptions(steps=3, **options).num_samples(None) == 12
    with pytest.raises(ConfigError, match=r"training.epochs is 2, but Task.dataset has no __len__"):
        TrainingOptions(epochs=2, **options).num_samples(None)
