import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.builders import make_device, make_group, make_plan, make_stages, team_of
from orchestrator.core.plan import Group, Plan, Stage, segments, step_range, step_shares

D = [make_device(f"d-{i}") for i in range(8)]


def test_steps_tile_the_run_and_only_the_last_one_is_short():
    assert [step_range(step, 8, 20) for step in range(4)] == [(0, 8), (8, 16), (16, 20), (20, 20)]


def test_a_stage_holds_at_least_one_layer_and_one_microbatch():
    with pytest.raises(ValueError, match="layers 2 to 2; a stage holds at least one layer"):
        Stage(team_of(D[0]), 2, 2)
    with pytest.raises(ValueError, match="inflight 0; it must be at least 1"):
        Stage(team_of(D[0]), 0, 2, inflight=0)


def test_stages_of_a_group_tile_the_model_from_its_first_layer():
    first, second = make_stages(D[:2], [0, 2, 4])
    with pytest.raises(ValueError, match="starts at layer 3, but the stage before it ends at 2"):
        Group((first, replace(second, first_layer=3)), (1,))
    with pytest.raises(ValueError, match="the first of which starts at layer 0"):
        Group((second,), (1,))


@pytest.mark.parametrize("microbatches", [(), (2, 0)])
def test_a_group_needs_microbatches_with_samples(microbatches):
    with pytest.raises(ValueError, match="each must hold at least one sample"):
        Group(make_stages(D[:1], [0, 4]), microbatches)


def test_a_device_is_in_at_most_one_stage_of_a_plan():
    with pytest.raises(ValueError, match=r"\['d-0'\] appear twice"):
        make_plan(make_group(D[:2], [0, 2, 4], [1]), make_group(D[:1], [0, 4], [1]))


def test_every_group_of_a_plan_holds_the_whole_model():
    with pytest.raises(ValueError, match="every group holds the whole model"):
        make_plan(make_group(D[:1], [0, 4], [1]), make_group(D[1:2], [0, 5], [1]))


def test_no_groups_are_idle_and_generations_do_not_change_the_work():
    plan = make_plan(make_group(D[:2], [0, 2, 4], [4, 4, 3]))
    assert make_plan().is_idle
    assert not plan.is_idle
    assert plan.num_samples == 11
    assert plan.same_work(plan.with_generation(9))
    assert not plan.same_work(replace(plan, schedule="gpipe"))
    assert plan.stage_of("d-1") == (0, 1)
    assert plan.stage_of("d-7") is None


def test_plans_survive_pickling_and_hash_by_value():
    plan = make_plan(make_group(D[:2], [0, 2, 4], [4, 4, 3]))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)


def test_a_full_step_gives_every_group_its_own_microbatches():
    plan = make_plan(make_group(D[:1], [0, 4], [4, 4]), make_group(D[1:2], [0, 4], [3, 1]))
    assert step_shares(plan.groups, 12) == ((4, 4), (3, 1))


def test_a_short_last_step_is_dealt_in_order_and_may_leave_groups_empty():
    plan = make_plan(make_group(D[:1], [0, 4], [4, 4]), make_group(D[1:2], [0, 4], [3, 1]))
    assert step_shares(plan.groups, 5) == ((4, 1), ())
    assert step_shares(plan.groups, 9) == ((4, 4), (1,))


def test_more_samples_than_the_plan_holds_are_refused():
    plan = make_plan(make_group(D[:1], [0, 4], [4, 4]))
    with pytest.raises(
        ValueError, match="a step of 9 samples does not fit the plan, which holds 8"
    ):
        step_shares(plan.groups, 9)


@given(
    shares=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    part=st.floats(0, 1),
)
def test_shares_hold_exactly_the_step_and_never_more_than_the_plan(shares, part):
    groups = [make_group([D[g]], [0, 4], share) for g, share in enumerate(shares)]
    wanted = max(1, round(part * sum(map(sum, shares))))
    found = step_shares(groups, wanted)
    assert sum(map(sum, found)) == wanted
    for mine, full in zip(found, shares, strict=True):
        assert all(a <= b for a, b in zip(mine, full, strict=False))


def test_segments_are_cut_at_every_border_of_every_group():
    groups = [
        make_group(D[:2], [0, 2, 6], [1]),
        make_group(D[2:5], [0, 2, 5, 6], [1]),
        make_group(D[5:6], [0, 6], [1]),
    ]
    found = [(s.first_layer, s.end_layer, s.owners) for s in segments(groups)]
    assert found == [(0, 2, (0, 0, 0)), (2, 5, (1, 1, 0)), (5, 6, (1, 2, 0))]
    assert segments([]) == ()


@given(
    cuts=st.lists(st.sets(st.integers(1, 11), max_size=3), min_size=1, max_size=2),
)
def test_segments_tile_the_model_and_name_the_stage_that_holds_them(cuts):
    groups, used = [], 0
    for inner in cuts:
        borders = [0, *sorted(inner), 12]
        groups.append(make_group(D[used : used + len(borders) - 1], borders, [1]))
        used += len(borders) - 1
    found = segments(groups)
    assert [s.first_layer for s in found] == [0, *(s.end_layer for s in found[:-1])]
    assert found[-1].end_layer == 12
    assert len(found) <= 1 + sum(len(g.stages) - 1 for g in groups)
    for segment in found:
        for group, owner in zip(groups, segment.owners, strict=True):
            stage = group.stages[owner]
            assert stage.first_layer <= segment.first_layer < segment.end_layer <= stage.end_layer


def test_an_idle_plan_has_no_devices_layers_or_samples():
    idle = Plan(generation=3, schedule="1f1b")
    assert (idle.device_ids, idle.num_layers, idle.num_samples) == ((), 0, 0)
