"""Lines of a run's files, read back one by one: what is missing in them reads as nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

Row = Mapping[str, object]

Times = tuple[float, float, float]
"""Least, median and most of the steps of a slot, in s."""

PHASES = ("compute_s", "wait_s", "input_s")
"""Into which the time of a device's steps is divided."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """What the report needs of one line of ``slots.jsonl``."""

    slot: int
    time_s: float
    step: int
    decision: str
    reason: str
    plan: Row
    predicted_step_s: float | None
    measured_step_s: float | None
    cost_per_hour_usd: float | None
    spent_usd: float
    budget_usd: float
    overspend_bound_usd: float
    forgiven_usd: float
    time_constant_s: float | None  # billed, as is the next
    coherence_s: float | None
    control_cpu_s: float
    num_late: int
    num_operations: int
    marginal_values: Mapping[str, float]
    price_per_hour_usd: Mapping[str, float]  # of a device, by pool
    idle_pools: tuple[str, ...]
    samples: int  # committed so far
    predicted_samples_per_s: float | None
    measured_samples_per_s: float | None

    @property
    def error_ratio(self) -> float | None:
        """Measured over predicted step time, less one."""
        if self.measured_step_s is None or not self.predicted_step_s:
            return None
        return self.measured_step_s / self.predicted_step_s - 1.0


def number_of(row: Row, key: str) -> float | None:
    """A number of a row, None where it has none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def slot_row(row: Row, plan: Row) -> SlotRow:
    """A line of ``slots.jsonl``; ``plan`` of the line before, which is kept where it is equal."""
    predicted, measured = map_of(row, "predicted"), map_of(row, "measured")
    devices = [d for d in map_of(row, "devices").values() if isinstance(d, dict)]
    return SlotRow(
        slot=int_of(row, "slot"),
        time_s=number_of(row, "time_s") or 0.0,
        step=int_of(row, "step"),
        decision=str(row.get("decision", "")),
        reason=str(row.get("reason", "")),
        plan=plan if plan == map_of(row, "plan") else map_of(row, "plan"),
        predicted_step_s=number_of(predicted, "step_s"),
        measured_step_s=number_of(measured, "step_s"),
        cost_per_hour_usd=number_of(measured, "cost_per_hour_usd"),
        spent_usd=number_of(row, "spent_usd") or 0.0,
        budget_usd=number_of(row, "budget_usd") or 0.0,
        overspend_bound_usd=number_of(row, "overspend_bound_usd") or 0.0,
        forgiven_usd=number_of(row, "forgiven_usd") or 0.0,
        time_constant_s=number_of(row, "time_constant_s"),
        coherence_s=number_of(row, "coherence_s"),
        control_cpu_s=number_of(row, "control_cpu_s") or 0.0,
        num_late=int_of(row, "num_late"),
        num_operations=int_of(row, "num_operations"),
        marginal_values={
            name: float(value)
            for name, value in map_of(row, "marginal_values").items()
            if isinstance(value, int | float)
        },
        price_per_hour_usd={
            str(d["pool"]): float(d["price_per_hour"]) for d in devices if d.get("state") != "lost"
        },
        idle_pools=tuple(sorted({str(d["pool"]) for d in devices if d.get("state") == "idle"})),
        samples=int_of(row, "samples"),
        predicted_samples_per_s=number_of(predicted, "samples_per_s"),
        measured_samples_per_s=number_of(measured, "samples_per_s"),
    )


def int_of(row: Row, key: str) -> int:
    """A whole number of a row, 0 where it has none."""
    value = row.get(key)
    return int(value) if isinstance(value, int | float) else 0


def map_of(row: Row, key: str) -> Row:
    """An object of a row, empty where it has none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}
