"""The short forms of the control benchmarks hold their bars: benchmarks.acceptance."""

import argparse
import json
from importlib import import_module

import pytest

from benchmarks.acceptance import DEMANDS, Demand, judged, measured
from benchmarks.reference_world import (
    all_states,
    oracle,
    price_plans,
    reference_library,
    reference_world,
)

HELD_HERE = (
    "control_law", "finite_horizon", "frames", "infeasible", "baselines", "robustness",
    "reconfiguration", "planner_in_loop",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", HELD_HERE)
def test_the_short_form_holds_its_bars(name: str) -> None:
    options = argparse.Namespace(quick=True, seed=7, slots=120)
    result = import_module(f"benchmarks.{name}").run(options)
    report = {"figures": [{"name": f.name, "value": f.value, "unit": ""} for f in result.figures]}
    assert [f.name for f in result.figures if not f.holds] == []
    for demand in DEMANDS:
        if demand.benchmark == name:
            missed = [f for f in judged(demand, report, quick=True) if not f.holds]
            assert missed == []
    json.dumps([f.value for f in result.figures] + [list(row.values()) for row in result.table])


def test_all_18_figures_are_asked_for() -> None:
    assert [demand.number for demand in DEMANDS] == list(range(1, 19))


def test_a_benchmark_that_is_missing_falls_short() -> None:
    report = measured("no_such_benchmark", quick=True, seed=0)
    assert "No module named" in str(report["error"])
    (figure,) = judged(Demand(1, "no_such_benchmark", {"key": "<= 1"}), report, quick=True)
    assert (figure.name, figure.unit, figure.holds) == ("1.no_such_benchmark.key", "missing", False)


def test_a_figure_is_held_to_the_bar_asked_for_whatever_its_benchmark_says() -> None:
    report: dict[str, object] = {"figures": [{"name": "key", "value": -5.0, "unit": "%"}]}
    demand = Demand(1, "x", {"key": "|| 4"})
    (figure,) = judged(demand, report, quick=False)
    assert (figure.value, figure.bar, figure.holds) == (5.0, "<= 4", False)


def test_the_reference_world_is_the_one_of_the_model() -> None:
    """8 devices in two zones, 24 states, slowest relaxation 31 slots, 4 $/h."""
    world = reference_world()
    assert len(world.cluster.devices) == 8
    assert {d.zone for d in world.cluster.devices} == {"z1", "z2"}
    assert world.environment.num_states == 24
    assert world.environment.relaxation_slots == pytest.approx(31, abs=0.5)
    assert world.budget_usd_per_s * 3600 == pytest.approx(4.0)


def test_the_oracle_spends_the_budget_and_its_price_is_the_gain_of_a_dollar() -> None:
    world, table = reference_world(), reference_library().table
    shares, budget = world.environment.shares, world.budget_usd_per_s
    best, more = (oracle(table, shares, budget * k) for k in (1.0, 1.001))
    assert best.cost_usd_per_s == pytest.approx(budget)
    gain = (more.rate_samples_per_s - best.rate_samples_per_s) / (0.001 * budget)
    assert gain == pytest.approx(best.price_of_money_samples_per_usd, rel=1e-6)


def test_every_plan_of_the_library_runs_in_some_state_and_times_do_not_depend_on_prices() -> None:
    world, library = reference_world(), reference_library()
    assert (library.fixed.runs.sum(axis=0) > 0).all()
    states = all_states(world)
    alone = price_plans(world, library.plans, states[4:5])
    assert alone.costs[0].tolist() == library.fixed.costs[4].tolist()
