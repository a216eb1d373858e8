"""A budget that is edited while the run goes on: what is wanted, and what it changes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import cast

from orchestrator.core.budget import BudgetOptions, LimitOptions
from orchestrator.core.slot import RunEvent
from orchestrator.decoding import decode

Setting = None | bool | float | str | tuple[LimitOptions, ...]


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """One key of the section that has another value."""

    key: str  # dotted
    old: Setting
    new: Setting

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.key}: {setting_text(self.old)} -> {setting_text(self.new)}"


def setting_text(value: Setting) -> str:
    """A value as the file has it, limits in short."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "; ".join(map(_limit_text, value)) or "none"
    # As many digits as a float holds of what was written: two amounts that differ look different.
    return f"{value:.15g}" if isinstance(value, int | float) else value


def setting_of(data: object) -> Setting:
    """A value as a line of ``events.jsonl`` has it.

    Raises:
        ValueError: If a budget knows no such value.
    """
    return cast("Setting", decode(Setting, data, "value"))


def _limit_text(limit: LimitOptions) -> str:
    if limit.pool is not None:
        return f"pool {limit.pool} at least {limit.min_share:g} of the batch"
    what = "egress" if limit.egress else f"zone {limit.zone}"
    return f"{what} at most {limit.max_per_hour_usd:g} $/h"


def budget_changes(old: BudgetOptions, new: BudgetOptions) -> tuple[BudgetChange, ...]:
    """The keys whose values differ, in the order of the section."""
    values = ((f"budget.{f.name}", getattr(old, f.name), getattr(new, f.name)) for f in fields(old))
    return tuple(BudgetChange(key, was, now) for key, was, now in values if was != now)


PRICED = frozenset(
    f"budget.{name}"
    for name in ("average_per_hour_usd", "horizon_hours", "allow_idle", "queue_cap", "limits")
)
"""Keys that the price of money hangs on: it is looked for anew where one is changed."""


@dataclass(frozen=True, slots=True)
class BudgetChanged(RunEvent):
    """The line of ``events.jsonl`` on one key that has another value from this slot edge on."""

    key: str = ""  # dotted, such as budget.total_usd
    old: Setting = None  # its value until now
    new: Setting = None  # its value from now on
    source: str = ""  # config.yaml, or start: what was found when the run was started again


@dataclass(frozen=True, slots=True)
class BudgetNews:
    """What was heard of the budget since the last slot edge."""

    wanted: BudgetOptions | None = None  # None: nothing new
    source: str = ""  # where it was found
    warnings: tuple[str, ...] = ()  # what was found and is not followed


NewsOfBudget = Callable[[], BudgetNews]
"""Asked at every slot edge; answers at once, and tells everything once."""
