"""What every benchmark prints: figures with their bars, as one JSON object or as a table."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and the bar it is held to; ``bar`` reads like ``<= 1.05``, empty: none."""

    name: str
    value: float
    unit: str
    bar: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of the bar."""
        if not self.bar:
            return True
        sign, limit = self.bar.split()
        if sign == "<=":
            return self.value <= float(limit)
        if sign == ">=":
            return self.value >= float(limit)
        if sign == "==":
            return self.value == float(limit)
        raise ValueError(f"bar {self.bar!r} of {self.name}; write <=, >= or == and a number")


@dataclass(frozen=True, slots=True)
class Result:
    """A benchmark's outcome: figures, and a table of the single runs behind them."""

    figures: tuple[Figure, ...]
    table: tuple[Mapping[str, object], ...] = ()
    notes: dict[str, object] = field(default_factory=dict)


def main(
    name: str,
    run: Callable[[argparse.Namespace], Result],
    arguments: Sequence[tuple[str, int, str]] = (),
    *,
    names: Sequence[str] = (),
) -> None:
    """Parse the common options, run, print, and exit 1 when a figure does not hold.

    Args:
        name: The benchmark's name in its JSON.
        run: Called with ``quick``, ``seed`` and the further integer ``arguments``.
        arguments: (option name, default, help) of integer options of this benchmark.
        names: What may be picked by name; ``run`` gets the picked ones as ``names``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="the short form; the bars stay")
    parser.add_argument("--seed", type=int, default=0)
    if names:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    for option, default, text in arguments:
        parser.add_argument(f"--{option}", type=int, default=default, help=text)
    options = parser.parse_args()
    if unknown := [n for n in getattr(options, "names", ()) if n not in names]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(names)}")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = run(options)
    report = {
        "benchmark": name,
        "seed": options.seed,
        "quick": options.quick,
        "wall_s": round(time.perf_counter() - wall_s, 2),
        "cpu_s": round(time.process_time() - cpu_s, 2),
        "figures": [{**asdict(figure), "holds": figure.holds} for figure in result.figures],
        "table": list(result.table),
        **result.notes,
    }
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print_table(report)
    sys.exit(0 if all(figure.holds for figure in result.figures) else 1)


def _print_table(report: dict[str, object]) -> None:
    lines = [f"{report['benchmark']} (seed {report['seed']}, {report['wall_s']} s)"]
    figures = report["figures"]
    assert isinstance(figures, list)
    for figure in figures:
        verdict = "ok" if figure["holds"] else "FALLS SHORT"
        lines.append(
            f"  {figure['name']:<32} {figure['value']:>12.5g} {figure['unit']:<8} "
            f"{figure['bar']:<12} {verdict}"
        )
    table = report["table"]
    assert isinstance(table, list)
    if table:
        lines.append("  " + "  ".join(f"{key:>14}" for key in table[0]))
        for row in table:
            cells = (f"{v:>14.5g}" if isinstance(v, float) else f"{v!s:>14}" for v in row.values())
            lines.append("  " + "  ".join(cells))
    sys.stdout.write("\n".join(lines) + "\n")
