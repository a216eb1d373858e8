"""Small whole runs on forked workers: what is planned, and told, when their world changes."""

import json
from pathlib import Path

import pytest

from benchmarks.forked_run import run_forked
from orchestrator.config import RunConfig
from orchestrator.runtime.driver import exit_code
from tests.runtime.small_runs import (
    TEXT,
    Watcher,
    check_books,
    check_undisturbed,
    config,
    losses_alone,
    read,
)

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]


def test_devices_whose_first_block_costs_more_than_the_total_are_not_begun(tmp_path: Path) -> None:
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:mlp", steps=30, events="")
    text = text.replace("count: 1", "count: 1, billed: while_present, minimum_s: 3600")
    run = RunConfig.parse(text, ["budget.total_usd=3.5"])  # an hour of both costs 4 $
    outcome = run_forked(run)
    assert (outcome.status, exit_code(outcome)) == ("budget", 3)
    assert "budget_cap_reached" in outcome.reason
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert (result["spent_usd"], result["steps"]) == (0.0, 0)


def test_a_lost_device_is_planned_without(tmp_path: Path) -> None:
    run = config(tmp_path, steps=45, events="{at_step: 25, device: slow-0, lost: true}")
    watcher = Watcher()
    outcome = run_forked(run, view=watcher)
    check_undisturbed(run, outcome)
    assert [e.device for e in watcher.events if e.kind == "lost"] == ["slow-0"]
    assert watcher.slots[-2].plan.device_ids == ("fast-0",)


def test_a_device_under_notice_is_left_before_it_goes_and_one_that_joins_is_used(
    tmp_path: Path,
) -> None:
    """ray-project/ray#63968: up to a checkpoint interval is lost although there was notice."""
    events = "{at_step: 20, device: slow-0, notice_s: 6}, {at_step: 40, pool: fast, joined: 1}"
    run = config(tmp_path, steps=120, events=events)
    watcher = Watcher()
    outcome = run_forked(run, view=watcher)
    check_undisturbed(run, outcome)
    kinds = [(e.kind, e.device) for e in watcher.events if e.kind in ("notice", "lost", "joined")]
    assert sorted(kinds) == [("joined", "fast-1"), ("lost", "slow-0"), ("notice", "slow-0")]
    assert kinds.index(("notice", "slow-0")) < kinds.index(("lost", "slow-0"))
    assert not any(e.kind == "recovered" for e in watcher.events)  # nothing had to be made up for
    assert set(watcher.slots[-2].plan.device_ids) == {"fast-0", "fast-1"}
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert result["recoveries"] == 0


def test_a_device_that_slows_down_is_named_and_planned_around(tmp_path: Path) -> None:
    run = config(tmp_path, steps=50, events="{at_step: 25, device: fast-0, speed_ratio: 0.2}")
    view = Watcher()
    outcome = run_forked(run, view=view)
    assert outcome.status == "finished"
    named = [r.slot for r in view.slots if "fast-0" in r.stragglers]
    changed = [r.slot for r in view.slots if r.slot > 0 and r.decision in ("switch", "reassign")]
    assert named
    assert changed
    assert changed[0] <= named[0] + 1  # running within two slots of the first that shows it
    check_books(run, outcome)
    assert [row["loss"] for row in read(run, "steps.jsonl")] == pytest.approx(
        losses_alone(run), rel=1e-5
    )
