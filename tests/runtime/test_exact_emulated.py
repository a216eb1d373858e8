"""Emulated devices: virtual time is that of the closed form, training stays that of one process."""

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.slot import StepReport
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from workers.emulation import EmulatedStage

FORWARD_S, BACKWARD_S, STEP_END_S = 0.010, 0.020, 0.030
LINK = (0.0, 1e15)  # no latency, bytes take no time that shows
ADAMW = {"name": "adamw", "lr": 0.003}


def stage(ratio: float = 1.0, **options: object) -> EmulatedStage:
    return EmulatedStage(
        {2: (FORWARD_S * ratio, BACKWARD_S * ratio)},
        to_next=LINK,
        to_previous=LINK,
        step_end_s=STEP_END_S,
        **options,
    )


def steps_of(fleet: Fleet) -> list[dict[str, StepReport]]:
    """Reports by step, then device."""
    reports = [report for news in fleet.news() for report in news]
    last = max(r.step for r in reports)
    return [{r.device_id: r for r in reports if r.step == step} for step in range(last + 1)]


def test_step_takes_as_long_as_the_pipeline_and_the_step_end(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 4, "double": True},
                     global_batch=12, optimizer=ADAMW, steps=6)  # fmt: skip
    plan = make_plan([([("a", 2), ("b", 2)], (2, 2, 2, 2)), ([("c", 4)], (2, 2))])
    emulation = {"a": stage(), "b": stage(), "c": stage(1.5)}
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=6, emulation=emulation, clock_zero_s=100.0)
    fleet.run(plan)
    steps = steps_of(fleet)
    # (M + S - 1) (f + b) for the first group, M (f + b) for the second
    first_s, second_s = 5 * (FORWARD_S + BACKWARD_S), 2 * 1.5 * (FORWARD_S + BACKWARD_S)
    for by_device in steps:
        for r in by_device.values():
            assert r.step_s == pytest.approx(max(first_s, second_s) + STEP_END_S, abs=1e-6)
            assert r.wall_step_s > 0
            busy_s = second_s if r.device_id == "c" else 4 * (FORWARD_S + BACKWARD_S)
            assert r.compute_s == pytest.approx(busy_s, abs=1e-9)
            assert r.compute_s + r.receive_s + r.reduce_s == pytest.approx(r.step_s, abs=1e-9)
        assert len({(r.started_s, r.ended_s) for r in by_device.values()}) == 1
    for before, after in pairwise(steps):
        assert after["a"].started_s == pytest.approx(before["a"].ended_s, abs=1e-9)
    fleet.save(6, num_layers=4)
    alone, _ = train_alone(spec, 6)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 6, 4)) <= 1e-12


def test_slowed_device_shows_in_its_own_compute_time_only(fleet: Fleet, tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, steps=4)
    plan = make_plan([([("a", 2), ("b", 2)], (2, 2)), ([("c", 4)], (2, 2))])
    emulation = {"a": stage(), "b": stage(slowdowns=((2, 2.5),)), "c": stage()}
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=4, emulation=emulation)
    fleet.run(plan)
    compute_s = [{d: r.compute_s for d, r in by_device.items()} for by_device in steps_of(fleet)]
    for step, row in enumerate(compute_s):
        expected = dict.fromkeys("abc", 2 * (FORWARD_S + BACKWARD_S))
        expected["b"] *= 2.5 if step >= 2 else 1.0
        assert row == pytest.approx(expected, abs=1e-9)
