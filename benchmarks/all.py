"""Runs every benchmark and writes docs/results.md from what they print.

``python -m benchmarks.all --json-dir DIR`` keeps the JSON objects in DIR; no figure in the
docs is typed by hand. ``--only NAME`` renews single sections. ``frontends`` also writes its table
into docs/models.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = (
    "assignment", "baselines", "chaos", "control_law", "executor", "finite_horizon", "frames",
    "frontends", "infeasible", "input_stall", "memory", "overhead", "plan_gap",
    "plan_time", "planner_in_loop", "published", "reconfiguration", "recovery", "replan",
    "robustness", "scale", "scenarios", "soak", "telemetry_load", "time_model",
)  # fmt: skip

BEGIN, END = "<!-- front ends: begin -->", "<!-- front ends: end -->"
"""What stands around the table in docs/models.md."""


def measure(name: str, folder: Path, *, quick: bool) -> dict[str, object]:
    """Run one benchmark in a process of its own and keep its JSON."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--quick"] * quick)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    (folder / f"{name}.json").write_text(done.stdout, "utf-8")
    report: dict[str, object] = json.loads(done.stdout)
    return report


def as_markdown(sections: Iterable[str]) -> str:
    """The page from its sections."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    head = f"# Results\n\nWritten by `python -m benchmarks.all` on {machine}.\n"
    return "\n".join([head, *sections])


def section(report: dict[str, object]) -> str:
    """One table a benchmark."""
    lines = [f"## {report['benchmark']}", ""]
    if "skipped" in report:
        return "\n".join([*lines, f"Skipped: {report['skipped']}", ""])
    lines += [f"Seed {report['seed']}, {report['wall_s']} s.", ""]
    lines += ["| figure | value | unit | bar | holds |", "|---|---|---|---|---|"]
    figures = report["figures"]
    assert isinstance(figures, list)
    for f in figures:
        holds = ("yes" if f["holds"] else "**no**") if f["bar"] else ""
        lines.append(f"| {f['name']} | {f['value']:.4g} | {f['unit']} | {f['bar']} | {holds} |")
    return "\n".join([*lines, "", *_scenarios(report)])


def sections_of(page: str) -> dict[str, str]:
    """The sections that a page has, by the name of their benchmark."""
    found = [f"## {part}" for part in f"\n{page}".split("\n## ")[1:]]
    return {text.split("\n", 1)[0].removeprefix("## "): text for text in found}


def _scenarios(report: dict[str, object]) -> list[str]:
    """A table for every scenario, the refused ones with the reason; best first, losses too."""
    told, table = report.get("scenarios", {}), report["table"]
    assert isinstance(told, dict)
    assert isinstance(table, list)
    lines: list[str] = []
    for name, row in told.items():
        lines += [f"### {name}: {row['title']}", "", str(row["says"]).strip(), ""]
        if row["refused"]:
            lines += [f"Refused: {row['refused']}.", ""]
            continue
        lines += ["| case | strategy | samples/s | least to most | $/h | of ours, % | how |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for cells in (c for c in table if c["scenario"] == name):
            ours = "**" if cells["role"] == "ours" else ""
            lines.append(
                f"| {cells['case']} | {ours}{cells['strategy']}{ours} ({cells['role']}) "
                f"| {cells['samples_per_s']:.4g} | {cells['low']:.4g} to {cells['high']:.4g} "
                f"| {cells['usd_per_hour']:.4g} | {cells['of_ours_pct']:.4g} | {cells['note']} |"
            )
        lines.append("")
    return lines


def front_ends(rows: Iterable[Mapping[str, object]]) -> str:
    """Which front end takes which model: a row a model, a column a front end, the reasons below."""
    reasons: dict[str, int] = {}
    cells: dict[str, list[str]] = {}
    for row in rows:
        cell = f"{row['parts']} parts"
        if row["why"]:
            number = reasons.setdefault(str(row["why"]), len(reasons) + 1)
            cell = f"refused ({number})"
        cells.setdefault(str(row["model"]), []).append(cell)
    lines = ["| model | layer list | blocks | automatic cut |", "|---|---|---|---|"]
    lines += [f"| {model} | {' | '.join(found)} |" for model, found in cells.items()]
    lines += ["", *(f"{number}. `{why}`" for why, number in reasons.items())]
    return "\n".join(lines)


def write_table(page: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Put the table between the marks of a page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    behind = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{front_ends(rows)}\n{END}{behind}", "utf-8")


def main() -> None:
    """Run all, or some, and write the page; exit 1 when a figure of theirs does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all")
    parser.add_argument("--json-dir", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS,
        help="run these; the page keeps the sections of the others",
    )  # fmt: skip
    options = parser.parse_args()
    options.json_dir.mkdir(parents=True, exist_ok=True)
    page = ROOT / "docs" / "results.md"
    reports = {name: measure(name, options.json_dir, quick=options.quick) for name in options.only}
    known = sections_of(page.read_text("utf-8")) if page.exists() else {}
    known |= {name: section(report) for name, report in reports.items()}
    page.write_text(as_markdown(known[name] for name in BENCHMARKS if name in known), "utf-8")
    if "frontends" in reports:
        table: Any = reports["frontends"]["table"]
        write_table(ROOT / "docs" / "models.md", table)
    held = [f["holds"] for r in reports.values() for f in r.get("figures", [])]  # type: ignore[attr-defined]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
