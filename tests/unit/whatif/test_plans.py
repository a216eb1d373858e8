"""What a file would lead to: teams and overlap where no worker must run them, and their notes."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.builders import GIB, make_profile
from orchestrator.config import RunConfig
from orchestrator.core.model import ModelProfile
from orchestrator.errors import ConfigError
from orchestrator.strategies.registry import make_strategy
from orchestrator.whatif.loops import simulated
from orchestrator.whatif.plans import WhatIf, what_if, what_if_data
from tests.unit.whatif.run_file import TEXT


def _profile(team_sizes: tuple[int, ...] = (1, 2, 4)) -> ModelProfile:
    """Two layers that each need nearly all memory of a device, or half of it in a team."""
    base = make_profile({"a100-40": [0.1, 0.1]}, microbatches=(2, 4), param_bytes=7 * GIB)
    (sizes,) = base.sizes
    return replace(
        base,
        sizes=tuple(
            replace(sizes, team_size=q, param_bytes=tuple(b / q for b in sizes.param_bytes))
            for q in team_sizes
        ),
        times=tuple(replace(t.scaled(1 / q), team_size=q) for t in base.times for q in team_sizes),
    )


def _what_if(*overrides: str, profile: ModelProfile | None = None) -> WhatIf:
    config = RunConfig.parse(TEXT, overrides)
    return what_if(config, profile or _profile(), stopwatch=lambda: 0.0)


def test_a_file_for_planning_may_ask_for_the_teams_and_the_overlap_it_names() -> None:
    problem = _what_if("control.max_team=4", "training.overlap=true").problem
    assert (problem.max_team, problem.overlap) == (4, True)


def test_emulated_devices_are_planned_as_their_workers_run() -> None:
    small = make_profile({"a100-40": [0.1, 0.1]})
    assert _what_if("cluster.source=emulated", profile=small).problem.max_team == 1
    with pytest.raises(ConfigError, match=r"training\.overlap is true with cluster\.source: ray"):
        RunConfig.parse(TEXT, ["training.overlap=true", "cluster.source=ray"])


def test_the_plan_as_json_names_every_member_of_a_team_and_every_sample() -> None:
    config = RunConfig.parse(TEXT)
    candidates = what_if_data(config, _what_if())["candidates"]
    assert isinstance(candidates, list)
    chosen = candidates[0]
    assert isinstance(chosen, dict)
    plan = chosen["plan"]
    assert isinstance(plan, dict)
    groups = plan["groups"]
    assert isinstance(groups, list)
    devices = [d for g in groups for s in g["stages"] for d in s["devices"]]  # type: ignore[index, call-overload]
    assert sorted([*devices, *plan["idle"]]) == [f"a-{i}" for i in range(4)]  # type: ignore[misc]
    assert sum(sum(g["microbatches"]) for g in groups) == 13  # type: ignore[index, call-overload, misc, arg-type]
    assert any(len(s["devices"]) > 1 for g in groups for s in g["stages"])  # type: ignore[index, call-overload, arg-type]


def test_notes_name_the_times_that_nobody_measured() -> None:
    beyond = [n for n in _what_if().notes if n.startswith("Times beyond the measured ones")]
    assert len(beyond) == 1  # 13 samples end in a microbatch of 1, and 2 is the least measured
    assert "at 1 samples (2 and 4 measured)" in beyond[0]


def test_one_more_device_has_a_break_even_price_only_where_the_budget_binds() -> None:
    offers = "cluster.offers=[{pool: a, kind: a100-40, count: 4, price_per_hour: 1.0}]"
    links = "cluster.links=[{within: zone, bandwidth_gbytes_per_s: 100}]"
    small = make_profile({"a100-40": [0.1, 0.1]}, microbatches=(1, 2, 4))
    changes = (offers, links, "training.global_batch=1200")
    rich = _what_if(*changes, profile=small).worth
    poor = _what_if(*changes, "budget.average_per_hour_usd=2", profile=small).worth
    assert rich is not None
    assert poor is not None
    name = "device_break_even_per_hour_usd.a"
    assert name not in dict(rich.values)
    # Like devices beside no traffic to speak of: one more is worth what the others cost.
    assert dict(poor.values)[name] == pytest.approx(1.0, rel=0.1)
    assert dict(poor.values)["budget_samples_per_s"] == pytest.approx(1 / 0.6, rel=0.1)


TWO_POOLS = (
    "cluster.offers=[{pool: a, kind: a100-40, count: 2, price_per_hour: 3.0},"
    " {pool: b, kind: t4, count: 2, price_per_hour: 0.5}]",
    "cluster.links=[{within: zone, bandwidth_gbytes_per_s: 10}]",
    "training.global_batch=32",
)


def _two_kinds() -> ModelProfile:
    return make_profile({"a100-40": [0.1] * 4, "t4": [0.4] * 4}, microbatches=(1, 2, 4))


@pytest.mark.parametrize("budget", [0.3, 1.5, 3.0, 5.0, 50.0])
def test_the_plan_shown_as_chosen_is_what_a_run_installs_in_its_first_slot(budget: float) -> None:
    config = RunConfig.parse(TEXT, [*TWO_POOLS, f"budget.average_per_hour_usd={budget}"])
    run = simulated(config, _two_kinds(), make_strategy("joint"))
    first = run.loop.tick()
    found = what_if(config, _two_kinds(), stopwatch=lambda: 0.0)
    assert found.chosen.plan == first.next_plan
    second = run.loop.tick()
    assert second.predicted.cost_per_hour_usd == pytest.approx(found.chosen.cost_per_hour_usd)
    names = [row.strategy for row in found.rows if row.strategy.startswith("joint")]
    assert names[0] == "joint"
    assert found.rows[0].chosen
    assert not any(row.chosen for row in found.rows[1:])
    fastest = max(found.rows, key=lambda row: row.estimate.samples_per_s)
    assert fastest.strategy in ("joint", "joint fastest")
    if "joint in budget" in names:
        row = found.rows[names.index("joint in budget")]
        assert row.cost_per_hour_usd <= budget


def test_plans_are_made_at_the_prices_that_the_feed_starts_with(tmp_path: Path) -> None:
    feed = tmp_path / "prices.csv"
    feed.write_text("time_s,pool,price_per_hour\n0,a,9.0\n600,a,1.0\n600,b,0.1\n")
    found = what_if(
        RunConfig.parse(TEXT, [*TWO_POOLS, f"cluster.price_feed={{path: {feed}}}"]),
        _two_kinds(),
        stopwatch=lambda: 0.0,
    )
    used = found.chosen.plan.device_ids
    per_hour = {"a": 9.0, "b": 0.5}
    assert found.chosen.cost_per_hour_usd == pytest.approx(sum(per_hour[d[0]] for d in used))
    (note,) = [n for n in found.notes if n.startswith("Prices at second 0")]
    assert "a $9.00/h, b $0.5000/h (its offer's, no row yet)" in note


def test_a_run_that_waits_at_first_is_shown_as_waiting_with_its_reason() -> None:
    changes = (*TWO_POOLS, "budget.total_usd=0.0001")
    found = what_if(RunConfig.parse(TEXT, changes), _two_kinds(), stopwatch=lambda: 0.0)
    assert found.chosen.plan.is_idle
    assert any(n.startswith("Nothing would run at first: budget") for n in found.notes)
    assert any(row.strategy == "joint fastest" for row in found.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("budget.min_samples_per_s=1000", "budget.min_samples_per_s is 1000, but"),
        ("budget.queue_cap=0.00001", "budget.queue_cap: 1e-05 $ lies below the backlog of"),
        ("budget.allow_idle=false", "budget.allow_idle is false, and the cheapest plan costs"),
    ],
)
def test_what_the_budget_asks_and_cannot_have_is_said_before_a_run(
    change: str, message: str
) -> None:
    poor = (*TWO_POOLS, "budget.average_per_hour_usd=0.3")
    plain = what_if(RunConfig.parse(TEXT, poor), _two_kinds(), stopwatch=lambda: 0.0)
    asked = what_if(RunConfig.parse(TEXT, (*poor, change)), _two_kinds(), stopwatch=lambda: 0.0)
    assert not any(note.startswith(message) for note in plain.notes)
    assert any(note.startswith(message) for note in asked.notes)


def test_blocks_that_are_billed_at_once_and_ratios_that_go_unused_are_named() -> None:
    """The thriftiest plan is one t4 for 0.5 $/h, charged for a day."""
    offers = (
        "cluster.offers=[{pool: b, kind: t4, count: 1, price_per_hour: 0.5, quantum_s: 86400,"
        " speed_ratio: 0.3}]"
    )
    config = RunConfig.parse(TEXT, ["training.global_batch=32", offers])
    notes = what_if(config, _two_kinds(), stopwatch=lambda: 0.0).notes
    assert any("Renting its devices is billed $12.00 at once" in note for note in notes)
    assert any(note.startswith("speed_ratio of b is not used") for note in notes)
    usual = RunConfig.parse(TEXT, TWO_POOLS)
    notes = what_if(usual, _two_kinds(), stopwatch=lambda: 0.0).notes
    assert not any("at once" in note or "speed_ratio" in note for note in notes)


@pytest.mark.parametrize("budget", [1.5, 5.0, 6.5])
def test_between_two_plans_that_tie_one_more_is_told_beside_the_chosen_one(budget: float) -> None:
    found = _what_if(*TWO_POOLS, f"budget.average_per_hour_usd={budget}", profile=_two_kinds())
    assert found.worth is not None
    assert found.worth.beside == "the chosen plan"


def test_a_plan_just_above_the_budget_may_run_most_but_not_all_of_the_time() -> None:
    found = _what_if(*TWO_POOLS, "budget.average_per_hour_usd=6.95", profile=_two_kinds())
    assert found.chosen.cost_per_hour_usd == pytest.approx(7.0)
    assert any("may run 99.3 % of the time" in note for note in found.notes)


def test_a_kind_without_units_for_bf16_is_named() -> None:
    profile = make_profile({"a100-40": [0.1, 0.1], "t4": [0.2, 0.2]})
    offers = (
        "[{pool: a, kind: a100-40, price_per_hour: 3, count: 1}, "
        "{pool: b, kind: t4, price_per_hour: 1, count: 1}]"
    )
    for precision, count in (("bf16", 1), ("fp16", 0), ("fp32", 0)):
        overrides = [
            f"cluster.offers={offers}", f"training.precision={precision}",
            "cluster.links=[{within: zone, latency_s: 0.001, bandwidth_gbytes_per_s: 1}]",
        ]  # fmt: skip
        notes = _what_if(*overrides, profile=profile).notes
        told = [note for note in notes if note.startswith("training.precision is bf16, which t4")]
        assert len(told) == count, precision


def test_a_plan_says_that_evaluations_are_left_out() -> None:
    (note,) = [n for n in _what_if("training.eval_every_steps=2").notes if "Evaluations" in n]
    assert "left out of all figures: every 2 steps and at the end" in note
    assert not any("Evaluations" in n for n in _what_if().notes)
