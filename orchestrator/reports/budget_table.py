"""The budget of a run and how it changed, for a terminal, a page or a program."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator import storage
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.edits import setting_of, setting_text
from orchestrator.reports import figures
from orchestrator.reports.rows import number_of
from orchestrator.storage import Json

CHANGES_HEAD = ("slot", "billed hours", "key", "old", "new", "from")


def change_cells(event: Mapping[str, object]) -> tuple[str, ...]:
    """One row of the table of changes: a ``budget_changed`` of ``events.jsonl``."""
    return (
        str(event.get("slot", "")),
        figures.number((number_of(event, "time_s") or 0.0) / 3600),
        str(event.get("key", "")),
        setting_text(setting_of(event.get("old"))),
        setting_text(setting_of(event.get("new"))),
        str(event.get("source", "")),
    )


def changes_table(events: Sequence[Mapping[str, object]]) -> Table | None:
    """How the budget changed, None where it did not."""
    if not events:
        return None
    table = Table(title="Budget changes", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in CHANGES_HEAD:
        table.add_column(Text(name))
    for event in events:
        table.add_row(*map(Text, change_cells(event)))
    return table


def print_budget(
    console: Console,
    in_force: BudgetOptions,
    wanted: BudgetOptions,
    events: Sequence[Mapping[str, object]],
) -> None:
    """Print the section as it is, beside what is wanted where that differs, and the history."""
    grid = Table(box=None, padding=(0, 2, 0, 0))
    grid.add_column(Text("budget"))
    grid.add_column(Text("in force"))
    if wanted != in_force:
        grid.add_column(Text("wanted"))
    for field in fields(in_force):
        old, new = (setting_text(getattr(budget, field.name)) for budget in (in_force, wanted))
        cells = [field.name, old] + ([new if new != old else ""] if wanted != in_force else [])
        grid.add_row(*map(Text, cells))
    console.print(grid)
    table = changes_table(events)
    if table is not None:
        console.print()
        console.print(table)


def budget_data(
    in_force: BudgetOptions, wanted: BudgetOptions, events: Sequence[Mapping[str, object]]
) -> dict[str, Json]:
    """What ``lyray budget --json`` prints."""
    return {
        "in_force": storage.to_json(in_force),
        "wanted": storage.to_json(wanted),
        "changes": [change_data(event) for event in events],
    }


def change_data(event: Mapping[str, object]) -> Json:
    """A change of the budget without what is empty in every one."""
    kept = ("slot", "time_s", "key", "old", "new", "source")
    return storage.to_json({name: event.get(name) for name in kept})
