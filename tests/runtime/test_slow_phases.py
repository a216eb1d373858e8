"""Real workers, one of which is slow in one phase: that one is named, with its phase."""

from pathlib import Path

import pytest

from benchmarks.builders import make_cluster, make_device
from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.slot import Observation, StepEstimate, StepReport
from orchestrator.telemetry.estimator import Estimator
from tests.runtime.harness import make_spec

DEVICES = ("a", "b", "c")
SAID_S = 0.1
"""Of a step's computing: far more than these layers take, far less than the delays."""

DELAY_S = 0.15


@pytest.mark.parametrize(
    ("phase", "rank"),
    [(phase, rank) for phase in ("forward", "backward") for rank in range(3)]
    + [("loader", 0), ("loader", 2)],
)
def test_the_slow_one_is_named_with_its_phase_though_all_wait_for_it(
    fleet: Fleet, phase: str, rank: int, tmp_path: Path
) -> None:
    """traceopt-ai/traceml#252: one rank is 200 ms late, all report one step time, none is named."""
    pid = fleet.processes[rank].pid
    spec = make_spec(
        "sleepy",
        str(tmp_path),
        task_args={"phase": phase, "pid": pid, "delay_s": DELAY_S},
        global_batch=4,
        microbatch=2,
    )
    plan = make_plan([([(device, 1) for device in DEVICES], (2, 2))])
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=5)
    fleet.run(plan)
    news = [item for items in fleet.news() for item in items]
    # The first step also loads what is only needed then.
    reports = [item for item in news if isinstance(item, StepReport) and item.step > 0]
    cluster = make_cluster([make_device(device) for device in DEVICES])
    estimator = Estimator(cluster)
    said = tuple((device, SAID_S) for device in DEVICES)
    estimator.update(
        Observation(60.0, (), tuple(reports), (), cluster.offers, 5, cluster.devices),
        StepEstimate(1.0, 4.0, 1.0, compute_s=said),
        plan,
    )
    assert min(report.step_s for report in reports) >= DELAY_S
    worst = max(estimator.stragglers, key=lambda straggler: straggler.ratio)
    assert (worst.device_id, worst.phase) == (
        DEVICES[rank],
        "input" if phase == "loader" else "compute",
    )
    # A busy machine makes others late now and then, never in every step.
    for device in set(DEVICES) - {DEVICES[rank]}:
        mine = [report for report in reports if report.device_id == device]
        assert min(report.compute_s + report.data_s for report in mine) < SAID_S


def test_boundaries_are_timed_message_by_message(fleet: Fleet, tmp_path: Path) -> None:
    """Who received them says so; of both ways, with as many bytes as were sent."""
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 3, "width": 512}, global_batch=128
    )
    plan = make_plan([([(device, 1) for device in DEVICES], (64, 64))])
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=1)
    fleet.run(plan)
    reports = {r.device_id: r for news in fleet.news() for r in news}
    seen = {(t.source, t.target): t for r in reports.values() for t in r.transfers}
    assert {t.target for t in reports["b"].transfers} == {"b"}
    assert set(seen) == {("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")}
    boundary_bytes = 128 * 512 * 4
    assert all(t.num_messages == 2 and t.size_bytes >= boundary_bytes for t in seen.values())
    assert all(0 < t.busy_s < reports["b"].step_s for t in seen.values())
