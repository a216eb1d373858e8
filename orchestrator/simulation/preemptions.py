"""Recorded traces of nodes that come and go, in the two public forms of them.

Read strictly: times grow, no node comes twice or leaves while absent. Several changes of one
instant are one event: losses are correlated, and must not become a series of re-plans.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MILLISECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Instant:
    """All that comes and goes at one time."""

    at_s: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """Instants in order of time; before the first one there is no node."""

    instants: tuple[Instant, ...]

    @property
    def end_s(self) -> float:
        """Time of the last change."""
        return self.instants[-1].at_s if self.instants else 0.0

    def nodes_at(self, at_s: float) -> tuple[str, ...]:
        """Nodes present right after ``at_s``, the longest there first."""
        there: dict[str, None] = {}
        for instant in self.instants:
            if instant.at_s > at_s:
                break
            for node in instant.removed:
                del there[node]
            there |= dict.fromkeys(instant.added)
        return tuple(there)


def read_node_trace(lines: Sequence[str]) -> NodeTrace:
    """A trace of either form, told by its first line.

    Forms: CSV without header (``time_ms,add or remove,node``), or one JSON list a line
    (``[time_ms, "add" or "remove" or "no-op", {"nodes": [...], ...}]``).

    Raises:
        ValueError: If a line is damaged, times run backwards, or a node comes twice or leaves
            while absent; names the line and the mend.
    """
    if not any(line.strip() for line in lines):
        raise ValueError("it is empty; write lines of time_ms,add or remove,node")
    as_json = next(line for line in lines if line.strip()).lstrip().startswith("[")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        rows.append((number, *(_json_row(number, line) if as_json else _csv_row(number, line))))
    return NodeTrace(tuple(_instants(rows)))


def _csv_row(number: int, line: str) -> tuple[float, str, tuple[str, ...]]:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3 or fields[1] not in ("add", "remove") or not fields[2]:
        raise ValueError(
            f"line {number} is {line.strip()[:60]!r}; write time_ms,add,node or time_ms,remove,node"
        )
    return _seconds(number, fields[0]), fields[1], (fields[2],)


def _json_row(number: int, line: str) -> tuple[float, str, tuple[str, ...]]:
    try:
        time_ms, what, more = json.loads(line)
        nodes = more["nodes"]
        names = tuple(str(node) for node in nodes)
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"line {number} is {line.strip()[:60]!r}; write "
            '[time_ms, "add" or "remove" or "no-op", {"nodes": [...]}]'
        ) from None
    if what not in ("add", "remove", "no-op") or (what == "no-op" and names):
        raise ValueError(
            f"line {number} says {what!r} of {len(names)} nodes; write add or remove, or no-op "
            "without nodes"
        )
    return _seconds(number, time_ms), what, names


def _seconds(number: int, time_ms: object) -> float:
    try:
        found = float(str(time_ms)) * MILLISECONDS
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(
            f"line {number}: the time is {time_ms!r}; write milliseconds from the trace's start"
        )
    return found


def _instants(
    rows: Iterable[tuple[int, float, str, tuple[str, ...]]],
) -> Iterable[Instant]:
    there: set[str] = set()
    at_s, added, removed = 0.0, list[str](), list[str]()
    for number, time_s, what, nodes in rows:
        if time_s < at_s:
            raise ValueError(
                f"line {number}: time runs back from {at_s:g} s to {time_s:g} s; sort the lines"
            )
        if time_s > at_s:
            if added or removed:
                yield Instant(at_s, tuple(added), tuple(removed))
            at_s, added, removed = time_s, [], []
        for node in nodes:
            if (what == "add") == (node in there):
                state = "is there already" if what == "add" else "is not there"
                raise ValueError(f"line {number}: node {node!r} {state}; drop the line")
        if what == "add":
            there.update(nodes)
            added += nodes
        elif what == "remove":
            there.difference_update(nodes)
            removed += nodes
    if added or removed:
        yield Instant(at_s, tuple(added), tuple(removed))
