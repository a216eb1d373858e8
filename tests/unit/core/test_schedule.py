from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.builders import make_device, make_group
from orchestrator.core.plan import Group
from orchestrator.core.schedule import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    build_program,
    check_program,
    list_schedule,
)

D = [make_device(f"d-{i}") for i in range(6)]


def pipeline(num_stages, num_microbatches, inflight=None):
    group = make_group(D[:num_stages], range(num_stages + 1), [1] * num_microbatches)
    if inflight is None:
        return group
    stages = tuple(replace(s, inflight=k) for s, k in zip(group.stages, inflight, strict=True))
    return Group(stages, group.microbatches)


def order(todo):
    return "".join(f"{i.op}{i.microbatch}" for i in todo)


def test_1f1b_fills_then_alternates_then_drains():
    program = build_program(pipeline(3, 4), "1f1b")
    assert order(program[0]) == "F0F1F2B0F3B1B2B3"
    assert order(program[1]) == "F0F1B0F2B1F3B2B3"
    assert order(program[2]) == "F0B0F1B1F2B2F3B3"


def test_gpipe_runs_all_forwards_first():
    assert order(build_program(pipeline(2, 3), "gpipe")[0]) == "F0F1F2B0B1B2"


def test_a_message_carries_the_border_times_its_samples():
    group = make_group(D[:3], [0, 1, 3, 4], [4, 2])
    program = build_program(group, "1f1b", [10.0, 20.0, 30.0, 40.0])
    sizes = {(s, i.op, i.microbatch): i.size_bytes for s, todo in enumerate(program) for i in todo}
    assert sizes[0, FORWARD, 0] == 40
    assert sizes[1, FORWARD, 1] == 60  # leaves layer 2
    assert sizes[1, BACKWARD, 0] == 40  # back over the border behind layer 0
    assert sizes[2, FORWARD, 0] == 0  # the end of the pipeline sends nothing on
    assert sizes[0, BACKWARD, 1] == 0


def test_ends_of_the_pipeline_have_no_neighbour():
    program = build_program(pipeline(2, 1), "1f1b")
    assert [(i.source, i.target) for i in program[0]] == [(None, 1), (1, None)]
    assert [(i.source, i.target) for i in program[1]] == [(0, None), (None, 0)]


def test_an_unknown_schedule_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; known: 1f1b, gpipe"):
        build_program(pipeline(1, 1), "zigzag")


def test_a_later_stage_that_holds_more_than_an_earlier_one_deadlocks():
    with pytest.raises(ValueError, match="deadlock: stages wait for each other"):
        build_program(pipeline(2, 8, inflight=(2, 3)), "1f1b")


def test_a_microbatch_run_twice_or_backward_first_is_refused():
    (todo,) = build_program(pipeline(1, 2), "1f1b")
    f0, b0, f1, b1 = todo
    with pytest.raises(ValueError, match="once forward and once backward"):
        check_program(((f0, f0, f1, b1),), 2)
    with pytest.raises(ValueError, match="runs microbatch 0 backward before forward"):
        check_program(((b0, f0, f1, b1),), 2)


@given(
    num_microbatches=st.integers(1, 12),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_what_is_in_flight_never_exceeds_k_and_falling_k_never_deadlocks(num_microbatches, steps):
    inflight = [1 + sum(steps[s + 1 :]) for s in range(len(steps))]
    program = build_program(pipeline(len(steps), num_microbatches, inflight), "1f1b")
    for limit, todo in zip(inflight, program, strict=True):
        held = peak = 0
        for i in todo:
            held += 1 if i.op == FORWARD else -1
            peak = max(peak, held)
        assert held == 0
        assert peak == min(limit, num_microbatches)


def test_sums_with_a_common_owner_follow_each_other_by_release():
    finish = list_schedule([0.0, 1.0, 0.5], [2.0, 1.0, 4.0], [[0, 1], [2, 3], [1, 2]])
    assert finish == (2.0, 7.0, 6.0)


def test_sums_without_a_common_owner_run_at_the_same_time():
    assert list_schedule([1.0, 1.0], [2.0, 3.0], [[0, 1], [2, 3]]) == (3.0, 4.0)


def test_every_sum_runs_for_its_time_alone_on_its_owners():
    owners = [[0, 1], [1, 2], [0, 2], [3]]
    duration = [1.0, 2.0, 3.0, 4.0]
    for release in permutations([0.0, 0.5, 1.0, 1.5]):
        finish = list_schedule(release, duration, owners)
        for a in range(4):
            assert finish[a] - duration[a] >= release[a]
            for b in range(a):
                if set(owners[a]) & set(owners[b]):
                    assert (
                        finish[a] - duration[a] >= finish[b] or finish[b] - duration[b] >= finish[a]
                    )


def test_an_evaluation_is_the_forwards_alone_in_order():
    program = build_program(pipeline(3, 4), EVALUATION)
    assert [order(todo) for todo in program] == ["F0F1F2F3"] * 3
    assert [(todo[0].source, todo[0].target) for todo in program] == [(None, 1), (0, 2), (1, None)]
