"""Runs side by side."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.reports.comparison import (
    RunComparison,
    compare_runs,
    comparison_cells,
    comparison_data,
    reached,
)
from orchestrator.reports.comparison_page import comparison_page, print_comparison
from orchestrator.reports.run_report import RunFound, read_run
from tests.unit.reports.long_run import SLOT_S, STEPS, write_run
from tests.unit.reports.samples import read_page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFound, RunFound]:
    folder = tmp_path_factory.mktemp("runs")
    fast = write_run(folder / "fast", num_slots=60, num_devices=6, plan_every=10)
    slow = write_run(folder / "slow", num_slots=30, num_devices=6, speed=0.5, strategy="greedy")
    return read_run(fast), read_run(slow)


def text_of(found: RunComparison) -> str:
    screen = StringIO()
    print_comparison(Console(file=screen, width=200), found)
    return screen.getvalue()


def test_time_and_dollars_to_the_same_samples_are_read_between_slots(
    runs: tuple[RunFound, RunFound],
) -> None:
    run = runs[0]
    first, second = run.slots[:2]
    middle = reached(run, (first.samples + second.samples) / 2)
    assert middle is not None
    assert middle.billed_s == pytest.approx(1.5 * SLOT_S)
    assert middle.usd == pytest.approx((first.spent_usd + second.spent_usd) / 2)
    assert reached(run, run.slots[-1].samples + 1) is None


def test_steps_that_were_undone_cost_time_and_no_samples(runs: tuple[RunFound, RunFound]) -> None:
    run = runs[0]
    slots = list(run.slots[:4])
    slots[2] = replace(slots[2], samples=slots[0].samples)  # back to a checkpoint
    slots[3] = replace(slots[3], samples=slots[1].samples + 100)
    found = reached(replace(run, slots=tuple(slots)), slots[1].samples + 50)
    assert found is not None
    assert found.billed_s == pytest.approx(3.5 * SLOT_S)


def test_runs_are_compared_at_the_samples_and_the_loss_that_all_have_reached(
    runs: tuple[RunFound, RunFound],
) -> None:
    found = compare_runs(runs)
    assert found.names == ("fast", "slow")
    assert found.same_samples == runs[1].num_samples
    there = found.at_samples[1]
    assert there is not None
    assert (there.billed_s, there.usd) == (30 * SLOT_S, pytest.approx(runs[1].spent_usd))
    assert found.same_loss == pytest.approx(runs[1].last_loss, rel=0.01)
    assert all(at is not None for at in found.at_loss)
    data = json.loads(json.dumps(comparison_data(found), allow_nan=False))
    assert [run["name"] for run in data["runs"]] == ["fast", "slow"]
    assert data["runs"][0]["steps"] == 60 * STEPS
    assert data["differs"]["control.strategy"] == ["joint", "greedy"]
    assert data["runs"][0]["same_samples_billed_s"] < data["runs"][1]["billed_s"] + SLOT_S


def test_text_and_page_say_the_same_and_what_differs(runs: tuple[RunFound, RunFound]) -> None:
    found = compare_runs(runs)
    page = read_page(comparison_page(found))
    text = text_of(found)
    for row in comparison_cells(found):
        for cell in row:
            assert cell in text
    for said in ("control.strategy", "greedy", "Samples over time", "Loss over money",
                 "Plan over time: slow"):  # fmt: skip
        assert said in page.text
    assert not page.outside


def test_runs_of_other_batches_are_compared_with_a_note(
    runs: tuple[RunFound, RunFound], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "big", num_slots=10, num_devices=6, batch_factor=2)
    notes = compare_runs((runs[0], read_run(other))).notes
    assert "steps are of 64, 128 samples: compare by samples, and step times not at all" in notes


def test_losses_of_other_tasks_are_not_set_against_each_other(
    runs: tuple[RunFound, RunFound], tmp_path: Path
) -> None:
    other = Path(write_run(tmp_path / "other", num_slots=5, num_devices=3))
    config = (other / "config.yaml").read_text().replace("byte_gpt:task", "digits:task")
    (other / "config.yaml").write_text(config)
    found = compare_runs((runs[0], read_run(str(other))))
    assert found.same_loss is None
    assert any("training.task differ" in note for note in found.notes)
    assert not any(row[0].startswith("time to the same loss") for row in comparison_cells(found))


def test_a_run_without_slots_one_that_goes_on_and_a_broken_file_are_compared(
    runs: tuple[RunFound, RunFound], tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("run: {name: [\n")
    going_on = Path(write_run(tmp_path / "on", num_slots=8, num_devices=3))
    (going_on / "result.json").unlink()
    found = compare_runs((runs[0], read_run(str(tmp_path / "new")), read_run(str(going_on))))
    assert [note.partition(" ")[0] for note in found.notes] == ["new", "new", "on"]
    data = json.loads(json.dumps(comparison_data(found), allow_nan=False))
    assert [run["name"] for run in data["runs"]] == list(found.names)
    for said in (*found.names, *found.notes):
        assert said in text_of(found)
    read_page(comparison_page(found))


def test_a_run_that_never_started_has_no_figures_and_kept_no_budget(
    runs: tuple[RunFound, RunFound], tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    theirs = (Path(runs[0].run_url) / "config.yaml").read_text("utf-8")
    (folder / "config.yaml").write_text(f"{theirs}cluster: {{price_feed: null, profile: p.json}}\n")
    (folder / "result.json").write_text('{"status": "bad_config", "reason": "no such pool"}')
    found = compare_runs((runs[0], read_run(str(folder))))
    assert found.notes == ("new never started (bad_config): it has no figures",)
    rows = {name: theirs for name, _, theirs in comparison_cells(found)}
    assert rows.pop("status") == "bad_config"
    assert set(rows.values()) == {"-"}
    assert dict(found.differs)["cluster.profile"] == ("(default)", "p.json")
    assert "cluster.price_feed" not in dict(found.differs)  # a default is null where it is told
    (_, data) = json.loads(json.dumps(comparison_data(found)))["runs"]
    told = {data[key] for key in data.keys() - {"name", "run_dir", "status", "reason"}}
    assert told == {None}


def test_runs_of_one_name_are_told_apart(runs: tuple[RunFound, RunFound], tmp_path: Path) -> None:
    twin = read_run(write_run(tmp_path / "b" / "fast", num_slots=2, num_devices=2))
    assert compare_runs((runs[0], twin)).names[1] == "b/fast"
    assert compare_runs((twin, twin)).names == ("fast (1)", "fast (2)")
