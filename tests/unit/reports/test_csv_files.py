"""A run as CSV files, read back."""

import csv
import json
import math
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.reports.csv_files import safe, write_csv
from orchestrator.reports.run_report import read_run
from tests.unit.reports.long_run import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return write_run(tmp_path / "long", num_slots=60, num_devices=7, plan_every=5)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_what_is_read_back_has_the_same_numbers(run_dir: str, tmp_path: Path) -> None:
    found = read_run(run_dir)
    out = tmp_path / "out"
    assert write_csv(found, str(out)) == (
        "slots.csv", "steps.csv", "ledger.csv", "events.csv", "devices.csv", "plans.csv",
        "marginal_values.csv",
    )  # fmt: skip
    assert math.fsum(float(r["usd"]) for r in rows_of(out / "ledger.csv")) == found.spent_usd
    steps = rows_of(out / "steps.csv")
    assert [(int(r["step"]), float(r["loss"])) for r in steps] == list(found.losses)
    slots = rows_of(out / "slots.csv")
    assert [float(r["spent_usd"]) for r in slots] == [s.spent_usd for s in found.slots]
    assert [float(r["measured_step_s"]) for r in slots] == [s.measured_step_s for s in found.slots]
    events = rows_of(out / "events.csv")
    assert [r["detail"] for r in events] == [e["detail"] for e in found.events]
    used_s: dict[str, float] = {}
    for r in rows_of(out / "devices.csv"):
        if r["group"]:
            length_s = float(r["billed_to_s"]) - float(r["billed_from_s"])
            used_s[r["device"]] = used_s.get(r["device"], 0.0) + length_s
    assert used_s == {life.device: life.used_s for life in found.lives if life.used_s}
    plans = rows_of(out / "plans.csv")
    spans = {(int(r["first_slot"]), float(r["billed_from_s"]), r["reason"]) for r in plans}
    assert spans == {(s.first_slot, s.from_s, s.reason) for s in found.plans}


def test_a_change_of_the_budget_keeps_its_key_and_values(run_dir: str, tmp_path: Path) -> None:
    change = {"kind": "budget_changed", "key": "budget.total_usd", "old": None, "new": 50.0,
              "source": "config.yaml", "detail": "raised"}  # fmt: skip
    with (Path(run_dir) / "events.jsonl").open("a") as file:
        file.write(json.dumps(change) + "\n")
    write_csv(read_run(run_dir), str(tmp_path / "out"))
    row = rows_of(tmp_path / "out" / "events.csv")[-1]
    told = row["budget_key"], row["old"], row["new"], row["source"]
    assert told == ("budget.total_usd", "", "50.0", "config.yaml")
    slots = rows_of(tmp_path / "out" / "slots.csv")
    assert {(r["budget_usd_per_hour"], r["requested_devices"]) for r in slots} == {("4.0", "{}")}


def test_files_of_others_stay_and_ours_are_renewed(run_dir: str, tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("mine")
    (tmp_path / "slots.csv").write_text("old")
    write_csv(read_run(run_dir), str(tmp_path))
    assert (tmp_path / "notes.csv").read_text() == "mine"
    assert len(rows_of(tmp_path / "slots.csv")) == 60


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_of_a_cell_is_worked_out_by_a_spreadsheet(start: str) -> None:
    assert safe(f"{start}cmd|'/c calc'!A0") == f"'{start}cmd|'/c calc'!A0"
    assert safe(-1.5) == -1.5


def test_a_run_without_a_slot_has_heads_only(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    write_csv(read_run(str(tmp_path)), str(tmp_path / "out"))
    assert rows_of(tmp_path / "out" / "slots.csv") == []
    assert (tmp_path / "out" / "plans.csv").read_text().startswith("first_slot,last_slot,")


def test_files_go_to_any_storage(run_dir: str) -> None:
    write_csv(read_run(run_dir), "memory://csv/out")
    assert storage.read_bytes("memory://csv/out/steps.csv").count(b"\n") == 601
