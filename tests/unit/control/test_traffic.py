import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.control.traffic import move_traffic, step_traffic
from orchestrator.core.plan import Move
from orchestrator.planning.cost import CostModel

A, B, C = make_device("a-0"), make_device("b-0", zone="z2"), make_device("c-0")
CLUSTER = make_cluster([A, B, C], egress_usd_per_byte=1e-9)


def test_a_border_between_zones_sends_outputs_down_and_gradients_up() -> None:
    plan = make_plan(make_group([A, B], [0, 2, 4], [1, 1, 2]))
    sent = step_traffic(plan, CLUSTER, make_profile(boundary_bytes=1000.0))
    assert [(t.device_id, t.pool, t.size_bytes) for t in sent] == [
        ("a-0", "a", 4000.0), ("b-0", "b", 4000.0),
    ]  # fmt: skip
    assert sum(t.usd for t in sent) == pytest.approx(8e-6)


def test_inside_a_zone_nothing_is_charged() -> None:
    plan = make_plan(make_group([A, C], [0, 2, 4], [4]))
    assert step_traffic(plan, CLUSTER, make_profile(boundary_bytes=1000.0)) == ()


@pytest.mark.parametrize("ties", [(), ((0, 3),)])
def test_a_step_costs_what_the_cost_model_says(ties: tuple[tuple[int, ...], ...]) -> None:
    model = make_profile(
        boundary_bytes=[3e3, 5e3, 7e3, 0], param_bytes=[2e6, 1e6, 3e6, 4e6], ties=ties,
        tie_bytes=(5e5,) * len(ties), microbatches=(1, 2),
    )  # fmt: skip
    plan = make_plan(make_group([A, B], [0, 1, 4], [2, 2, 1]), make_group([C], [0, 4], [1, 1, 1]))
    estimate = CostModel(make_problem(CLUSTER, model)).evaluate(plan.groups, plan.schedule)
    usd = sum(t.usd for t in step_traffic(plan, CLUSTER, model))
    assert usd == pytest.approx(estimate.egress_usd_per_s * estimate.step_s, rel=1e-12)


def test_moved_layers_are_charged_to_the_device_that_sends_them() -> None:
    moves = [Move(0, "a-0", "b-0", 100), Move(1, "a-0", "b-0", 50), Move(2, "a-0", "c-0", 70)]
    (sent,) = move_traffic(moves, CLUSTER)
    assert (sent.device_id, sent.size_bytes) == ("a-0", 150.0)


def test_a_move_from_a_device_that_left_is_no_traffic() -> None:
    assert move_traffic([Move(0, "gone-0", "b-0", 100)], CLUSTER) == ()
