"""A run as flat CSV files for pandas and spreadsheets: units in the names, numbers as they were."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence

from orchestrator import storage
from orchestrator.control.persistence import RunStore
from orchestrator.reports.lives import Place, places
from orchestrator.reports.rows import PHASES, Row, map_of, number_of
from orchestrator.reports.run_report import PlanSpan, RunFound

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet would work out: free text gets an apostrophe before it."""

_SLOTS = {
    "slot": "slot", "billed_to_s": "time_s", "step": "step", "samples": "samples",
    "generation": "generation", "decision": "decision", "reason": "reason",
    "predicted_step_s": "predicted.step_s", "measured_step_s": "measured.step_s",
    "predicted_samples_per_s": "predicted.samples_per_s",
    "measured_samples_per_s": "measured.samples_per_s",
    "predicted_cost_usd_per_hour": "predicted.cost_per_hour_usd",
    "measured_cost_usd_per_hour": "measured.cost_per_hour_usd",
    "spent_usd": "spent_usd", "budget_usd": "budget_usd",
    "budget_usd_per_hour": "budget_per_hour_usd",
    "overspend_bound_usd": "overspend_bound_usd", "backlog_usd": "backlog_usd",
    "progress_backlog_usd": "progress_backlog_usd", "forgiven_usd": "forgiven_usd",
    "penalty_weight": "penalty_weight",
    "price_of_money_samples_per_usd": "price_of_money_samples_per_usd",
    "time_constant_billed_s": "time_constant_s", "coherence_billed_s": "coherence_s",
    "overhead_ratio": "overhead_ratio", "bubble_ratio": "bubble_ratio", "loss": "loss",
    "grad_norm": "grad_norm", "lr": "lr", "solve_s": "solve_s", "migration_s": "migration_s",
    "moved_bytes": "moved_bytes", "control_cpu_s": "control_cpu_s",
    "num_operations": "num_operations", "num_late": "num_late", "stragglers": "stragglers",
    "fallbacks": "fallbacks", "requested_devices": "requested",
}  # fmt: skip
_STEPS = {
    name: name
    for name in ("step", "loss", "grad_norm", "lr", "loss_scale", "samples", "step_s",
                 "generation", "first_sample", "end_sample")
}  # fmt: skip
_LEDGER = {
    "billed_from_s": "from_s", "billed_to_s": "to_s", "device": "device", "pool": "pool",
    "price_usd_per_hour": "price_per_hour", "usd": "usd", "egress_bytes": "egress_bytes",
    "egress_usd": "egress_usd", "cause": "cause", "estimated": "estimated",
}  # fmt: skip
_EVENTS = {
    "billed_time_s": "time_s", "slot": "slot", "kind": "kind", "device": "device",
    "cause": "cause", "duration_s": "duration_s", "detail": "detail", "budget_key": "key",
    "old": "old", "new": "new", "source": "source",
}  # fmt: skip
_EVALUATIONS = ("step", "loss", "samples", "eval_s", "best")

_DEVICES = (
    "slot", "billed_from_s", "billed_to_s", "device", "pool", "kind", "state", "group", "stage",
    "first_layer", "end_layer", "group_samples", "slowdown", "straggler", "price_usd_per_hour",
    "memory_bytes", "utilization_ratio",
    *(f"{phase.removesuffix('_s')}_{which}_s" for phase in PHASES
      for which in ("least", "median", "most")),
)  # fmt: skip
_PLANS = (
    "first_slot", "last_slot", "billed_from_s", "billed_to_s", "end_step", "schedule", "group",
    "stage", "devices", "first_layer", "end_layer", "recompute", "samples", "num_microbatches",
    "predicted_step_s", "measured_step_s", "cost_usd_per_hour", "reason",
)  # fmt: skip


def write_csv(found: RunFound, folder: str) -> tuple[str, ...]:
    """Write the files below ``folder``, a path or URL, and return their names.

    Files of these names are replaced; any other stays. Those of things that never were
    (evaluations, marginal values) are left out.

    Raises:
        OSError: If the storage refuses.
    """
    store = RunStore(found.run_url)
    written = []
    for name, head, rows in (
        ("slots.csv", tuple(_SLOTS), _flat(store.rows("slots"), _SLOTS)),
        ("steps.csv", tuple(_STEPS), _flat(store.rows("steps"), _STEPS)),
        ("ledger.csv", tuple(_LEDGER), _flat(store.rows("ledger"), _LEDGER)),
        ("events.csv", tuple(_EVENTS), _flat(store.rows("events"), _EVENTS)),
        ("devices.csv", _DEVICES, _devices(store)),
        ("plans.csv", _PLANS, (row for span in found.plans for row in _plan(span))),
        ("marginal_values.csv", ("slot", "name", "value"), _values(found)),
        ("evaluations.csv", *_evaluations(found)),
    ):
        text, num_rows = _csv(head, rows)
        if num_rows or name not in ("marginal_values.csv", "evaluations.csv"):
            storage.write_bytes(storage.join(storage.absolute(folder), name), text.encode())
            written.append(name)
    return tuple(written)


def safe(cell: object) -> object:
    """A cell of a CSV file: numbers as they are, text so that no spreadsheet works it out."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, int | float):
        return cell
    text = cell if isinstance(cell, str) else json.dumps(cell)
    if isinstance(cell, list) and all(isinstance(item, str) for item in cell):
        text = "; ".join(cell)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _csv(head: Sequence[str], rows: Iterator[Sequence[object]]) -> tuple[str, int]:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    num_rows = 0
    for row in rows:
        writer.writerow(map(safe, row))
        num_rows += 1
    return out.getvalue(), num_rows


def _flat(rows: Iterator[Row], columns: Mapping[str, str]) -> Iterator[Sequence[object]]:
    paths = [path.split(".") for path in columns.values()]
    for row in rows:
        yield [
            map_of(row, path[0]).get(path[1]) if len(path) > 1 else row.get(path[0])
            for path in paths
        ]


def _devices(store: RunStore) -> Iterator[Sequence[object]]:
    """One row a device and slot: what it was in that slot, lost where it was so at the end."""
    from_s = 0.0
    for row in store.rows("slots"):
        to_s = number_of(row, "time_s") or 0.0
        given = places(map_of(row, "plan"))
        for device, view in map_of(row, "devices").items():
            if isinstance(view, dict):
                lost = view.get("state") == "lost"
                state = "lost" if lost else "used" if device in given else "idle"
                yield (
                    row.get("slot"), from_s, to_s, device, view.get("pool"), view.get("kind"),
                    state, *_place(given.get(device)), view.get("slowdown"),
                    view.get("straggler"), view.get("price_per_hour"), view.get("memory_bytes"),
                    view.get("utilization_ratio"),
                    *(time_s for phase in PHASES for time_s in view.get(phase) or [None] * 3),
                )  # fmt: skip
        from_s = to_s


def _place(place: Place | None) -> Sequence[object]:
    if place is None:
        return (None,) * 5
    return place.group, place.stage, place.first_layer, place.end_layer, place.samples


def _plan(span: PlanSpan) -> Iterator[Sequence[object]]:
    """One row a stage; an idle plan has one row without any."""
    groups = span.plan.get("groups")
    start = (span.first_slot, span.last_slot, span.from_s, span.to_s, span.end_step,
             span.plan.get("schedule"))  # fmt: skip
    end = (span.predicted_step_s, span.measured_step_s, span.cost_per_hour_usd, span.reason)
    if not isinstance(groups, list) or not groups:
        yield (*start, *(None,) * 8, *end)
        return
    for g, group in enumerate(groups):
        sizes = group["microbatches"]
        for s, stage in enumerate(group["stages"]):
            yield (
                *start, g, s, stage["devices"], stage["first_layer"], stage["end_layer"],
                bool(stage.get("recompute")), sum(sizes), len(sizes), *end,
            )  # fmt: skip


def _values(found: RunFound) -> Iterator[Sequence[object]]:
    for slot in found.slots:
        for name, value in slot.marginal_values.items():
            yield slot.slot, name, value


def _evaluations(found: RunFound) -> tuple[Sequence[str], Iterator[Sequence[object]]]:
    names = sorted({name for e in found.evaluations for name in e.metrics})
    rows = (
        (
            *(storage.finite(v) if isinstance(v, float) else v
              for v in (getattr(e, name) for name in _EVALUATIONS)),
            *(storage.finite(e.metrics.get(name)) for name in names),
        )
        for e in found.evaluations
    )  # fmt: skip
    return (*_EVALUATIONS, *(str(safe(f"metric {name}")) for name in names)), rows
