import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.plan import Migration, Move
from orchestrator.planning.migration import GROUP_SETUP_S, plan_migration

DEVICES = [make_device(f"d-{i}") for i in range(4)]
MODEL = make_profile(num_layers=4, param_bytes=[1e6, 2e6, 3e6, 4e6])


def problem(devices=DEVICES, **cluster):
    return make_problem(make_cluster(devices, **cluster), MODEL)


def pipeline(first, second, cut):
    return make_plan(make_group([DEVICES[first], DEVICES[second]], [0, cut, 4], [1] * 8))


def test_a_moved_border_sends_the_layers_that_changed_hands():
    migration = plan_migration(problem(), pipeline(0, 1, 1), pipeline(0, 1, 3))
    # Adam: parameter and two moments, 3 bytes a parameter byte; gradients stay behind.
    assert migration.moves == (Move(1, "d-1", "d-0", 6_000_000), Move(2, "d-1", "d-0", 9_000_000))


def test_pause_is_the_busiest_endpoint_and_the_building_of_groups():
    migration = plan_migration(
        problem(latency_s=0.5, bandwidth_bytes_per_s=1e6), pipeline(0, 1, 1), pipeline(0, 1, 3)
    )
    assert migration.pause_s == pytest.approx(GROUP_SETUP_S + 0.5 + 15.0)


def test_transfers_of_different_pairs_run_at_the_same_time():
    migration = plan_migration(
        problem(bandwidth_bytes_per_s=1e6), pipeline(0, 1, 2), pipeline(2, 3, 2)
    )
    assert {(m.source, m.target) for m in migration.moves} == {("d-0", "d-2"), ("d-1", "d-3")}
    assert migration.pause_s == pytest.approx(GROUP_SETUP_S + 21.0)  # 7 MB against 3 MB, times 3


def test_replicas_take_turns_as_sources():
    old = make_plan(
        make_group([DEVICES[0]], [0, 4], [1] * 4), make_group([DEVICES[1]], [0, 4], [1] * 4)
    )
    new = make_plan(make_group([DEVICES[2]], [0, 4], [1] * 8))
    sources = [m.source for m in plan_migration(problem(), old, new).moves]
    assert sources == ["d-0", "d-1", "d-0", "d-1"]


def test_a_layer_whose_owners_have_all_left_is_not_moved():
    migration = plan_migration(problem(DEVICES[1:]), pipeline(0, 1, 2), pipeline(1, 2, 2))
    assert migration.moves == (Move(2, "d-1", "d-2", 9_000_000), Move(3, "d-1", "d-2", 12_000_000))


def test_shares_alone_move_nothing_but_the_groups_are_rebuilt():
    old = make_plan(
        make_group([DEVICES[0]], [0, 4], [1] * 4), make_group([DEVICES[1]], [0, 4], [1] * 4)
    )
    new = make_plan(
        make_group([DEVICES[0]], [0, 4], [1] * 5), make_group([DEVICES[1]], [0, 4], [1] * 3)
    )
    assert plan_migration(problem(), old, new) == Migration((), GROUP_SETUP_S)


@pytest.mark.parametrize("old", [None, make_plan(), pipeline(0, 1, 2)])
def test_a_first_plan_and_the_same_work_cost_no_pause(old):
    assert plan_migration(problem(), old, pipeline(0, 1, 2)) == Migration()
