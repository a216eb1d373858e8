"""The report of a run as one self-contained HTML page."""

from html import escape

from orchestrator.reports import figures
from orchestrator.reports.device_times import DEVICE_HEAD, device_cells
from orchestrator.reports.run_report import LOSS_WINDOW, RunFound
from orchestrator.reports.run_text import (
    BILL_HEAD,
    COMPARISON_HEAD,
    EVENT_HEAD,
    PLAN_HEAD,
    bill_cells,
    bound_text,
    comparison_rows,
    event_cells,
    loss_text,
    plan_cells,
)
from orchestrator.reports.svg import Series, line_chart, page, table, tiles
from orchestrator.reports.worth import worth_parts

_POINTS = 400
"""Most points a curve is drawn with: more than the picture has pixels for is thinned out."""

_ROWS = 200
"""Most rows of a table; the files have them all."""

_MONEY_SCALE = 5.0
"""The most that was allowed is not drawn where it is so many times what was spent and budgeted:
both would be lines on the axis. The figure stands above."""


def run_page(found: RunFound) -> str:
    """The page: head figures, loss, step time, money, evaluations, plans, devices, bill, events."""
    held = "good" if found.bound_held else "bad"
    body = [
        f"<h1>{escape(found.name)}: {escape(found.status)}</h1>",
        f'<p class="soft">{escape(found.reason)}</p>',
        tiles(
            {
                "steps": f"{found.num_steps:,}",
                f"loss, means of {LOSS_WINDOW} steps": loss_text(found).partition(" (")[0],
                **_best_tile(found),
                "step time, median": figures.seconds(found.step_s),
                "off its prediction, median": figures.percent(found.error_ratio),
                "spent": figures.usd(found.spent_usd),
                "per billed hour": figures.usd(found.average_per_hour_usd),
                "per million samples": figures.usd(found.usd_per_million_samples),
            }
        ),
        f'<p class="{held}">Budget: {escape(bound_text(found))}</p>',
    ]
    if found.standing_usd:
        body.append(
            f'<p class="soft">Devices that were present and idle cost '
            f"{figures.usd(found.standing_usd)}; releasing them would have saved it.</p>"
        )
    for title, content in (
        ("Loss", _loss_chart(found)),
        ("Step time", _step_chart(found)),
        ("Money", _money_chart(found)),
    ):
        if content:
            body += [f"<h2>{title}</h2>", content]
    body += _evaluations(found)
    rows = comparison_rows(found)
    if rows:
        body += [
            "<h2>Strategies, measured in short runs</h2>",
            table(COMPARISON_HEAD, rows, right=(1, 2, 3, 4), chosen=0),
        ]
    body += [
        f"<h2>{_titled('Plans', len(found.plans))}</h2>",
        table(
            PLAN_HEAD,
            [plan_cells(span, found.pool_of) for span in found.plans[-_ROWS:]],
            right=(2, 3, 4),
        ),
        f"<h2>{_titled('Devices', len(found.devices), 'worst')}</h2>",
        '<p class="soft">Time of a step: least / median / most.</p>',
        table(DEVICE_HEAD, map(device_cells, found.devices[:_ROWS])),
        "<h2>Bill</h2>",
        table(BILL_HEAD, bill_cells(found), right=(1, 2, 3)),
        *worth_parts(found.worth),
        f"<h2>{_titled('Events', len(found.events))}</h2>",
        table(EVENT_HEAD, map(event_cells, found.events[-_ROWS:])),
    ]
    return page(f"lyray report: {found.name}", body)


def _titled(title: str, count: int, which: str = "last") -> str:
    return f"{title} (the {which} {_ROWS} of {count})" if count > _ROWS else title


def _loss_chart(found: RunFound) -> str:
    points = tuple((float(step), loss) for step, loss in found.losses)
    series = [Series("loss", _thinned(points))]
    judged = tuple((float(e.step), e.loss) for e in found.evaluations if e.loss is not None)
    if judged:
        series.append(Series("evaluation", _thinned(judged), colour=2))
    return line_chart(
        series, x_title="step", y_title="loss",
        label="loss over steps",
    )  # fmt: skip


def _best_tile(found: RunFound) -> dict[str, str]:
    best = found.best_evaluation
    if best is None:
        return {}
    return {f"loss of the best evaluation, step {best.step}": figures.number(best.loss)}


def _evaluations(found: RunFound) -> list[str]:
    """The newest ones and, wherever it stands, the best one, which stands out."""
    told, best = found.evaluations, found.best_evaluation
    if not told:
        return []
    shown = [e for i, e in enumerate(told) if i >= len(told) - _ROWS or e is best]
    names = sorted({name for e in told for name in e.metrics})
    rows = [
        (
            f"{e.step}, the best" if e is best else str(e.step),
            figures.number(e.loss),
            *(figures.number(e.metrics.get(name)) for name in names),
            f"{e.samples:,}",
            figures.seconds(e.eval_s),
        )
        for e in shown
    ]
    return [
        f"<h2>{_titled('Evaluations', len(told))}</h2>",
        table(
            ("step", "loss", *names, "samples", "took"),
            rows,
            right=range(1, len(names) + 4),
            chosen=next((i for i, e in enumerate(shown) if e is best), -1),
        ),
    ]


def _step_chart(found: RunFound) -> str:
    predicted = tuple(
        (float(s.slot), s.predicted_step_s) for s in found.slots if s.predicted_step_s
    )
    measured = tuple((float(s.slot), s.measured_step_s) for s in found.slots if s.measured_step_s)
    if not measured:
        return ""
    return line_chart(
        [Series("measured", _thinned(measured)),
         Series("predicted", _thinned(predicted), colour=2, dashed=True)],
        x_title="slot", y_title="seconds of the run's clock",
        label="step time over slots, measured and predicted",
    )  # fmt: skip


def _money_chart(found: RunFound) -> str:
    hours = [s.time_s / 3600 for s in found.slots]
    spent, budget = [s.spent_usd for s in found.slots], [s.budget_usd for s in found.slots]
    most = [s.budget_usd + s.overspend_bound_usd for s in found.slots]
    curves = {"spent": (spent, 0, False), "average budget": (budget, 1, False)}
    if max(most, default=0.0) <= _MONEY_SCALE * max((*spent, *budget), default=0.0):
        curves["most that was allowed"] = (most, 2, True)
    return line_chart(
        [
            Series(name, _thinned(tuple(zip(hours, values, strict=True))), colour, dashed)
            for name, (values, colour, dashed) in curves.items()
        ],
        x_title="billed hours",
        y_title="dollars",
        label="dollars over time, spent and budgeted",
    )


def _thinned(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    every = max(1, len(points) // _POINTS)
    return (*points[::every], *points[-1:]) if every > 1 else points
