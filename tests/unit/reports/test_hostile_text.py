"""Text in a run's files is text on its page, whoever wrote the files."""

import json
from pathlib import Path

from orchestrator.reports.run_page import run_page
from orchestrator.reports.run_report import read_run
from tests.unit.reports.long_run import write_run

HOSTILE = "<script>alert('x')</script>"


def test_markup_in_reasons_and_events_is_shown_and_not_run(tmp_path: Path) -> None:
    folder = Path(write_run(tmp_path / "run", num_slots=4, num_devices=3))
    event = {"time_s": 1.0, "slot": 0, "kind": "warning", "detail": HOSTILE, "device": HOSTILE}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (folder / "result.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    page = run_page(read_run(str(folder)))
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
