"""The report of a run as one self-contained HTML page."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from orchestrator.reports import figures
from orchestrator.reports.band_chart import band_chart
from orchestrator.reports.bill import (
    RECONCILED_HEAD,
    BillLine,
    reconciled_cells,
    tolerance_text,
)
from orchestrator.reports.budget_table import CHANGES_HEAD, change_cells
from orchestrator.reports.device_times import DEVICE_HEAD, device_cells
from orchestrator.reports.event_counts import COUNT_HEAD, count_cells, event_counts
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
from orchestrator.reports.svg import Series, line_chart, page, table, thinned, tiles
from orchestrator.reports.time_axis import LEFT, TimeAxis
from orchestrator.reports.worth import worth_parts

_ROWS = 200
"""Most rows of a table; the files have them all."""

_MONEY_SCALE = 5.0
"""The most that was allowed is not drawn where it is so many times what was spent and budgeted:
both would be lines on the axis. The figure stands above."""


def run_page(found: RunFound, reconciled: Sequence[BillLine] = ()) -> str:
    """The page: head figures, loss, step time, money, evaluations, plans, devices, bill, events."""
    held = {True: "good", False: "bad", None: "soft"}[found.bound_held]
    body = [
        f"<h1>{escape(found.name)}: {escape(found.status)}</h1>",
        f'<p class="soft">{escape(found.reason)}</p>',
        *(f'<p class="bad">Warning: {escape(warning)}</p>' for warning in found.warnings),
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
    axis = TimeAxis(found.slots[-1].time_s if found.slots else 0.0)
    for title, content in (
        ("Loss", _loss_chart(found)),
        ("Throughput", _rate_chart(found, axis)),
        ("Step time", _step_chart(found, axis)),
        ("Money", _money_chart(found, axis)),
        ("Plan over time", _plan_chart(found, axis)),
    ):
        if content:
            body += [f"<h2>{title}</h2>", content]
    body += _evaluations(found)
    plans, pools = found.plans, found.pool_of
    rows = comparison_rows(found)
    if rows:
        body += [
            "<h2>Strategies, measured in short runs</h2>",
            table(COMPARISON_HEAD, rows, right=(1, 2, 3, 4), chosen=0),
        ]
    body += [
        f"<h2>{_titled('Plans', len(plans))}</h2>",
        table(
            PLAN_HEAD,
            [plan_cells(span, pools) for span in plans[-_ROWS:]],
            right=(2, 3, 4),
        ),
        f"<h2>{_titled('Devices', len(found.devices), 'worst')}</h2>",
        '<p class="soft">Time of a step: least / median / most.</p>',
        table(DEVICE_HEAD, map(device_cells, found.devices[:_ROWS])),
        "<h2>Bill</h2>",
        table(BILL_HEAD, bill_cells(found), right=(1, 2, 3)),
        *_reconciled(reconciled),
        *_budget_changes(found),
        *worth_parts(found.worth),
        "<h2>Faults and other events, kind by kind</h2>",
        table(COUNT_HEAD, map(count_cells, event_counts(found.events)), right=(1, 2, 3)),
        f"<h2>{_titled('Events', len(found.events))}</h2>",
        table(EVENT_HEAD, map(event_cells, found.events[-_ROWS:])),
    ]
    return page(f"lyray report: {found.name}", body)


def _reconciled(lines: Sequence[BillLine]) -> list[str]:
    if not lines:
        return []
    return [
        "<h2>Ledger against the provider's bill</h2>",
        f'<p class="soft">{escape(tolerance_text())}</p>',
        table(RECONCILED_HEAD, reconciled_cells(lines), right=(1, 2, 3)),
    ]


def _titled(title: str, count: int, which: str = "last") -> str:
    return f"{title} (the {which} {_ROWS} of {count})" if count > _ROWS else title


def _loss_chart(found: RunFound) -> str:
    points = tuple((float(step), loss) for step, loss in found.losses)
    series = [Series("loss", thinned(points))]
    judged = tuple((float(e.step), e.loss) for e in found.evaluations if e.loss is not None)
    if judged:
        series.append(Series("evaluation", thinned(judged), colour=2))
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


def _budget_changes(found: RunFound) -> list[str]:
    rows = [change_cells(event) for event in found.budget_changes[-_ROWS:]]
    if not rows:
        return []
    title = _titled("Budget changes", len(found.budget_changes))
    return [f"<h2>{title}</h2>", table(CHANGES_HEAD, rows, right=(0, 1))]


def _step_chart(found: RunFound, axis: TimeAxis) -> str:
    return _two_curves(
        [(s.time_s, s.measured_step_s, s.predicted_step_s) for s in found.slots],
        axis, "seconds of the run's clock", "step time over billed time, measured and predicted",
    )  # fmt: skip


def _rate_chart(found: RunFound, axis: TimeAxis) -> str:
    return _two_curves(
        [(s.time_s, s.measured_samples_per_s, s.predicted_samples_per_s) for s in found.slots],
        axis, "samples a second of the run's clock",
        "samples per second over billed time, measured and predicted",
    )  # fmt: skip


def _two_curves(
    rows: Sequence[tuple[float, float | None, float | None]],
    axis: TimeAxis,
    y_title: str,
    label: str,
) -> str:
    """What slots measured, and what was predicted of them."""
    measured = [(axis.units(time_s), m) for time_s, m, _ in rows if m]
    predicted = [(axis.units(time_s), p) for time_s, _, p in rows if p]
    if not measured:
        return ""
    return _over_time(
        [Series("measured", thinned(measured)),
         Series("predicted", thinned(predicted), colour=2, dashed=True)],
        axis, y_title, label,
    )  # fmt: skip


def _money_chart(found: RunFound, axis: TimeAxis) -> str:
    times = [axis.units(s.time_s) for s in found.slots]
    spent, budget = [s.spent_usd for s in found.slots], [s.budget_usd for s in found.slots]
    most = [s.budget_usd + s.overspend_bound_usd for s in found.slots]
    curves = {"spent": (spent, 0, False), "average budget": (budget, 1, False)}
    if max(most, default=0.0) <= _MONEY_SCALE * max((*spent, *budget), default=0.0):
        curves["most that was allowed"] = (most, 2, True)
    return _over_time(
        [
            Series(name, thinned(tuple(zip(times, values, strict=True))), colour, dashed)
            for name, (values, colour, dashed) in curves.items()
        ],
        axis,
        "dollars",
        "dollars over billed time, spent and budgeted",
    )


def _over_time(series: Sequence[Series], axis: TimeAxis, y_title: str, label: str) -> str:
    """A chart that stands above the bands, to the same scale."""
    span = (0.0, axis.units(axis.end_s))
    return line_chart(
        series, x_title=axis.title, y_title=y_title, label=label, left=LEFT, x_span=span
    )


def _plan_chart(found: RunFound, axis: TimeAxis) -> str:
    """The bands, and how long each device was what as a table."""
    drawn = band_chart(found.lives, found.events, axis)
    if not drawn:
        return ""
    losses = Counter(str(e.get("device")) for e in found.events if e.get("kind") == "lost")
    rows = [
        (
            life.device,
            life.pool,
            life.kind,
            *(f"{axis.units(s):.3g}" for s in (life.used_s, life.idle_s, life.slow_s)),
            str(losses[life.device]),
        )
        for life in found.lives
    ]
    head = ("device", "pool", "kind", "in plans", "idle", "straggling", "times lost")
    return (
        f"{drawn}<details><summary>The same as figures, in {axis.title}</summary>"
        f"{table(head, rows, right=range(3, 7))}</details>"
    )
