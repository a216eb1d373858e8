"""The thirteen scenarios: ``python -m benchmarks.scenarios [S2 S7 ...]``; without names: all.

Each is one file of this folder. Rates are compared at equal cost; what loses is shown too.
"""

import argparse
import logging
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
    # Every cut-off search would be a line; the deadlines are part of the scenarios.
    logging.getLogger("orchestrator").setLevel(logging.ERROR)
    found: list[Row] = []
    refused: dict[str, str] = {}
    cpu_s: dict[str, float] = {}
    for name in options.names or files.names():
        file = files.load(name)
        if file.kind == "later":
            refused[name] = str(file.data["refused"])
            continue
        started_s = time.process_time()
        found += RUNNERS[file.kind](file, options)
        cpu_s[name] = round(time.process_time() - started_s, 1)
    return Result(
        tuple(rows.figures(found)),
        rows.table(found),
        {"refused": refused, "scenario_cpu_s": cpu_s, "page_table": True},
    )


if __name__ == "__main__":
    main("scenarios", run, names=tuple(files.names()))
