"""The comparison of simulated strategies as one self-contained HTML page with pictures."""

from collections.abc import Sequence
from html import escape

from orchestrator.config import RunConfig
from orchestrator.reports import figures
from orchestrator.reports.svg import Series, bar_chart, line_chart, page, table
from orchestrator.whatif.rehearsal import Rehearsal
from orchestrator.whatif.rehearsal_table import EQUAL_COST, HEAD, cells
from orchestrator.whatif.summary import left_out


def rehearsal_page(config: RunConfig, results: Sequence[Rehearsal]) -> str:
    """The page: rates at equal cost, samples and dollars over time, the table, what failed."""
    budget = config.budget.average_per_hour_usd
    ran = [r for r in results if not r.problem]
    best = sorted(ran, key=lambda r: -(r.samples_per_s_at_budget or 0.0))
    body = [
        f"<h1>{escape(config.run.name)}: strategies simulated</h1>",
        f"<p>The budget is {figures.usd(budget)}/h on average. {escape(EQUAL_COST)}</p>",
        *(f'<p class="soft">{escape(note)}</p>' for note in left_out(config)),
        "<h2>Samples/s at equal cost</h2>",
        bar_chart(
            [(r.strategy, r.samples_per_s_at_budget or 0.0) for r in best],
            unit="samples/s",
            label="Samples per second of every strategy at equal cost",
        ),
        "<h2>Samples over time</h2>",
        line_chart(
            [_curve(r, 1, i) for i, r in enumerate(ran)],
            x_title="hours",
            y_title="samples",
            label="Samples of every strategy over the hours",
        ),
        "<h2>Money over time</h2>",
        line_chart(
            [*(_curve(r, 2, i) for i, r in enumerate(ran)), _allowed(ran, budget)],
            x_title="hours",
            y_title="$",
            label="Dollars of every strategy over the hours, and what the budget allows",
        ),
        "<h2>Figures</h2>",
        table(HEAD, [cells(r) for r in best], right=range(1, len(HEAD))),
    ]
    body += [
        f'<p class="bad">{escape(r.strategy)}: {escape(r.problem)}</p>'
        for r in results
        if r.problem
    ]
    return page(f"{config.run.name}: simulated", body)


def _curve(r: Rehearsal, column: int, colour: int) -> Series:
    points = tuple((point[0], float(point[column])) for point in r.points)
    return Series(r.strategy, points, colour)


def _allowed(ran: Sequence[Rehearsal], budget_per_hour_usd: float) -> Series:
    hours = max((r.hours for r in ran), default=0.0)
    return Series("budget", ((0.0, 0.0), (hours, hours * budget_per_hour_usd)), 7, dashed=True)
