"""The comparison of simulated strategies as plain data and as tables on a terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.reports import figures
from orchestrator.storage import Json
from orchestrator.whatif.rehearsal import Rehearsal
from orchestrator.whatif.summary import left_out


def rehearsal_data(config: RunConfig, results: Sequence[Rehearsal]) -> dict[str, Json]:
    """What ``lyray simulate --json`` prints: billed hours, true dollars."""
    return {
        "run": config.run.name,
        "budget_per_hour_usd": config.budget.average_per_hour_usd,
        "strategies": [
            {"strategy": r.strategy, "problem": r.problem}
            if r.problem
            else {
                **_plain(r),
                "average_per_hour_usd": r.average_per_hour_usd,
                "samples_per_s": r.samples_per_s,
                "samples_per_s_at_budget": r.samples_per_s_at_budget,
                "duty_ratio": r.duty_ratio,
                "usd_per_million_samples": r.usd_per_million_samples,
            }
            for r in results
        ],
        "notes": list(left_out(config)),
    }


EQUAL_COST = (
    "At equal cost: a strategy that spent more than the budget runs only part of the time, so its "
    "rate is multiplied by budget over spending; one that spent less keeps its rate."
)


def rehearsal_table(config: RunConfig, results: Sequence[Rehearsal]) -> Group:
    """The strategies side by side at equal cost, then how each kept to the budget and ended."""
    budget = figures.usd(config.budget.average_per_hour_usd)
    title = f"Simulated; the budget is {budget}/h"
    numbers = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    ends = Table(box=None, padding=(0, 1, 0, 0))
    numbers.add_column(HEAD[0], no_wrap=True)
    for name in HEAD[1:]:
        numbers.add_column(name, justify="right", no_wrap=True)
    for name in ("strategy", "spent", "most over budget", "bound"):
        ends.add_column(name, no_wrap=True)
    ends.add_column("ended")
    for r in results:
        if r.problem:
            ends.add_row(r.strategy, "-", "-", "-", r.problem, style="red")
            continue
        numbers.add_row(*cells(r))
        ends.add_row(
            r.strategy,
            figures.usd(r.spent_usd),
            figures.usd(r.overspend_usd),
            figures.usd(r.overspend_bound_usd),
            r.ended or "goes on",
        )
    notes = (Text(note, style="dim") for note in (EQUAL_COST, *left_out(config)))
    return Group(numbers, *notes, "", ends)


HEAD = (
    "strategy", "samples/s", "at equal cost", "$/h", "$/1M", "plans", "idle", "lost", "redone",
)  # fmt: skip


def cells(r: Rehearsal) -> tuple[str, ...]:
    """A row under ``HEAD``."""
    ratio = f"{r.duty_ratio:.2f}"
    duty = "" if ratio == "1.00" else f" (x{ratio})"
    return (
        r.strategy,
        figures.number(r.samples_per_s),
        f"{figures.number(r.samples_per_s_at_budget)}{duty}",
        figures.usd(r.average_per_hour_usd),
        figures.usd_number(r.usd_per_million_samples),
        str(r.replans),
        figures.percent(r.idle_ratio),
        str(r.lost),
        str(r.redone),
    )


def _plain(result: Rehearsal) -> dict[str, Json]:
    data = storage.to_json(result)
    assert isinstance(data, dict)
    return {key: value for key, value in data.items() if key not in ("problem", "points")}
