"""What traffic takes from a promise, against a plan whose cuts and shares are even."""

from dataclasses import replace

import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_problem,
    make_profile,
)
from orchestrator.planning.cost import CostModel
from orchestrator.planning.sums import alone

ZONES = {"a-0": "z1", "b-0": "z2", "c-0": "z2", "d-0": "z1"}


def cost_of(param_bytes: float = 1e8, boundary_bytes: list[float] | None = None) -> CostModel:
    """Two zones, between which a megabyte costs a thousandth of a cent."""
    devices = [make_device(name, zone=zone) for name, zone in ZONES.items()]
    cluster = make_cluster(devices, bandwidth_bytes_per_s=1e9, egress_usd_per_byte=1e-11)
    profile = make_profile(param_bytes=param_bytes, boundary_bytes=boundary_bytes or [1e6] * 4)
    problem = make_problem(cluster, profile, batch_samples=16)
    return CostModel(replace(problem, overlap=False))


@pytest.mark.parametrize("names", [("a-0", "b-0"), ("a-0", "b-0", "c-0", "d-0"), ("a-0", "d-0")])
@pytest.mark.parametrize("stages", [1, 2])
def test_of_even_plans_it_is_what_the_cost_model_says(names: tuple[str, ...], stages: int) -> None:
    cost = cost_of()
    devices = [cost.problem.cluster.device(name) for name in names]
    cuts = [4 * s // stages for s in range(stages + 1)]
    count = len(devices) // stages
    groups = [
        make_group(devices[g * stages : (g + 1) * stages], cuts, (1,) * (16 // count))
        for g in range(count)
    ]
    traffic = cost.least_traffic(
        [(tuple(s.team for s in group.stages), alone(group.stages)) for group in groups]
    )
    estimate = cost.evaluate(groups, "1f1b")
    assert traffic.sums_s == pytest.approx(estimate.sync_s)
    usd = traffic.usd_per_step + 16 * traffic.usd_per_sample
    assert usd == pytest.approx(estimate.egress_usd_per_s * estimate.step_s)


def test_a_chain_that_is_not_cut_yet_counts_the_border_of_fewest_bytes() -> None:
    cost = cost_of(boundary_bytes=[8e6, 1e6, 4e6, 0.0])
    group = make_group([cost.problem.cluster.device(d) for d in ("a-0", "b-0")], (0, 1, 4), (1,))
    traffic = cost.least_traffic([(tuple(s.team for s in group.stages), alone(group.stages))])
    assert tuple(traffic) == pytest.approx((0.0, 0.0, 2 * 1e6 * 1e-11))
