"""Scenario files say what can be run, and their rivals do what their names say."""

import argparse
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import reference_data
from benchmarks.scenarios import files, static
from benchmarks.scenarios.__main__ import RUNNERS, run
from benchmarks.scenarios.grids import two_bw, uniform_grid
from benchmarks.scenarios.models import Kind, analytic_profile
from benchmarks.scenarios.ranks import max_min
from benchmarks.scenarios.rivals import LookAhead, Restart
from benchmarks.scenarios.rows import Row, figures
from orchestrator.planning.cost import CostModel
from orchestrator.strategies.registry import make_strategy

CASES = [
    case
    for name in files.names()
    if not (file := files.load(name)).data.get("refused")
    for case in file.cases(quick=False)
]


def test_there_are_thirteen_scenarios_each_with_a_short_form_or_a_reason_against_it() -> None:
    assert files.names() == [f"S{n}" for n in range(1, 14)]
    for name in files.names():
        file = files.load(name)
        assert file.data.get("refused") or (file.kind in RUNNERS and file.cases(quick=True)), name


def test_a_refused_scenario_runs_nothing_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(argparse.Namespace(names=["S6"], quick=True, seed=0))
    assert (result.figures, result.table) == ((), ())
    assert "S6 is refused" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file.name}: {case.name}")
@pytest.mark.parametrize("has_data", [True, False], ids=["data", "no data"])
def test_every_case_is_a_planning_problem_with_and_without_measured_data(
    case: files.Case, has_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_data:
        monkeypatch.setattr("benchmarks.reference_data.missing", lambda: "not here")
    fresh = files.Case(case.file, case.row)
    problem = static.problem_of(fresh)
    assert len(problem.cluster.devices) == sum(fresh.counts.values())
    assert has_data or fresh.source == files.ANALYTIC


def test_a_block_takes_its_flop_over_what_the_kind_achieves() -> None:
    decoder = {"layers": 1, "width": 10, "length": 100, "vocabulary": 1000, "bytes": 4}
    kind = Kind("k", 1e6, 1e9, 1e9)
    profile = analytic_profile("m", {"decoder": decoder, "overhead_ms": 0.0}, [kind], 2)
    flop = 24 * 10 * 10 * 100 + 4 * 100 * 100 * 10  # 12 h^2 weights, and attention
    assert profile.forward_flop_per_sample[1] == flop
    times = {t.microbatch: t for t in profile.times}
    assert times[2].forward_s[1] == pytest.approx(2 * flop / 1e6)
    assert times[2].backward_s[1] == pytest.approx(4 * flop / 1e6)
    assert profile.sizes[0].param_bytes[1] == 12 * 10 * 10 * 4


def test_max_min_gives_each_job_the_kind_that_it_is_good_at() -> None:
    value, share_JK = max_min(np.array([[2.0, 1.0], [1.0, 2.0]]))
    assert value == pytest.approx(2.0)
    assert share_JK == pytest.approx(np.eye(2))


def small_problem(name: str = "S13", **changes: object) -> static.PlanningProblem:
    case = files.load(name).cases(quick=True)[0]
    return replace(static.problem_of(case), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [uniform_grid, two_bw])
def test_a_rival_of_uniform_plans_deals_the_whole_batch_and_fits(recipe: static.Recipe) -> None:
    problem = small_problem(batch_samples=64)
    groups = recipe(problem, lambda: False)
    assert groups is not None
    assert sum(group.num_samples for group in groups) == 64
    assert CostModel(problem).memory_error(groups) is None


def test_the_look_ahead_keeps_shallower_chains_when_losses_are_frequent() -> None:
    """With no losses the fastest depth is taken; the expected rate falls with the losses."""
    problem = small_problem("S8")
    cost = CostModel(problem)
    spot = [d for d in problem.cluster.devices if problem.cluster.offer(d.pool).spot]
    calm, stormy = LookAhead(0.0), LookAhead(2.0)
    for depth in (2, 4):
        few, many = (rival.expected_samples_per_s(cost, spot, depth, 4) for rival in (calm, stormy))
        assert many < few


def test_checkpoint_and_restart_idles_after_a_loss_and_then_goes_on() -> None:
    problem = small_problem()
    rival = Restart(down_s=100.0)
    first = next(c for c in rival.propose(problem, out_of_time=lambda: False) if not c.plan.is_idle)
    gone = first.plan.device_ids[0]
    left = tuple(d for d in problem.cluster.devices if d.device_id != gone)

    def proposed(now_s: float) -> bool:
        cluster = replace(problem.cluster, devices=left, now_s=now_s)
        incumbent = first.plan if now_s == 0.0 else None
        after = replace(problem, cluster=cluster, incumbent=incumbent)
        found = rival.propose(after, out_of_time=lambda: False)
        return any(not c.plan.is_idle for c in found)

    assert [proposed(0.0), proposed(99.0), proposed(100.0)] == [False, False, True]


def test_only_a_rival_that_may_win_counts_as_one() -> None:
    rows = [
        Row("S0", "a", "joint", "ours", 10.0),
        Row("S0", "a", "greedy", "same", 11.0),
        Row("S0", "a", "told", "reference", 12.0),
        Row("S0", "a", "grid", "strong", 8.0),
    ]
    found = {figure.name: figure.value for figure in figures(rows)}
    assert found["S0_over_best_least_pct"] == pytest.approx(25.0)
    assert found["S0_lost"] == 0


def test_the_growing_batch_and_the_slow_node_run_in_their_short_form() -> None:
    result = run(argparse.Namespace(names=["S13", "S10"], quick=True, seed=0))
    ours = [row for row in result.table if row["role"] == "ours"]
    assert [row["scenario"] for row in ours] == ["S13", "S10"]
    assert all(float(str(row["samples_per_s"])) > 0 for row in ours)


@pytest.mark.skipif(bool(reference_data.missing()), reason="the measured data are not at hand")
def test_the_joint_search_beats_a_grid_that_gives_each_kind_its_own_shape() -> None:
    file, counts = files.load("S2"), {"a100-40": 32, "v100-16": 96}
    problem = static.problem_of(files.Case(file, {"model": "GPT-Neo-2.7B", "counts": counts}))
    grid = uniform_grid(problem, lambda: False)
    assert grid is not None
    looks = iter(range(800))
    found = make_strategy("joint").propose(problem, out_of_time=lambda: next(looks, None) is None)
    rival = CostModel(problem).evaluate(grid, problem.schedules[0])
    assert found[0].estimate.samples_per_s > rival.samples_per_s
