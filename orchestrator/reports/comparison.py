"""Runs side by side: their figures, what each needed for the same samples and the same loss."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from statistics import median

from orchestrator import storage
from orchestrator.document import read_document
from orchestrator.errors import ConfigError
from orchestrator.inputs import read_text
from orchestrator.reports import figures
from orchestrator.reports.rows import int_of, number_of
from orchestrator.reports.run_report import LOSS_WINDOW, RunFound
from orchestrator.storage import Json

Value = float | int | str | None

_MODEL = ("training.task", "training.init_from")
"""Keys, and beginnings of keys, on which the loss hangs more than on how it was trained."""

_DEFAULT = "(default)"
"""The value of a key that a file lacks, as those have that a person or an older lyray wrote."""

_OWN = ("run.name", "run.storage_path", "metrics.")
"""Keys in which runs always differ."""


@dataclass(frozen=True, slots=True)
class Reached:
    """When a run had come so far, and what that had cost."""

    samples: float
    billed_s: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs in the order given; the first is what the others are compared with."""

    runs: tuple[RunFound, ...]
    names: tuple[str, ...]  # no two alike
    differs: tuple[tuple[str, tuple[str, ...]], ...]  # dotted key of the file, its values
    notes: tuple[str, ...]
    same_samples: int | None
    at_samples: tuple[Reached | None, ...]
    same_loss: float | None
    at_loss: tuple[Reached | None, ...]


def compare_runs(runs: tuple[RunFound, ...]) -> RunComparison:
    """Set the runs side by side; what differs is read from their own files."""
    files = [_keys_of(run) for run in runs]
    differs = tuple(_differences(files))
    fewest = min(run.slots[-1].samples if run.slots else 0 for run in runs)
    unlike = [key for key, _ in differs if key.startswith(_MODEL)]
    curves = [smoothed(run) for run in runs]
    same_loss = None
    if not unlike and all(curves):
        same_loss = max(min(loss for _, loss in curve) for curve in curves)
    return RunComparison(
        runs=runs,
        names=_names(runs),
        differs=differs,
        notes=tuple(_notes(runs, _names(runs), dict(differs), unlike, files)),
        same_samples=fewest or None,
        at_samples=tuple(reached(run, fewest) if fewest else None for run in runs),
        same_loss=same_loss,
        at_loss=tuple(
            None if same_loss is None else _at_loss(run, curve, same_loss)
            for run, curve in zip(runs, curves, strict=True)
        ),
    )


def progress(run: RunFound) -> list[Reached]:
    """How far the run was at the ends of its slots; from where it began, never backwards."""
    found: list[Reached] = []
    before = Reached(0.0, 0.0, 0.0)
    for slot in run.slots:
        now = Reached(float(slot.samples), slot.time_s, slot.spent_usd)
        if now.samples > before.samples:
            found += [before, now] if not found or before is not found[-1] else [now]
            before = now
        else:  # idle, or steps were undone: time and money went on
            before = Reached(before.samples, now.billed_s, now.usd)
    return found


def reached(run: RunFound, samples: float) -> Reached | None:
    """When so many samples were committed, between the ends of slots in proportion."""
    points = progress(run)
    for a, b in pairwise(points):
        if a.samples < samples <= b.samples:
            part = (samples - a.samples) / (b.samples - a.samples)
            return Reached(
                samples,
                a.billed_s + part * (b.billed_s - a.billed_s),
                a.usd + part * (b.usd - a.usd),
            )
    return None


def smoothed(run: RunFound) -> list[tuple[float, float]]:
    """(samples, mean loss of the last ten steps) after every step that has ten behind it."""
    window: deque[float] = deque(maxlen=LOSS_WINDOW)
    found = []
    for step in run.steps:
        loss = number_of(step, "loss")
        if loss is not None:
            window.append(loss)
            if len(window) == LOSS_WINDOW:
                found.append((float(int_of(step, "end_sample")), fsum(window) / LOSS_WINDOW))
    return found


def _at_loss(run: RunFound, curve: list[tuple[float, float]], loss: float) -> Reached | None:
    samples = next((samples for samples, value in curve if value <= loss), None)
    return None if samples is None else reached(run, samples)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the comparison: its key in JSON, its name, how it is shown, and where from."""

    key: str
    name: str
    shown: Callable[[float | None], str]
    value: Callable[[RunComparison, int], Value]
    relative: bool = True  # its difference to the first run is told in percent


def figure_values(found: RunComparison, figure: Figure) -> tuple[Value, ...]:
    """One value a run, in their order; None where it never started: it has no figure at all."""
    return tuple(
        figure.value(found, i) if run.has_started else None for i, run in enumerate(found.runs)
    )


def _of_run(value: Callable[[RunFound], Value]) -> Callable[[RunComparison, int], Value]:
    return lambda found, i: value(found.runs[i])


def _kinds(*kinds: str) -> Callable[[RunComparison, int], Value]:
    return _of_run(lambda run: sum(event.get("kind") in kinds for event in run.events))


def _rate(run: RunFound) -> float | None:
    rates = [s.measured_samples_per_s for s in run.slots if s.measured_samples_per_s]
    return median(rates) if rates else None


def _reached(where: str, what: str) -> Callable[[RunComparison, int], Value]:
    def value(found: RunComparison, i: int) -> Value:
        at = (found.at_samples if where == "samples" else found.at_loss)[i]
        return None if at is None else float(getattr(at, what))

    return value


def _worst(run: RunFound) -> float | None:
    slot = run.worst_slot
    return None if slot is None else slot.spent_usd - slot.budget_usd


def _best_loss(run: RunFound) -> float | None:
    return run.best_evaluation.loss if run.best_evaluation else None


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _loss_at_samples(found: RunComparison, i: int) -> Value:
    if found.same_samples is None or found.same_loss is None:
        return None
    curve = smoothed(found.runs[i])
    return next((loss for at, loss in reversed(curve) if at <= found.same_samples), None)


FIGURES = (
    Figure("samples", "samples", figures.count, _of_run(lambda r: r.num_samples)),
    Figure("steps", "steps", _whole, _of_run(lambda r: r.num_steps)),
    Figure("samples_per_s", "samples/s, median of slots", figures.number, _of_run(_rate)),
    Figure("step_s", "step time, median", figures.seconds, _of_run(lambda r: r.step_s)),
    Figure("prediction_error_ratio", "off its prediction, median", figures.percent,
           _of_run(lambda r: r.error_ratio), relative=False),
    Figure("billed_s", "billed time", figures.seconds, _of_run(lambda r: r.billed_hours * 3600)),
    Figure("spent_usd", "spent", figures.usd, _of_run(lambda r: r.spent_usd)),
    Figure("average_per_hour_usd", "$ per billed hour", figures.usd,
           _of_run(lambda r: r.average_per_hour_usd)),
    Figure("usd_per_million_samples", "$ per 1M samples", figures.usd_number,
           _of_run(lambda r: r.usd_per_million_samples)),
    Figure("most_over_budget_usd", "most above the average budget", figures.usd,
           _of_run(_worst), relative=False),
    Figure("same_samples_billed_s", "time to the same samples", figures.seconds,
           _reached("samples", "billed_s")),
    Figure("same_samples_usd", "$ to the same samples", figures.usd, _reached("samples", "usd")),
    Figure("same_samples_loss", "loss at the same samples", figures.number, _loss_at_samples,
           relative=False),
    Figure("last_loss", f"loss, mean of the last {LOSS_WINDOW}", figures.number,
           _of_run(lambda r: r.last_loss), relative=False),
    Figure("best_evaluation_loss", "loss of the best evaluation", figures.number,
           _of_run(_best_loss), relative=False),
    Figure("same_loss_billed_s", "time to the same loss", figures.seconds,
           _reached("loss", "billed_s")),
    Figure("same_loss_usd", "$ to the same loss", figures.usd, _reached("loss", "usd")),
    Figure("same_loss_samples", "samples to the same loss", figures.count,
           _reached("loss", "samples")),
    Figure("replans", "re-plans", _whole, _kinds("replan"), relative=False),
    Figure("plans", "stretches of one plan", _whole, _of_run(lambda r: len(r.plans)),
           relative=False),
    Figure("devices_lost", "devices lost", _whole, _kinds("lost"), relative=False),
    Figure("recoveries", "recoveries", _whole, _kinds("recovered"), relative=False),
    Figure("stragglers", "stragglers named", _whole, _kinds("straggler"), relative=False),
    Figure("checkpoints", "checkpoints", _whole, _kinds("checkpoint"), relative=False),
    Figure("device_hours", "device-hours in plans", figures.number,
           _of_run(lambda r: fsum(life.used_s for life in r.lives) / 3600)),
    Figure("idle_device_hours", "device-hours idle", figures.number,
           _of_run(lambda r: fsum(life.idle_s for life in r.lives) / 3600), relative=False),
)  # fmt: skip


_KEPT = {True: "kept", False: "BROKEN", None: "-"}


def comparison_head(found: RunComparison) -> tuple[str, ...]:
    """The head of the table of figures."""
    return ("", *found.names)


def comparison_cells(found: RunComparison) -> list[tuple[str, ...]]:
    """The rows of the table: those that no run has are left out."""
    rows: list[tuple[str, ...]] = [
        ("status", *(run.status for run in found.runs)),
        ("budget", *(_KEPT[run.bound_held] for run in found.runs)),
    ]
    for figure in FIGURES:
        values = figure_values(found, figure)
        if any(value is not None for value in values):
            rows.append((_named(found, figure), *_cells(figure, values)))
    return rows


def _named(found: RunComparison, figure: Figure) -> str:
    if figure.key.startswith("same_samples"):
        return f"{figure.name} ({figures.count(found.same_samples)})"
    if figure.key.startswith("same_loss"):
        return f"{figure.name} ({figures.number(found.same_loss)})"
    return figure.name


def _cells(figure: Figure, values: Sequence[Value]) -> Iterator[str]:
    first = values[0]
    for i, value in enumerate(values):
        if isinstance(value, str) or value is None:
            yield value or "-"
            continue
        told = figure.shown(value)
        if i and figure.relative and isinstance(first, int | float) and first:
            told += f" ({100 * (value / first - 1):+.1f} %)"
        yield told


def comparison_data(found: RunComparison) -> dict[str, Json]:
    """What ``lyray report --against ... --json`` adds, as ``comparison``: one object a run."""
    values = {figure.key: figure_values(found, figure) for figure in FIGURES}
    return {
        "runs": [
            {
                "name": name,
                "run_dir": run.run_url,
                "status": run.status,
                "reason": run.reason,
                "bound_held": run.bound_held,
                **{key: of_runs[i] for key, of_runs in values.items()},
            }
            for i, (name, run) in enumerate(zip(found.names, found.runs, strict=True))
        ],
        "same_samples": found.same_samples,
        "same_loss": found.same_loss,
        "differs": {key: list(values) for key, values in found.differs},
        "notes": list(found.notes),
    }


def _names(runs: Sequence[RunFound]) -> tuple[str, ...]:
    """The runs' names, with as much of their folders as tells them apart."""
    names = [run.name for run in runs]
    urls = [run.run_url for run in runs]
    if len(set(urls)) < len(urls):  # the same run twice
        return tuple(f"{name} ({i + 1})" for i, name in enumerate(names))
    parts = [url.split("/") for url in urls]
    for depth in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(part[-depth:]) for part in parts]
    return tuple(names)


def _notes(
    runs: Sequence[RunFound], names: Sequence[str], differs: dict[str, tuple[str, ...]],
    unlike: Sequence[str], files: Sequence[dict[str, str]],
) -> Iterator[str]:  # fmt: skip
    """What a reader must know before comparing."""
    for run, name, keys in zip(runs, names, files, strict=True):
        if not run.has_started:
            yield f"{name} never started ({run.status}): it has no figures"
        elif not run.slots:
            yield f"{name} has no slot yet: it has no curves, and no figures over time"
        elif "ended without a result" in run.status:
            yield f"{name} goes on, or ended without a result: its figures are those so far"
        if not keys:
            yield f"{name} has no config.yaml that can be read: what differs is not known"
    if unlike:
        yield f"{', '.join(unlike)} differ: losses are of different models, and not compared"
    if "training.global_batch" in differs:
        sizes = ", ".join(differs["training.global_batch"])
        yield f"steps are of {sizes} samples: compare by samples, and step times not at all"
    clocks = [
        key for key in differs if key in ("emulation.time_scale", "emulation.billing_speedup")
    ]
    if clocks:
        yield f"{', '.join(clocks)} differ: seconds of the run's clock are not the same in each"


def _keys_of(run: RunFound) -> dict[str, str]:
    """The run's own file, dotted key to value as text; nothing where it cannot be read."""
    url = storage.join(run.run_url, "config.yaml")
    try:
        data = read_document(read_text(url, url, "put it back"), url)
    except ConfigError:
        return {}
    found: dict[str, str] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))
        elif not path.startswith(_OWN):
            found[path] = value if isinstance(value, str) else json.dumps(value, default=str)

    walk(data, "")
    return found


def _differences(files: Sequence[dict[str, str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not all(files):
        return
    for key in dict.fromkeys(key for keys in files for key in keys):
        values = tuple(keys.get(key, _DEFAULT) for keys in files)
        if len(set(values)) > 1 and not set(values) <= {_DEFAULT, "null"}:  # both say nothing
            yield key, values
