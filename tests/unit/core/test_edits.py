"""Edits of a budget, as a person reads them."""

from dataclasses import replace

import pytest

from orchestrator.core.budget import BudgetOptions
from orchestrator.core.edits import budget_changes


@pytest.mark.parametrize(
    ("old_usd", "new_usd", "text"),
    [(50.0, 80.5, "50 -> 80.5"), (12500.25, 12500.3, "12500.25 -> 12500.3"),
     (1_000_000.0, 1_000_001.0, "1000000 -> 1000001"), (None, 0.1, "none -> 0.1")],
)  # fmt: skip
def test_amounts_are_told_with_all_their_digits(
    old_usd: float | None, new_usd: float, text: str
) -> None:
    old = BudgetOptions(average_per_hour_usd=1.0, total_usd=old_usd)
    (change,) = budget_changes(old, replace(old, total_usd=new_usd))
    assert change.text == f"budget.total_usd: {text}"
