"""The pages of what a run leaves and what a script meets: files, fields, classes."""

from collections.abc import Mapping, Sequence

import orchestrator
from docs.generator.fields import fields_of, written_keys
from docs.generator.markdown_text import code, first_line, sentence, table, unit_of
from orchestrator.control.persistence import step_json
from orchestrator.core import durable, edits, slot, view
from orchestrator.core.evaluation import Evaluation
from orchestrator.reports.records import slot_data

RESULT = {
    "status": "how the run ended: the word of the table of exit codes",
    "reason": "why, in one line",
    "run_dir": "folder of the run",
    "resumable": "whether the same command goes on from here",
    "steps": "committed optimizer steps",
    "samples": "committed samples",
    "final_loss": "loss of the last step",
    "evaluation": "the newest evaluation, as a line of `evaluations.jsonl`; null without one",
    "best_evaluation": "the best one, likewise",
    "spent_usd": "what the run was billed, over all its lives",
    "average_per_hour_usd": "that over the billed hours",
    "budget_per_hour_usd": "the average that was allowed at the end",
    "billed_hours": "length of the run as billed",
    "replans": "changes of plan",
    "recoveries": "losses that were made up for",
    "code": "hash of the user's code that ran",
    "versions": "of lyray, Ray and torch",
}
"""What ``result.json`` says; a test compares the keys with those that the head writes."""

_PLAIN = {
    "slot": "number of the slot", "time_s": "when it ended, billed seconds", "step": "the step",
    "generation": "number of the plan", "decision": "`keep`, `reassign`, `switch` or `idle`",
    "reason": "why, in words", "plan": "what ran: groups, stages, shares", "loss": "mean loss",
    "next_plan": "what runs from now on", "predicted": "step time, rate, cost, memory as planned",
    "measured": "the same as measured", "penalty_weight": "V", "backlog_usd": "Q",
    "price_of_money_samples_per_usd": "Q/V", "spent_usd": "billed so far",
    "solve_s": "time of search and decision", "migration_s": "planned pause", "lr": "learning rate",
    "moved_bytes": "what a change of plan moved", "control_cpu_s": "processor time of the loop",
    "grad_norm": "norm of the gradient, before clipping",
    "num_late": "emulated operations that came late",
    "num_operations": "emulated operations", "devices": "each device: state, slowdown, times",
    "stragglers": "devices that lag, and in what", "fallbacks": "second-best ways taken",
    "bubble_ratio": "share of device time in steps without compute",
    "price_age_s": "since each pool's price was read", "samples": "samples",
    "step_s": "length of the step", "loss_scale": "of fp16, where it is not 1",
    "first_sample": "positions in the run's one sequence, half-open",
    "end_sample": "end of them", "device": "its name", "pool": "its pool", "usd": "dollars billed",
    "from_s": "start of the interval, billed seconds", "to_s": "its end",
    "budget_per_hour_usd": "the average that is allowed from now on",
    "price_per_hour": "the price used", "kind": "what happened", "detail": "in words",
    "state": "`used`, `idle` or `lost`", "slowdown": "measured over predicted compute time",
    "straggler": "whether it was named one", "device_id": "its name",
    "duration_s": "how long it took", "egress_bytes": "bytes that cost egress",
    "egress_usd": "dollars for them", "estimated": "at a price that was not known for sure",
    "metrics": "the user's metrics by name", "files": "one a layer: path, size, SHA-256",
    "num_layers": "layers of the model", "samples_committed": "samples of all committed steps",
    "seed": "`run.seed`", "optimizer": "its name", "schema": "form of the file",
}  # fmt: skip
"""What fields say that the source finds too plain to say."""

LINES: Mapping[str, tuple[type, Sequence[str]]] = {
    "slots.jsonl": (slot.SlotRecord, written_keys(slot_data)),
    "steps.jsonl": (slot.CommittedStep, written_keys(step_json)),
    "evaluations.jsonl": (Evaluation, list(fields_of(Evaluation))),
    "ledger.jsonl": (durable.LedgerEntry, list(fields_of(durable.LedgerEntry))),
    "events.jsonl": (slot.RunEvent, list(fields_of(slot.RunEvent))),
    "manifest.json": (durable.CheckpointManifest, list(fields_of(durable.CheckpointManifest))),
}
"""File to the dataclass that it holds, and the keys that are written."""


def files_page() -> str:
    """The files that a run leaves, field by field."""
    parts = [
        "# Files of a run",
        "All of them lie in `<run.storage_path>/<run.name>/`. What else lies there, and how the "
        "files behave on a bucket: [operations](../operations.md#files-of-a-run). `.jsonl` files "
        "hold one JSON object a line. `control.json`, what a restart needs, has no fixed form.",
    ]
    for name, (cls, keys) in LINES.items():
        known = fields_of(cls)
        rows = [
            [code(key), unit_of(key), known[key].text if key in known and known[key].text
             else _PLAIN.get(key, "")]
            for key in keys
        ]  # fmt: skip
        place = "checkpoints/step-NNNNNN/" if name == "manifest.json" else ""
        parts += [f"## {place}{name}", sentence(first_line(cls.__doc__))]
        parts.append(table(["field", "unit", "meaning"], rows))
    device = fields_of(view.DeviceView)
    parts += [
        "## result.json",
        "How the run ended. It is there only once it has.",
        table(["field", "unit", "meaning"], [[code(k), unit_of(k), v] for k, v in RESULT.items()]),
        "## A device in slots.jsonl",
        table(
            ["field", "meaning"],
            [[code(f.name), f.text or _PLAIN.get(f.name, "")] for f in device.values()],
        ),
    ]
    change, every = fields_of(edits.BudgetChanged), fields_of(slot.RunEvent)
    parts += [
        "## A change of the budget in events.jsonl",
        sentence(first_line(edits.BudgetChanged.__doc__)),
        table(
            ["field", "meaning"],
            [[code(f.name), f.text] for f in change.values() if f.name not in every],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """What a script imports; mkdocstrings fills it in."""
    parts = [
        "# Python",
        "Each name is loaded when it is first used: `import orchestrator` loads neither Ray nor "
        "torch. How they are used: [the tutorial](../tutorial.md) and "
        "[your own model](../models.md).",
        "```python\nfrom orchestrator import RunConfig, Task, Trainer\n```",
    ]
    homes = orchestrator._HOMES
    first = ("Task", "RunConfig", "Trainer", "Result")
    names = [*first, *sorted(set(orchestrator.__all__) - set(first))]
    parts += [f"::: {homes[name]}.{name}" for name in names]
    parts.append("::: orchestrator.callbacks.TensorBoardWriter")
    told = [(slot, "CommittedStep"), (slot, "SlotRecord"), (slot, "RunEvent")]
    parts.append("## What callbacks are given")
    for module, name in told:
        cls = getattr(module, name)
        rows = [
            [code(f.name), code(f.type), f.text or _PLAIN.get(f.name, "")]
            for f in fields_of(cls).values()
        ]
        parts += [
            f"### {name}",
            first_line(cls.__doc__),
            table(["field", "type", "meaning"], rows),
        ]
    return "\n\n".join(parts) + "\n"
