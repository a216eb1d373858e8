"""Where a run stops: all active workers after the same step, whenever each of them hears of it."""

import time
from pathlib import Path

from benchmarks.fleet import Fleet, make_plan
from tests.runtime.harness import make_spec

PLAN = make_plan([([("a", 1), ("b", 2)], (2, 2)), ([("c", 3)], (2,))])


DEVICES = tuple("abcd")


def start(fleet: Fleet, tmp_path: Path, *, end_step: int, steps: int = 100_000) -> None:
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 3}, global_batch=6, steps=steps,
        checkpoint_every_steps=100_000,
    )  # fmt: skip
    fleet.start(spec)
    fleet.install(PLAN, first_step=0, end_step=end_step)


def wait_for_steps(fleet: Fleet, num_steps: int) -> None:
    deadline_s = time.monotonic() + 30.0
    while not any(r.step >= num_steps for news in fleet.news() for r in news):
        assert time.monotonic() < deadline_s, f"step {num_steps} did not come"


def test_hold_told_to_one_worker_stops_all_after_the_same_step(
    fleet: Fleet, tmp_path: Path
) -> None:
    start(fleet, tmp_path, end_step=100_000)
    order = fleet.send("run", ranks=[0, 1, 2])
    wait_for_steps(fleet, 3)
    fleet.all("hold", ranks=[1])
    ends = fleet.receive(order)
    assert len(set(ends)) == 1
    assert ends[0].reason == "hold"
    assert 3 < ends[0].next_step < 100_000
    fleet.all("extend", ends[0].next_step + 2)
    assert fleet.run(PLAN).reason == "window"  # a hold is not remembered


def test_window_ends_where_the_last_informed_worker_thinks(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet, tmp_path, end_step=4)
    order = fleet.send("run", ranks=[0, 1, 2])
    fleet.all("extend", 9, ranks=[0, 2])
    assert {(e.next_step, e.reason) for e in fleet.receive(order)} == {(4, "window")}
    fleet.all("extend", 6, ranks=[1])
    assert fleet.run(PLAN).next_step == 6
    assert fleet.run(PLAN).next_step == 6  # nothing left: returns at once


def test_window_extended_in_time_goes_on_without_a_pause(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet, tmp_path, end_step=100_000)
    order = fleet.send("run", ranks=[0, 1, 2])
    wait_for_steps(fleet, 2)
    fleet.all("extend", 1)  # passed already: the end is the next boundary
    ends = fleet.receive(order)
    assert len(set(ends)) == 1
    assert ends[0].reason == "window"


def test_training_ends_after_its_last_step_whatever_the_window(
    fleet: Fleet, tmp_path: Path
) -> None:
    """microsoft/PyMarlin#80, horovod/horovod#708: unequal numbers of batches hang at the end."""
    start(fleet, tmp_path, end_step=100, steps=5)
    end = fleet.run(PLAN)
    assert (end.next_step, end.reason) == (5, "finished")
    steps = [[r.step for r in news] for news in fleet.news()]
    assert steps == [[0, 1, 2, 3, 4]] * 3 + [[]]


def test_idle_worker_returns_at_once(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet, tmp_path, end_step=3)
    assert fleet.all("run", ranks=[3])[0].reason == "window"


def test_reports_add_up_to_the_global_batch(fleet: Fleet, tmp_path: Path) -> None:
    start(fleet, tmp_path, end_step=2)
    fleet.run(PLAN)
    reports = [report for news in fleet.news() for report in news]
    assert {(r.device_id, r.group_index, r.num_samples) for r in reports} == {
        ("a", 0, 4), ("b", 0, 4), ("c", 1, 2),
    }  # fmt: skip
    assert len({(r.step, r.loss, r.grad_norm, r.lr) for r in reports}) == 2
    for r in reports:
        assert r.generation == 1
        assert 0 < r.compute_s <= r.step_s == r.wall_step_s
        assert r.started_s < r.ended_s
        assert r.cpu_s > 0
        assert r.peak_memory_bytes > 0
        assert r.num_operations == 2 * (2 if r.group_index == 0 else 1)
