"""The thirteen scenarios: ``python -m benchmarks.scenarios [S2 S7 ...]``; without names: all.

Each is one file of this folder. Rates are compared at equal cost; what loses is shown too. One
that this version cannot run says so, and the others go on.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping

from benchmarks.result import Result, main
from benchmarks.scenarios import files, growth, loop, ranks, rows, static
from benchmarks.scenarios.files import ScenarioFile
from benchmarks.scenarios.rows import Row

RUNNERS: Mapping[str, Callable[[ScenarioFile, argparse.Namespace], list[Row]]] = {
    "static": static.run,
    "growth": growth.run,
    "loop": loop.run,
    "ranks": ranks.run,
}


def run(options: argparse.Namespace) -> Result:
    """The scenarios that were asked for; one that is refused says why in the notes."""
    found: list[Row] = []
    told: dict[str, dict[str, str]] = {}
    cpu_s: dict[str, float] = {}
    for name in options.names or files.names():
        file = files.load(name)
        told[name] = {key: str(file.data.get(key, "")) for key in ("title", "says", "refused")}
        if told[name]["refused"]:
            sys.stderr.write(f"{name} is refused: {told[name]['refused']}\n")
            continue
        started_s = time.process_time()
        found += RUNNERS[file.kind](file, options)
        cpu_s[name] = round(time.process_time() - started_s, 1)
    return Result(
        tuple(rows.figures(found)),
        rows.table(found),
        {"scenarios": told, "scenario_cpu_s": cpu_s},
    )


if __name__ == "__main__":
    # Every cut-off search would be a line; the deadlines are part of the scenarios.
    logging.getLogger("orchestrator").setLevel(logging.ERROR)
    main("scenarios", run, names=tuple(files.names()))
