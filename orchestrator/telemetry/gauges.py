"""Gauges of a run as text: those of devices and groups are worked out when somebody asks."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import fsum, isfinite

from orchestrator.core.plan import Plan
from orchestrator.core.slot import PHASES, SlotRecord, StepReport
from orchestrator.core.view import ZonePath
from orchestrator.telemetry.metrics import METRICS, PREFIX

Series = Mapping[tuple[str, ...], float]
"""Values of a gauge by its labels, without ``run``."""

_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Gauges:
    """Holds the gauges of one run; what is shown of each is replaced as a whole."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._shown: dict[str, Series] = {}
        self._heads: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)

    def show(self, name: str, series: Series) -> None:
        """Show exactly these series of a gauge: those that were shown before vanish."""
        self._shown[name] = series

    def text(self, more: Mapping[str, Series]) -> str:
        """All that is shown, and ``more``, in the text format of Prometheus (0.0.4)."""
        shown = {**self._shown, **more}
        parts: list[str] = []
        for name, metric in METRICS.items():
            if metric.kind == "gauge":
                parts += (f"# HELP {PREFIX}{name} {metric.text}\n# TYPE {PREFIX}{name} gauge\n",)
                parts += self._lines(name, shown.get(name, {}))
        return "".join(parts)

    def _lines(self, name: str, series: Series) -> list[str]:
        """The series of a gauge; what stands before a value is written once while it is shown."""
        known = self._heads[name]
        heads = {labels: known.get(labels) or self._head(name, labels) for labels in series}
        self._heads[name] = heads
        return [f"{heads[labels]}{_number(value)}\n" for labels, value in series.items()]

    def _head(self, name: str, values: tuple[str, ...]) -> str:
        labels = sorted(zip(("run", *METRICS[name].labels), (self._run, *values), strict=True))
        inner = ",".join(f'{label}="{value.translate(_ESCAPED)}"' for label, value in labels)
        return f"{PREFIX}{name}{{{inner}}} "


def _number(value: float) -> str:
    value = float(value)
    if isfinite(value):
        return repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"  # noqa: PLR0124 - NaN


def device_series(record: SlotRecord) -> dict[str, Series]:
    """What is shown of devices: of those that were lost in the slot, only that."""
    counts: dict[tuple[str, ...], float] = defaultdict(float)
    present = [view for view in record.devices if view.state != "lost"]
    for view in present:
        counts[view.kind, view.pool, view.state] += 1
    return {
        "devices": counts,
        "device_slowdown_ratio": {(v.device_id,): v.slowdown for v in present},
        "device_straggler": {(v.device_id,): v.straggler for v in present},
        "device_utilization_ratio": {
            (v.device_id,): v.utilization_ratio for v in present if v.utilization_ratio is not None
        },
        "device_memory_bytes": {(v.device_id,): v.memory_bytes for v in present},
        "worker_up": {(v.device_id,): v.state != "lost" for v in record.devices},
        "peak_memory_bytes": {(d,): size for d, size in record.measured.peak_memory_bytes},
        "predicted_peak_memory_bytes": {
            (d,): size for d, size in record.predicted.peak_memory_bytes
        },
    }


def path_series(paths: Iterable[ZonePath]) -> dict[str, Series]:
    """What is shown of links, zone by zone."""
    ends = {path: (path.source_zone, path.target_zone) for path in paths}
    return {
        "link_bandwidth_bytes_per_second": {
            zones: path.bandwidth_bytes_per_s for path, zones in ends.items()
        },
        "link_latency_seconds": {zones: path.latency_s for path, zones in ends.items()},
    }


def plan_series(plan: Plan, strategy: str) -> dict[str, Series]:
    """What is shown of a plan."""
    groups = [(str(index), group) for index, group in enumerate(plan.groups)]
    return {
        "generation": {(): plan.generation},
        "groups": {(): len(groups)},
        "stages": {(index,): len(group.stages) for index, group in groups},
        "num_microbatches": {(index,): len(group.microbatches) for index, group in groups},
        "plan_info": {(plan.schedule, strategy): 1.0},
    }


def phase_series(reports: Iterable[StepReport]) -> dict[str, Series]:
    """Where the time of steps went: in phases of each group's busiest device, and unused."""
    by_group: dict[int, dict[str, list[StepReport]]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        by_group[report.group_index][report.device_id].append(report)
    phases: dict[tuple[str, ...], float] = {}
    bubbles: dict[tuple[str, ...], float] = {}
    for group_index, by_device in by_group.items():
        label = str(group_index)
        busiest = max(by_device.values(), key=_mean_compute_s)
        for phase in PHASES:
            field = f"{phase}_s"
            phases[label, phase] = fsum(getattr(r, field) for r in busiest) / len(busiest)
        every = [r for mine in by_device.values() for r in mine]
        held_s = sum(r.step_s for r in every)
        idle_s = held_s - sum(r.compute_s for r in every)
        bubbles[(label,)] = idle_s / held_s if held_s else 0.0
        phases[label, "bubble"] = idle_s / len(every)
    return {"step_phase_seconds": phases, "bubble_ratio": bubbles}


def _mean_compute_s(reports: list[StepReport]) -> float:
    return fsum(report.compute_s for report in reports) / len(reports)
