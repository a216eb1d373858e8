"""What benchmarks of the running system work out; their times are not tested."""

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fleet
from benchmarks.live import make_config
from benchmarks.replan import PAIRS, measure
from benchmarks.soak import disturbances, growth, look

fleet.preload("tests.runtime.models", "benchmarks.moved")


@pytest.mark.parametrize(
    ("name", "num_moved"), [("reassign", 0), ("border", 1), ("swap", 4), ("groups-pipeline", 4)]
)
def test_a_change_of_plan_sends_the_layers_that_change_hands_once(
    name: str, num_moved: int
) -> None:
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    there, *_back = measure(pair, 0)
    assert (there.num_sent, there.num_necessary, there.digests_differ) == (num_moved, num_moved, 0)
    # A layer's state, and the names and shapes of its four tensors.
    assert 0 <= there.sent_bytes - there.necessary_bytes <= 400 * num_moved


def test_growth_is_the_slope_of_most_and_passes_over_outliers() -> None:
    at_s = np.arange(100.0)
    values = 5.0 + 0.1 * at_s
    values[::7] += 1000.0
    assert growth(at_s.tolist(), values.tolist()) == pytest.approx(9.9, rel=0.1)
    assert growth(at_s.tolist(), [3.0] * 100) == 0.0


def test_a_look_at_a_process_counts_what_it_holds(tmp_path: Path) -> None:
    before = look(os.getpid(), 0.0)
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        after = look(os.getpid(), 1.0)
    assert after.files == before.files + 2
    assert after.sockets == before.sockets
    assert before.memory_bytes > 1e6


def test_disturbances_are_events_that_the_file_may_name(tmp_path: Path) -> None:
    events = disturbances(60)
    config = make_config(tmp_path, fast=2, slow=2, events=events)
    assert len(config.emulation.events) == 60
