"""The report of a run for a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.reports import figures
from orchestrator.reports.bill import (
    RECONCILED_HEAD,
    BillLine,
    reconciled_cells,
    tolerance_text,
)
from orchestrator.reports.budget_table import changes_table
from orchestrator.reports.device_times import DEVICE_HEAD, device_cells
from orchestrator.reports.event_counts import COUNT_HEAD, count_cells, event_counts
from orchestrator.reports.records import evaluation_text, plan_words
from orchestrator.reports.rows import number_of
from orchestrator.reports.run_report import LOSS_WINDOW, PlanSpan, RunFound
from orchestrator.reports.tables import worth_table

_EVENTS_SHOWN = 20
_PLANS_SHOWN = 20
_DEVICES_SHOWN = 12


def print_report(console: Console, found: RunFound, reconciled: Sequence[BillLine] = ()) -> None:
    """Print head figures, the comparison with other strategies, plans, bill and events."""
    console.print(f"[bold]{found.name}[/bold]: {found.status}", highlight=False)
    console.print(Text(found.reason, style="dim"))
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="red"))
    grid = Table.grid(padding=(0, 3))
    for name, value in head_figures(found).items():
        grid.add_row(name, Text(value, style="bold"))
    console.print(grid)
    for table in (
        comparison_table(found), _plans(found), _devices(found), _bill(found),
        _reconciled(reconciled), changes_table(found.budget_changes), _worth(found),
        _counts(found), _events(found),
    ):  # fmt: skip
        if table is not None:
            console.print()
            console.print(table)


def head_figures(found: RunFound) -> Mapping[str, str]:
    """What a reader asks first, name to figure."""
    shown = {
        "steps": f"{found.num_steps:,} ({found.num_samples:,} samples)",
        "loss": loss_text(found),
        **_judged(found),
        "step time": f"{figures.seconds(found.step_s)} (median)",
        "off its prediction": f"{figures.percent(found.error_ratio)} (median over slots)",
        "spent": (
            f"{figures.usd(found.spent_usd)} in {figures.number(found.billed_hours)} billed hours, "
            f"{figures.usd(found.average_per_hour_usd)}/h"
        ),
        "per million samples": figures.usd(found.usd_per_million_samples),
        "budget": bound_text(found),
    }
    if found.time_constant_s is not None:
        shown["price of money"] = pace_text(found)
    if found.forgiven_usd:
        shown["forgiven"] = (
            f"{figures.usd(found.forgiven_usd)} above the average, by budget.queue_cap"
        )
    if found.standing_usd:
        shown["idle but present"] = (
            f"{figures.usd(found.standing_usd)}: releasing those devices would have saved it"
        )
    if scaled := [str(event["detail"]) for event in found.events if event["kind"] == "scale"]:
        shown["devices asked for"] = f"changed {len(scaled)} times; last: {scaled[-1]}"
    if found.late_ratio is not None:
        shown["late emulated operations"] = figures.percent(found.late_ratio)
    return shown


def _judged(found: RunFound) -> Mapping[str, str]:
    if not found.evaluations:
        return {}
    text = evaluation_text(found.evaluations[-1], found.best_evaluation)
    return {"evaluation": text.removeprefix("evaluation ")}


def loss_text(found: RunFound) -> str:
    """How far the loss fell or rose, over means of ten steps."""
    first, last = found.first_loss, found.last_loss
    if first is None or last is None:
        return "-"
    way = "rose" if last > first else "fell"
    return (
        f"{figures.number(first)} -> {figures.number(last)} "
        f"({way} by {figures.number(abs(first - last))}; means of {LOSS_WINDOW} steps)"
    )


def pace_text(found: RunFound) -> str:
    """How fast the price of money follows what is spent, and for how long the states last."""
    lasting = "an unknown time"
    if found.coherence_s is not None:
        lasting = figures.seconds(found.coherence_s)
    return (
        f"follows within {figures.seconds(found.time_constant_s)}; prices and speeds last {lasting}"
    )


def bound_text(found: RunFound) -> str:
    """Whether spending kept to budget and slack, and how far it went above the average."""
    worst = found.worst_slot
    if worst is None:
        return "-"
    over = worst.spent_usd - worst.budget_usd
    kept = "kept in every slot" if found.bound_held else "BROKEN"
    side = "over" if over > 0 else "under"
    return (
        f"{kept}; at most {figures.usd(abs(over))} {side} the average (slot {worst.slot}), "
        f"{figures.usd(worst.overspend_bound_usd)} were allowed"
    )


COMPARISON_HEAD = ("strategy", "predicted", "measured", "samples/s", "$/h", "joint's gain")


def comparison_rows(found: RunFound) -> list[tuple[str, ...]]:
    """Measured strategies: joint with money no object, the others, joint at each one's cost."""
    rows: list[tuple[str, ...]] = []
    free = next((r for r in found.comparisons if not r.get("at_cost_of")), None)
    for row in found.comparisons:
        limit = row.get("at_cost_of")
        other = (
            next((r for r in found.comparisons
                  if r.get("strategy") == limit and not r.get("at_cost_of")), None)
            if limit else free
        )  # fmt: skip
        if limit:
            against = _ratio(row, other, "samples_per_s", "samples/s")
        else:
            against = "" if row is free else _ratio(free, row, "measured_step_s", "step")
        rows.append(
            (
                f"{row.get('strategy')}" + (f" at {limit}'s cost" if limit else ""),
                figures.seconds(number_of(row, "predicted_step_s")),
                figures.seconds(number_of(row, "measured_step_s")),
                figures.number(number_of(row, "samples_per_s")),
                figures.usd(number_of(row, "cost_per_hour_usd")),
                against,
            )
        )
    return rows


def comparison_table(found: RunFound) -> Table | None:
    """Strategies measured side by side before the run; None when there was no comparison."""
    return _table("Strategies, measured in short runs", COMPARISON_HEAD, comparison_rows(found))


PLAN_HEAD = (
    "slots", "to step", "predicted", "measured", "$/h", "samples: device[layers] > ...", "why",
)  # fmt: skip


def plan_cells(span: PlanSpan, pools: Mapping[str, str]) -> tuple[str, ...]:
    """One row of the table of plans; ``pools`` of the devices."""
    return (
        f"{span.first_slot}-{span.last_slot}",
        str(span.end_step),
        figures.seconds(span.predicted_step_s),
        figures.seconds(span.measured_step_s),
        figures.usd(span.cost_per_hour_usd),
        plan_words(span.plan, pools),
        span.reason,
    )


BILL_HEAD = ("pool", "device-hours", "devices", "egress")


def bill_cells(found: RunFound) -> list[tuple[str, ...]]:
    """The bill by pool."""
    return [
        (b.pool, figures.number(b.device_hours), figures.usd(b.usd), figures.usd(b.egress_usd))
        for b in found.pools
    ]


EVENT_HEAD = ("slot", "event", "device", "what", "took")


def event_cells(event: Mapping[str, object]) -> tuple[str, ...]:
    """One row of the table of events."""
    duration_s = number_of(event, "duration_s")
    return (
        str(event.get("slot", "")),
        str(event.get("kind", "")),
        str(event.get("device", "")),
        str(event.get("detail", "")),
        figures.seconds(duration_s) if duration_s is not None else "",
    )


def _plans(found: RunFound) -> Table | None:
    plans = found.plans
    title = "Plans and their time of a step"
    if len(plans) > _PLANS_SHOWN:
        title += f" (the last {_PLANS_SHOWN} of {len(plans)})"
    pools = found.pool_of
    rows = [plan_cells(span, pools)[:-1] for span in plans[-_PLANS_SHOWN:]]  # why: see the events
    return _table(title, PLAN_HEAD[:-1], rows)


def _devices(found: RunFound) -> Table | None:
    devices = found.devices
    title = "Devices and their time of a step: least / median / most"
    if len(devices) > _DEVICES_SHOWN:
        title += f" (the worst {_DEVICES_SHOWN} of {len(devices)})"
    return _table(title, DEVICE_HEAD, [device_cells(d) for d in devices[:_DEVICES_SHOWN]])


def _bill(found: RunFound) -> Table | None:
    return _table("Bill", BILL_HEAD, bill_cells(found))


def _worth(found: RunFound) -> Table | None:
    return worth_table(found.worth) if found.worth else None


def _counts(found: RunFound) -> Table | None:
    rows = [count_cells(count) for count in event_counts(found.events)]
    return _table("Faults and other events, kind by kind", COUNT_HEAD, rows)


def _events(found: RunFound) -> Table | None:
    shown = found.events[-_EVENTS_SHOWN:]
    more = len(found.events) - len(shown)
    title = f"Events (the last {len(shown)}, {more} before)" if more else "Events"
    return _table(title, EVENT_HEAD, [event_cells(event) for event in shown])


def _reconciled(lines: Sequence[BillLine]) -> Table | None:
    if not lines:
        return None
    table = _table("Ledger against the bill", RECONCILED_HEAD, reconciled_cells(lines))
    if table is not None:
        table.caption, table.caption_justify = tolerance_text(), "left"
    return table


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | None:
    """On a narrow terminal cells take more lines, the widest first, so that no figure is cut."""
    if not rows:
        return None
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        table.add_column(Text(name), no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _ratio(
    row: Mapping[str, object] | None, other: Mapping[str, object] | None, key: str, what: str
) -> str:
    a, b = (number_of(row, key) if row else None), (number_of(other, key) if other else None)
    return f"{100 * (a / b - 1):+.1f} % {what}" if a and b else ""
