"""Runs every benchmark and writes docs/results.md from what they print.

``python -m benchmarks.all --json-dir DIR`` keeps the JSON objects in DIR; no figure in the
docs is typed by hand.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = (
    "assignment", "baselines", "control_law", "executor", "finite_horizon", "frames", "infeasible",
    "overhead", "plan_gap", "plan_time", "planner_in_loop", "published", "reconfiguration",
    "robustness", "scale", "scenarios", "time_model",
)  # fmt: skip


def measure(name: str, folder: Path, *, quick: bool) -> dict[str, object]:
    """Run one benchmark in a process of its own and keep its JSON."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *(["--quick"] * quick)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    (folder / f"{name}.json").write_text(done.stdout, "utf-8")
    report: dict[str, object] = json.loads(done.stdout)
    return report


def as_markdown(reports: list[dict[str, object]]) -> str:
    """The page: one table a benchmark."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    lines = ["# Results", "", f"Written by `python -m benchmarks.all` on {machine}.", ""]
    for report in reports:
        lines += [f"## {report['benchmark']}", ""]
        if "skipped" in report:
            lines += [f"Skipped: {report['skipped']}", ""]
            continue
        lines += [f"Seed {report['seed']}, {report['wall_s']} s.", ""]
        lines += ["| figure | value | unit | bar | holds |", "|---|---|---|---|---|"]
        figures = report["figures"]
        assert isinstance(figures, list)
        for f in figures:
            holds = ("yes" if f["holds"] else "**no**") if f["bar"] else ""
            lines.append(f"| {f['name']} | {f['value']:.4g} | {f['unit']} | {f['bar']} | {holds} |")
        lines += ["", *_scenarios(report)]
    return "\n".join(lines)


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


def main() -> None:
    """Run all and write the page; exit 1 when a figure does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all")
    parser.add_argument("--json-dir", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.json_dir.mkdir(parents=True, exist_ok=True)
    reports = [measure(name, options.json_dir, quick=options.quick) for name in BENCHMARKS]
    (ROOT / "docs" / "results.md").write_text(as_markdown(reports), "utf-8")
    held = [f["holds"] for r in reports for f in r.get("figures", [])]  # type: ignore[attr-defined]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
