"""The table of front ends in docs/models.md is in the form that its command writes."""

import re
from pathlib import Path

from benchmarks.all import BEGIN, END, front_ends
from benchmarks.hub_models import FRONT_ENDS, MODELS

ROOT = Path(__file__).parents[2]


def test_the_table_has_every_model_in_every_front_end_and_a_reason_for_every_refusal() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    table = page.partition(BEGIN)[2].partition(END)[0].strip()
    cells = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", table, re.MULTILINE))
    reasons = dict(re.findall(r"^(\d+)\. `(.+)`$", table, re.MULTILINE))
    rows = []
    for model in MODELS:
        for front_end, cell in zip(FRONT_ENDS, cells[model].split(" | "), strict=True):
            found = re.fullmatch(r"(\d+) parts|refused \((\d+)\)", cell)
            assert found, cell
            parts, why = int(found[1] or 0), reasons.get(found[2], "")
            rows.append({"model": model, "front_end": front_end, "parts": parts, "why": why})
    assert front_ends(rows) == table
