"""Cuts that groups share: how they move, and that they are taken where sums are slow."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.cluster import Link
from orchestrator.planning.assembling import snapped
from orchestrator.planning.trials import Evaluator
from orchestrator.strategies.explorer import device_space

CUTS = st.lists(st.integers(1, 20), unique=True, min_size=1, max_size=5).map(sorted)


@given(CUTS, CUTS)
def test_cuts_move_least_in_all(own: list[int], lead: list[int]) -> None:
    found = snapped(own, lead)
    assert len(found) == len(own)
    few, many = (own, lead) if len(own) <= len(lead) else (lead, own)
    least = min(
        sum(abs(a - b) for a, b in zip(few, some, strict=True))
        for some in combinations(many, len(few))
    )
    assert sum(abs(a - b) for a, b in zip(own, found, strict=True)) == least
    assert set(found) >= set(lead) or set(found) <= set(lead)


@pytest.mark.parametrize(("rate", "cut_alike"), [(1e7, True), (1e12, False)])
def test_unlike_chains_are_cut_alike_where_sums_are_slow(rate: float, cut_alike: bool) -> None:
    """Each pair of devices by itself wants other cuts; three parts would make sums of their own."""
    kinds = ("slow", "fast", "odd", "odd")
    devices = [
        make_device(f"d-{i}", kind=kind, pool=kind, node_id=f"n-{i}", zone="z")
        for i, kind in enumerate(kinds)
    ]
    seconds = {"slow": [2.0] * 6, "fast": [1.0] * 6, "odd": [1.0] * 6}
    problem = make_problem(
        make_cluster(devices, links=[Link("z", "z", 0.0, rate)]),
        make_profile(seconds, param_bytes=4e8),
        batch_samples=64,
    )
    evaluator = Evaluator(problem, device_space)
    pairs = [make_group(devices[:2], (0, 3, 6), (1,)), make_group(devices[2:], (0, 3, 6), (1,))]
    (state,) = evaluator.space.of_plan(make_plan(*pairs))
    (trial,) = evaluator.trials(state)
    cuts = {tuple(stage.end_layer for stage in group.stages) for group in trial.groups}
    assert (len(cuts) == 1) == cut_alike
