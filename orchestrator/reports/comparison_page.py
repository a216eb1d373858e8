"""Runs side by side, as one self-contained HTML page and as tables on a terminal."""

from collections.abc import Callable, Sequence
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.reports.band_chart import band_chart
from orchestrator.reports.comparison import (
    RunComparison,
    comparison_cells,
    comparison_head,
    progress,
    smoothed,
)
from orchestrator.reports.run_report import RunFound
from orchestrator.reports.svg import Series, line_chart, page, table, thinned
from orchestrator.reports.time_axis import LEFT, TimeAxis

MAX_KEYS = 60
"""Keys of the files that are told; ``--json`` has all that differ."""

_VALUE = 90  # characters of one

Points = Sequence[tuple[float, float]]


def comparison_page(found: RunComparison) -> str:
    """The page: figures, curves of all runs in common pictures, what differs, plans over time."""
    first, *others = found.names
    axis = TimeAxis(max((r.slots[-1].time_s for r in found.runs if r.slots), default=0.0))
    span = (0.0, axis.units(axis.end_s))
    right = range(1, len(found.names) + 1)
    body = [
        f"<h1>{escape(first)} against {escape(', '.join(others))}</h1>",
        *(f'<p class="soft">{escape(note)}.</p>' for note in found.notes),
        "<h2>Figures</h2>",
        '<p class="soft">In brackets: against the first run.</p>',
        table(comparison_head(found), comparison_cells(found), right=right),
    ]
    for title, curve, x_title, y_title, of_time in (
        ("Samples over time", _samples(axis), axis.title, "samples", True),
        ("Money over time", _dollars(axis), axis.title, "dollars", True),
        ("Loss over samples", smoothed, "samples", "loss, means of ten steps", False),
        ("Loss over money", _loss_over_dollars, "dollars", "loss, means of ten steps", False),
    ):
        drawn = line_chart(
            _curves(found, curve), x_title=x_title, y_title=y_title, label=f"{title} of every run",
            left=LEFT, x_span=span if of_time else None,
        )  # fmt: skip
        if drawn:
            body += [f"<h2>{title}</h2>", drawn]
    body += _differences(found)
    for name, run in zip(found.names, found.runs, strict=True):
        bands = band_chart(run.lives, run.events, axis)
        if bands:
            body += [f"<h2>Plan over time: {escape(name)}</h2>", bands]
    return page(f"lyray report: {' against '.join(found.names)}", body)


def print_comparison(console: Console, found: RunComparison) -> None:
    """Print notes, figures and what differs in the files."""
    for note in found.notes:
        console.print(Text(note, style="dim"))
    console.print(_grid("Runs", comparison_head(found), comparison_cells(found)))
    if found.differs:
        console.print()
        console.print(_grid(_titled(found), ("key", *found.names), _shown_keys(found)))


def _differences(found: RunComparison) -> list[str]:
    if not found.differs:
        return []
    return [
        f"<h2>{escape(_titled(found))}</h2>",
        table(("key", *found.names), _shown_keys(found)),
    ]


def _titled(found: RunComparison) -> str:
    more = len(found.differs) - MAX_KEYS
    return "What differs in their files" + (f" (and {more} keys more)" if more > 0 else "")


def _shown_keys(found: RunComparison) -> list[tuple[str, ...]]:
    return [
        (key, *(v if len(v) <= _VALUE else f"{v[: _VALUE - 1]}…" for v in values))
        for key, values in found.differs[:MAX_KEYS]
    ]


def _grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in head:
        grid.add_column(Text(name), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _curves(found: RunComparison, curve: Callable[[RunFound], Points]) -> list[Series]:
    series = []
    for i, (name, run) in enumerate(zip(found.names, found.runs, strict=True)):
        points = curve(run)
        if points:
            series.append(Series(name, thinned(points), colour=2 * i % 7, dashed=i % 2 == 1))
    return series


def _samples(axis: TimeAxis) -> Callable[[RunFound], Points]:
    return lambda run: [(axis.units(s.time_s), float(s.samples)) for s in run.slots]


def _dollars(axis: TimeAxis) -> Callable[[RunFound], Points]:
    return lambda run: [(axis.units(s.time_s), s.spent_usd) for s in run.slots]


def _loss_over_dollars(run: RunFound) -> Points:
    """Both known at the same samples: each loss at what had been spent by then."""
    points, found, i = progress(run), [], 0
    for samples, loss in smoothed(run):
        while i + 1 < len(points) and points[i + 1].samples < samples:
            i += 1
        if i + 1 >= len(points):
            break
        a, b = points[i], points[i + 1]
        part = (samples - a.samples) / ((b.samples - a.samples) or 1.0)
        found.append((a.usd + part * (b.usd - a.usd), loss))
    return found
