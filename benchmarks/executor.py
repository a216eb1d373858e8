"""Own executor on emulated devices against the event evaluation: wall over predicted step time."""

import argparse
import statistics
import tempfile

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile
from benchmarks.fleet import Fleet, make_plan, make_spec
from benchmarks.result import Figure, Result, main
from orchestrator.core.plan import Plan
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from workers.emulation import EmulatedStage

FORWARD_S, BACKWARD_S = 0.010, 0.020  # of a device of speed 1: no operation is shorter
STEP_END_S = 0.010
NUM_MICROBATCHES, MICROBATCH = 16, 1
LATENCY_S, BANDWIDTH_BYTES_PER_S = 0.002, 20e6
BOUNDARY_BYTES, NUM_LAYERS = 8 * 4, 8  # of one sample of benchmarks.tasks.chain


def predicted_step_s(plan: Plan, slowdown: dict[str, float]) -> float:
    """What the event evaluation says of the plan's one group, the end of the step included."""
    per_stage = NUM_LAYERS // len(slowdown)
    cluster = make_cluster(
        [make_device(device, kind="cpu", slowdown=ratio) for device, ratio in slowdown.items()],
        latency_s=LATENCY_S,
        bandwidth_bytes_per_s=BANDWIDTH_BYTES_PER_S,
    )
    profile = make_profile(
        {"cpu": [FORWARD_S / per_stage] * NUM_LAYERS},
        backward_ratio=BACKWARD_S / FORWARD_S,
        boundary_bytes=BOUNDARY_BYTES,
    )
    cost = CostModel(make_problem(cluster, profile))
    return group_makespan(cost, plan.groups[0], plan.schedule) + STEP_END_S


def measure(num_stages: int, num_steps: int) -> dict[str, object]:
    """Run a pipeline of devices of speed 1 and 1.5 in turn; medians over steps and devices."""
    devices = [f"device-{s}" for s in range(num_stages)]
    chain = [(device, NUM_LAYERS // num_stages) for device in devices]
    plan = make_plan([(chain, [MICROBATCH] * NUM_MICROBATCHES)], extra=num_stages)
    slow = [1.0 if s % 2 else 1.5 for s in range(num_stages)]
    emulation = {
        device: EmulatedStage(
            seconds={MICROBATCH: (FORWARD_S * slow[s], BACKWARD_S * slow[s])},
            to_next=(LATENCY_S, BANDWIDTH_BYTES_PER_S) if s < num_stages - 1 else None,
            to_previous=(LATENCY_S, BANDWIDTH_BYTES_PER_S) if s else None,
            step_end_s=STEP_END_S,
        )
        for s, device in enumerate(devices)
    }
    predicted_s = predicted_step_s(plan, dict(zip(devices, slow, strict=True)))
    with tempfile.TemporaryDirectory() as folder, Fleet(devices) as fleet:
        spec = make_spec(
            "benchmarks.tasks:chain", folder, global_batch=NUM_MICROBATCHES, steps=num_steps
        )
        fleet.start(spec)
        fleet.install(plan, first_step=0, end_step=num_steps, emulation=emulation, checkpoint=False)
        fleet.run(plan)
        reports = [item for items in fleet.news() for item in items]
    wall_s = statistics.median(r.wall_step_s for r in reports if r.step > 0)
    return {
        "stages": num_stages,
        "predicted_s": predicted_s,
        "virtual_s": statistics.median(r.step_s for r in reports),
        "wall_s": wall_s,
        "ratio": wall_s / predicted_s,
        "late_ratio": sum(r.num_late for r in reports) / sum(r.num_operations for r in reports),
    }


def run(options: argparse.Namespace) -> Result:
    """4 and 8 stages, 16 microbatches."""
    rows = [measure(stages, 4 if options.quick else 12) for stages in (4, 8)]
    figures = [
        Figure("ratio_max", max(float(str(row["ratio"])) for row in rows), "1", "<= 1.05"),
        Figure(
            "virtual_error_max",
            max(abs(float(str(r["virtual_s"])) / float(str(r["predicted_s"])) - 1) for r in rows),
            "1",
            "<= 1e-6",
        ),
        Figure("late_ratio_max", max(float(str(row["late_ratio"])) for row in rows), "1"),
    ]
    return Result(tuple(figures), tuple(rows))


if __name__ == "__main__":
    main("executor", run)
