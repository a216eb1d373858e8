"""What one more device is said to be worth, against a search with the device really there."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.builders import GIB, make_cluster, make_device, make_problem, make_profile
from orchestrator.core.cluster import ClusterState
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.margins import marginal_values
from orchestrator.strategies.joint import Joint


def best_plan(problem: PlanningProblem) -> Candidate:
    found = Joint().propose(problem, out_of_time=lambda: False)
    return max(found, key=lambda c: c.score)


@pytest.mark.parametrize("seed", range(6))
def test_worth_of_a_device_is_near_what_a_search_with_it_finds_and_hardly_above(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = {"a": int(rng.integers(1, 4)), "b": int(rng.integers(1, 4))}
    seconds = {"a": 0.01, "b": float(rng.uniform(0.012, 0.05))}
    memory = {"a": 16 * GIB, "b": int(rng.choice([2, 16])) * GIB}
    zone = {"a": "z1", "b": str(rng.choice(["z1", "z2"]))}
    bandwidth = float(10 ** rng.uniform(8, 10))

    def cluster(more: str | None = None) -> ClusterState:
        devices = [
            make_device(f"{p}-{i}", kind=p, zone=zone[p], memory_bytes=memory[p])
            for p, count in counts.items()
            for i in range(count + (p == more))
        ]
        return make_cluster(devices, bandwidth_bytes_per_s=bandwidth, latency_s=1e-4)

    profile = make_profile(
        {kind: [s] * 6 for kind, s in seconds.items()},
        param_bytes=4e7, boundary_bytes=1e5, microbatches=(1, 2, 4),
    )  # fmt: skip
    problem = make_problem(cluster(), profile, batch_samples=256, microbatch_samples=4)
    before = best_plan(problem)
    rate = before.estimate.samples_per_s
    values = marginal_values(CostModel(problem), before, ())
    assert values is not None
    for device in values.devices:
        after = best_plan(replace(problem, cluster=cluster(device.pool)))
        gain = after.estimate.samples_per_s - rate
        # Of the rate: a plan changed as a whole may use the device better, whole
        # microbatches may cost what fractions do not.
        assert device.samples_per_s <= gain + 0.02 * rate
        assert device.samples_per_s >= 0.5 * gain - 0.02 * rate
