from dataclasses import replace

import pytest

from benchmarks.builders import make_cluster, make_device, make_problem, make_profile
from orchestrator.core.cluster import ClusterState, make_team
from orchestrator.core.plan import Group, Stage
from orchestrator.planning.blocks import with_surcharges, without_surcharges
from orchestrator.planning.cost import CostModel
from orchestrator.strategies.joint import Joint

DEVICES = [make_device(f"gpu-{i}", node_id="node") for i in range(3)]
BASE = make_cluster(DEVICES, price_usd_per_s=2.0)


def cluster(**offer: object) -> ClusterState:
    return replace(BASE, now_s=1000.0, offers=(replace(BASE.offers[0], **offer),))  # type: ignore[arg-type]


def surcharges(
    state: ClusterState, paid_until_s: dict[str, float], *, free: bool = True
) -> list[float]:
    found = with_surcharges(state, paid_until_s, horizon_s=600.0, slot_s=60.0, prepaid_is_free=free)
    return [device.surcharge_usd_per_s for device in found.devices]


def test_a_device_rented_anew_counts_what_of_its_block_lies_beyond_the_horizon() -> None:
    """An hour is billed for ten minutes: 3600 s x 2 $/s over 600 s are 12 $/s, 10 above 2."""
    assert surcharges(cluster(minimum_s=3600.0, quantum_s=1.0), {}) == pytest.approx([10.0] * 3)
    assert surcharges(cluster(minimum_s=0.0, quantum_s=3600.0), {}) == pytest.approx([10.0] * 3)
    assert surcharges(cluster(minimum_s=600.0, quantum_s=60.0), {}) == [0.0] * 3


def test_a_device_paid_ahead_costs_nothing_until_its_block_ends_and_no_block_while_kept() -> None:
    """Half of the horizon is paid: 1 of 2 $/s; past the end of a block only seconds count."""
    hourly = cluster(quantum_s=3600.0)
    assert surcharges(hourly, {"gpu-1": 1300.0}) == pytest.approx([10.0, -1.0, 10.0])
    assert surcharges(hourly, {"gpu-1": 9000.0}) == pytest.approx([10.0, -2.0, 10.0])
    assert surcharges(hourly, {"gpu-1": 1000.0}) == pytest.approx([10.0, 0.0, 10.0])


def test_a_pool_has_two_prices_at_most() -> None:
    """Paid for 150 and 450 s of 600: a quarter and three quarters are half of each."""
    hourly = cluster(quantum_s=3600.0)
    found = surcharges(hourly, {"gpu-0": 1150.0, "gpu-2": 1450.0})
    assert found == pytest.approx([-1.0, 10.0, -1.0])


def test_above_the_top_of_the_backlog_paid_time_counts_in_full() -> None:
    hourly = cluster(quantum_s=3600.0)
    assert surcharges(hourly, {"gpu-1": 1300.0}, free=False) == pytest.approx([10.0, 0.0, 10.0])


@pytest.mark.parametrize(
    "offer",
    [
        {"quantum_s": 1.0},
        {"quantum_s": 60.0, "minimum_s": 60.0},
        {"quantum_s": 3600.0, "billed": "while_present"},
    ],
)
def test_seconds_blocks_within_a_slot_and_presence_leave_the_cluster_as_it_is(
    offer: dict[str, object],
) -> None:
    state = cluster(**offer)
    same = with_surcharges(
        state, {"gpu-1": 1030.0}, horizon_s=600.0, slot_s=60.0, prepaid_is_free=True
    )
    assert same is state


def test_the_score_counts_surcharges_and_the_cost_shown_does_not() -> None:
    """Two devices at 2 $/s, one anew (+10 $/s), one half paid (-1 $/s)."""
    state = with_surcharges(
        cluster(quantum_s=3600.0), {"gpu-1": 1300.0},
        horizon_s=600.0, slot_s=60.0, prepaid_is_free=True,
    )  # fmt: skip
    problem = make_problem(
        state, make_profile({"gpu": [1.0, 1.0]}), penalty_weight=3.0, backlog_usd=0.5
    )
    cost = CostModel(problem)
    groups = tuple(
        Group((Stage(make_team([d]), 0, 2),), (1,) * (problem.batch_samples // 2))
        for d in state.devices[:2]
    )
    estimate = cost.evaluate(groups, "1f1b")
    assert estimate.cost_usd_per_s - estimate.egress_usd_per_s == pytest.approx(4.0)
    assert estimate.surcharge_usd_per_s == pytest.approx(9.0)
    assert cost.score(estimate) == pytest.approx(
        3.0 * estimate.samples_per_s - 0.5 * (estimate.cost_usd_per_s + 9.0)
    )
    plain = CostModel(replace(problem, cluster=without_surcharges(state)))
    assert plain.evaluate(groups, "1f1b") == replace(estimate, surcharge_usd_per_s=0.0)


@pytest.mark.parametrize("num_devices", [3, 40])
def test_a_search_takes_the_devices_that_are_paid_ahead_and_leaves_their_like(
    num_devices: int,
) -> None:
    """2 samples/s for 2 $/s at 1.5 samples/$: a loss, but not where half of it is paid."""
    devices = [make_device(f"gpu-{i}", node_id=f"node-{i // 4}") for i in range(num_devices)]
    base = make_cluster(devices, price_usd_per_s=2.0)
    hourly = replace(base, offers=(replace(base.offers[0], quantum_s=3600.0),))
    held = [f"gpu-{i}" for i in (1, num_devices - 1)]
    state = with_surcharges(
        hourly, dict.fromkeys(held, 300.0), horizon_s=600.0, slot_s=60.0, prepaid_is_free=True
    )
    problem = make_problem(
        state, make_profile({"gpu": [1 / 12] * 2}), batch_samples=64, backlog_usd=1.5
    )
    best = Joint().propose(replace(problem, penalty_weight=1.0), out_of_time=lambda: False)[0]
    assert sorted(best.plan.device_ids) == sorted(held)
