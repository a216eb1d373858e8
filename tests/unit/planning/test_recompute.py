"""Stages that keep nothing but inputs: what they need and take, and where they are chosen."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_problem,
    make_profile,
    make_stages,
    team_of,
)
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from orchestrator.planning.partition import partition
from orchestrator.strategies.joint import Joint

NUM_LAYERS = 6


def profile_of(stash_bytes: float = 1000.0) -> ModelProfile:
    """Layers of 0.1 s forward and 0.2 s backward, whose inputs are a tenth of what they keep."""
    profile = make_profile(
        {"gpu": [0.1] * NUM_LAYERS}, param_bytes=0.0, boundary_bytes=stash_bytes / 10,
        stash_bytes=stash_bytes,
    )  # fmt: skip
    sizes = replace(profile.sizes[0], input_bytes_per_sample=stash_bytes / 10)
    return replace(profile, sizes=(sizes,))


def model_of(memory_bytes: float, num_devices: int = 1, **problem: object) -> CostModel:
    devices = [
        make_device(f"d-{i}", memory_bytes=round(memory_bytes / 0.9)) for i in range(num_devices)
    ]
    return CostModel(make_problem(make_cluster(devices), profile_of(), **problem))


def again(group: Group) -> Group:
    return replace(group, stages=tuple(replace(s, recompute=True) for s in group.stages))


def test_a_stage_that_recomputes_keeps_inputs_and_the_last_layer_and_runs_one_layer_at_a_time():
    cost = model_of(1e9, 2)
    devices = cost.problem.cluster.devices
    group = again(make_group(devices, [0, 3, NUM_LAYERS], [1] * 4))
    peaks, _ = cost.memory.peaks_bytes(group, "1f1b")
    # Two in flight of three inputs each; one layer runs; a gradient of each microbatch is there.
    assert peaks[0] == 2 * 3 * 100 + 1000 + 2 * 100
    # Inputs of two layers, all of the last, and messages that come and go.
    assert peaks[1] == (2 * 100 + 1000) + 2 * 100 + (1000 + 100 - 1000)


def test_it_runs_forward_again_but_for_the_layer_before_the_loss():
    cost = model_of(1e9, 2)
    first, last = again(make_group(cost.problem.cluster.devices, [0, 3, 6], [1])).stages
    assert cost.seconds_of(first, 1) == pytest.approx((0.3, 0.6 + 0.3))
    assert cost.seconds_of(last, 1) == pytest.approx((0.3, 0.6 + 0.2))


def test_memory_that_binds_makes_one_device_recompute_and_only_then():
    (device,) = model_of(1e9).problem.cluster.devices
    whole = make_stages([device], [0, NUM_LAYERS])
    roomy, tight = model_of(6000), model_of(5999)
    assert not roomy.with_inflight(whole, 1, 8, "1f1b")[0].recompute
    assert tight.with_inflight(whole, 1, 8, "1f1b")[0].recompute
    never = model_of(5999, activation_checkpointing="never")
    (stage,) = never.with_inflight(whole, 1, 8, "1f1b")
    assert not stage.recompute
    assert never.memory_error([Group((stage,), (1,) * 8)]) is not None
    always = model_of(1e9, activation_checkpointing="always")
    assert always.with_inflight(whole, 1, 8, "1f1b")[0].recompute


def test_of_recomputing_and_fewer_in_flight_the_faster_one_is_taken():
    """Of two stages the first has room for one microbatch only, or recomputes."""
    cost = model_of(4000, 2)
    devices = cost.problem.cluster.devices
    for cuts, recomputes in (([0, 1, 6], False), ([0, 3, 6], True)):
        stages = make_stages(devices, cuts)
        chosen = cost.with_inflight(stages, 1, 8, "1f1b")
        ways = [
            tuple(
                replace(s, recompute=r, inflight=k) for s, r, k in zip(stages, rr, kk, strict=True)
            )
            for rr in product((False, True), repeat=2)
            for kk in ((2, 1), (1, 1))
        ]
        fitting = [w for w in ways if cost.memory_error([Group(w, (1,) * 8)]) is None]
        least_s = min(group_makespan(cost, Group(w, (1,) * 8), "1f1b") for w in fitting)
        found_s = group_makespan(cost, Group(chosen, (1,) * 8), "1f1b")
        assert found_s == pytest.approx(least_s)
        assert chosen[0].recompute is recomputes


def test_cuts_move_to_spare_a_stage_that_would_recompute():
    """Each device alone would be cut in the middle; the first one cannot hold two of three."""
    cost = model_of(4400, 2)
    teams = tuple(team_of(d) for d in cost.problem.cluster.devices)
    options = partition(cost, teams, 1, "1f1b")
    found_s = min(group_makespan(cost, Group(o, (1,) * 8), "1f1b") for o in options)
    every = []
    for (cut,) in combinations(range(1, NUM_LAYERS), 1):
        plain = make_stages(cost.problem.cluster.devices, [0, cut, NUM_LAYERS])
        group = Group(cost.with_inflight(plain, 1, 8, "1f1b"), (1,) * 8)
        if cost.memory_error([group]) is None:
            every.append(group_makespan(cost, group, "1f1b"))
    assert found_s == pytest.approx(min(every))


def test_the_joint_planner_recomputes_where_nothing_else_fits_and_nowhere_else():
    for memory_bytes, recomputes in ((2500, True), (1e6, False)):
        problem = model_of(memory_bytes).problem
        best = Joint().propose(problem, out_of_time=lambda: False)[0]
        assert [s.recompute for g in best.plan.groups for s in g.stages] == [recomputes]
        peak = dict(best.estimate.peak_memory_bytes)["d-0"]
        assert peak <= memory_bytes


def test_a_recomputing_stage_is_never_taken_for_one_that_is_not():
    """Figures are kept by what chains are made of."""
    cost = model_of(1e9)
    (device,) = cost.problem.cluster.devices
    plain = make_group([device], [0, NUM_LAYERS], [1] * 4)
    assert cost.evaluate([plain], "1f1b").step_s == pytest.approx(4 * 1.8)
    assert cost.evaluate([again(plain)], "1f1b").step_s == pytest.approx(4 * 2.3)
    assert cost.evaluate([plain], "1f1b").step_s == pytest.approx(4 * 1.8)
    assert cost.key(plain.stages) != cost.key(again(plain).stages)


def test_what_fits_neither_way_is_refused_before_anything_runs_and_the_mend_is_named():
    for chosen, bytes_needed, mend in (
        ("auto", ", run again in backward, need", "; add devices or memory"),
        ("never", "GiB on 'd-0'", "; write training.activation_checkpointing: auto, add devices"),
    ):
        problem = model_of(1200, activation_checkpointing=chosen).problem
        with pytest.raises(InfeasibleError) as caught:
            Joint().propose(problem, out_of_time=lambda: False)
        message = str(caught.value)
        assert "layers 0 to 5" in message
        assert bytes_needed in message
        assert "are usable" in message
        assert mend in message
