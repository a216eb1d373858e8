"""What a plan is worth beside plans of parts of the same cluster, in exact time."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.random_problems import Size, random_problem
from orchestrator.core.slot import PlanningProblem
from orchestrator.strategies.joint import Joint

NEARLY = 1 - 5e-3


def worth(problem: PlanningProblem) -> float:
    """J of the best candidate."""
    return Joint().propose(problem, out_of_time=lambda: False)[0].score


@pytest.mark.parametrize(
    ("size", "seed"),
    [
        (Size(devices=6, layers=8, batch=4, microbatch=4, devices_per_node=2), 0),
        (Size(devices=6, layers=8, batch=8, microbatch=2, devices_per_node=2,
              team_sizes=(1, 2)), 1),
        (Size(devices=10, layers=12, batch=3, microbatch=2, classes=2), 2),
        (Size(devices=8, layers=6, batch=32, microbatch=4, classes=4), 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_pool_makes_a_plan_worse_than_one_without_it(
    size: Size, seed: int, schedule: str
) -> None:
    problem = random_problem(np.random.default_rng(seed), size, money=0.1 * (seed % 2))
    problem = replace(problem, schedules=(schedule,), overlap=True)
    reached, devices = worth(problem), problem.cluster.devices
    for pool in sorted({d.pool for d in devices}):
        rest = tuple(d for d in devices if d.pool != pool)
        if rest:
            part = replace(problem, cluster=replace(problem.cluster, devices=rest))
            assert reached >= NEARLY * worth(part)


def test_with_fewer_samples_than_devices_the_fastest_work() -> None:
    """Every group needs a sample, so that not all devices can be groups by themselves."""
    size = Size(devices=10, layers=6, batch=3, microbatch=1, classes=1)
    problem = random_problem(np.random.default_rng(5), size)
    devices = tuple(
        replace(d, slowdown=1.0 + 0.2 * (i >= 3)) for i, d in enumerate(problem.cluster.devices)
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    fastest = replace(problem, cluster=replace(problem.cluster, devices=devices[:3]))
    assert worth(problem) >= NEARLY * worth(fastest)
