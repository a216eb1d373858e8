"""What happened in a run, kind by kind: how often, to how many devices, and how long it took."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from orchestrator.reports import figures
from orchestrator.reports.rows import Row, number_of

_FIRST = (
    "lost", "failed", "notice", "recovered", "straggler", "joined", "replan", "budget_changed",
)  # fmt: skip
"""In this order; other kinds follow by name."""


@dataclass(frozen=True, slots=True)
class EventCount:
    """Events of one kind; ``duration_s`` on the run's clock, None where none has any."""

    kind: str
    times: int
    duration_s: float | None
    devices: int
    causes: tuple[tuple[str, int], ...]


def event_counts(events: Sequence[Row]) -> tuple[EventCount, ...]:
    """Faults first, then what was done about them, then the rest."""
    kinds: dict[str, list[Row]] = {}
    for event in events:
        kinds.setdefault(str(event.get("kind", "")), []).append(event)
    order = {kind: i for i, kind in enumerate(_FIRST)}
    return tuple(
        _count(kind, kinds[kind])
        for kind in sorted(kinds, key=lambda kind: (order.get(kind, len(order)), kind))
    )


def _count(kind: str, events: Sequence[Row]) -> EventCount:
    took = [s for event in events if (s := number_of(event, "duration_s")) is not None]
    causes = Counter(str(event["cause"]) for event in events if event.get("cause"))
    return EventCount(
        kind=kind,
        times=len(events),
        duration_s=fsum(took) if took else None,
        devices=len({event["device"] for event in events if event.get("device")}),
        causes=tuple(sorted(causes.items())),
    )


COUNT_HEAD = ("event", "times", "took in all", "devices", "causes")


def count_cells(count: EventCount) -> tuple[str, ...]:
    """One row of the table."""
    return (
        count.kind,
        f"{count.times:,}",
        "" if count.duration_s is None else figures.seconds(count.duration_s),
        f"{count.devices:,}" if count.devices else "",
        ", ".join(f"{cause} ({_so_often(times)})" for cause, times in count.causes),
    )


def _so_often(times: int) -> str:
    return "once" if times == 1 else f"{times:,} times"
