"""What must be true of a finished run's files, whatever broke on the way; a breach is one line."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum, inf, isclose
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore, RunStore

STATE_TOLERANCE = 1e-12
"""Largest difference of a number from the run without faults; any optimizer, in fp64."""

QUANTUM_S = 0.001
"""Billed seconds to which the pools of such a run round up."""

INSTANT_S = 50 * QUANTUM_S
"""Billed seconds: what is closer is one moment, read from the clock twice or rounded up."""

Row = Mapping[str, Any]
Spans = list[tuple[float, float]]


def breaches(config: RunConfig, reference: RunConfig) -> tuple[str, ...]:
    """What a run's files say and must not.

    Args:
        config: Of the run, whose storage is local; pools are billed while used, by quanta of
            ``QUANTUM_S``.
        reference: Of the same run without faults.
    """
    store, undisturbed = RunStore(config.run.run_url), RunStore(reference.run.run_url)
    return (
        *_of_samples(store, (config.training.steps or 0) * config.training.global_batch),
        *_of_state(store, undisturbed),
        *_of_money(store),
        *_of_holding(store),
        *_of_files(config),
    )


def _of_samples(store: RunStore, num_samples: int) -> Iterator[str]:
    """The run is done, and every sample committed once, in order."""
    steps: Sequence[Row] = store.read("steps")
    at = 0
    for number, row in enumerate(steps):
        if (row["step"], row["first_sample"]) != (number, at):
            yield f"samples: line {number} is step {row['step']} from {row['first_sample']} on"
        at = row["end_sample"]
    result: Row = store.read_result() or {}
    told = result.get("status"), result.get("samples")
    if at != num_samples or told != ("finished", num_samples):
        yield f"samples: {at} of {num_samples} committed; the result says {told}"


def _of_state(store: RunStore, undisturbed: RunStore) -> Iterator[str]:
    """Losses, and parameters and optimizer state of the last checkpoint, as without faults."""
    losses: list[list[float]] = [
        [float(str(row["loss"])) for row in found.read("steps")] for found in (store, undisturbed)
    ]
    if len(losses[0]) == len(losses[1]):
        gap = max(abs(own - other) for own, other in zip(*losses, strict=True))
        if not gap <= STATE_TOLERANCE:
            yield f"state: a loss differs by {gap:.3g}"
    own, other = CheckpointStore(store.run_url), CheckpointStore(undisturbed.run_url)
    manifest = own.latest()
    if manifest is None or manifest.step != other.steps()[-1]:
        yield f"state: the last checkpoints are of step {own.steps()} and {other.steps()}"
        return
    gap = 0.0
    for file in manifest.files:
        mine = load_file(own.url(manifest.step, file.path))
        expected = load_file(other.url(manifest.step, file.path))
        if set(mine) != set(expected):
            yield f"state: layer {file.layer}: {sorted(set(mine) ^ set(expected))} on one side only"
        for key in set(mine) & set(expected):
            gap = max(gap, float((mine[key].double() - expected[key].double()).abs().max()))
    if not gap <= STATE_TOLERANCE:
        yield f"state: a parameter or its optimizer state differs by {gap:.3g}"


def _of_money(store: RunStore) -> Iterator[str]:
    """A line is price times time, at the price in force; lines add up to what was spent."""
    lines: Sequence[Row] = store.read("ledger")
    slots: Sequence[Row] = store.read("slots")
    for line in lines:
        hours = (line["to_s"] - line["from_s"]) / 3600.0
        if not isclose(line["usd"], line["price_per_hour"] * hours, abs_tol=1e-12):
            yield f"money: {line} is not price times time"
        known = {
            slot["devices"][line["device"]]["price_per_hour"]
            for pair in pairwise(slots)
            if pair[0]["time_s"] <= line["from_s"] + INSTANT_S <= pair[1]["time_s"] + 2 * INSTANT_S
            for slot in pair
            if slot["devices"].get(line["device"], {"state": "lost"})["state"] != "lost"
        }
        if not any(isclose(line["price_per_hour"], price) for price in known):
            yield f"money: {line} is not at a price in force: {sorted(known)}"
    total = fsum(line["usd"] + line["egress_usd"] for line in lines)
    state, result = store.load_state(billing_speedup=1.0), store.read_result() or {}  # its dollars
    for name, spent in (
        ("result.json", result.get("spent_usd", inf)),
        ("control.json", state.spent_usd if state else inf),
        ("slots.jsonl", slots[-1]["spent_usd"] if slots else inf),
    ):
        if not isclose(total, float(str(spent)), abs_tol=1e-9):
            yield f"money: the ledger comes to {total}, {name} says {spent}"


def _of_holding(store: RunStore) -> Iterator[str]:
    """Who is in the plan is billed all the time, from a loss to the return apart; nobody else is.

    In the slot after a change of plan the old one may run on for a step; where a loss broke the
    change off, it is held to the next one.
    """
    must, may = _planned(store)
    lines: Sequence[Row] = store.read("ledger")
    billed = defaultdict[str, Spans](list)
    for line in lines:
        if line["cause"] == "use":
            billed[line["device"]].append((line["from_s"], line["to_s"]))
    events: Sequence[Row] = store.read("events")
    for device in sorted({*must, *billed}):
        for (_, end), (begin, _) in pairwise(sorted(billed[device])):
            if begin < end - INSTANT_S:
                yield f"money: {device} is billed twice from {begin} to {end}"
        losses = [e["time_s"] for e in events if e["kind"] == "lost" and e["device"] == device]
        for begin, end in _less(must[device], billed[device]):
            if not any(begin - INSTANT_S <= at <= end + INSTANT_S for at in losses):
                yield f"money: {device} is in the plan, but not billed from {begin} to {end}"
        for begin, end in _less(billed[device], may[device]):
            yield f"money: {device} is in no plan, but billed from {begin} to {end}"


def _planned(store: RunStore) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """When each device was in the plan for sure, and when perhaps."""
    must, may = defaultdict[str, Spans](list), defaultdict[str, Spans](list)
    slots: Sequence[Row] = store.read("slots")
    lossy = [any(v["state"] == "lost" for v in slot["devices"].values()) for slot in slots]
    held = [_devices(slots[0]["plan"])] if slots else []  # by the plan of the slot, or one before
    for k in range(1, len(slots)):
        span = slots[k - 1]["time_s"], slots[k]["time_s"]
        held = [*(held if lossy[k - 1] else held[-1:]), _devices(slots[k]["plan"])]
        for device in set[str].intersection(*held):
            must[device].append(span)
        for device in set[str].union(*held):
            may[device].append(span)
    return must, may


def _devices(plan: Row) -> set[str]:
    return {d for group in plan["groups"] for stage in group["stages"] for d in stage["devices"]}


def _less(spans: Spans, others: Spans) -> Spans:
    """What of some stretches lies in none of others."""
    left: Spans = []
    for begin, end in _joined(spans):
        at = begin
        for low, high in sorted(others):
            if low > at + INSTANT_S and low < end:
                left.append((at, low))
            if high > at and low < end:
                at = high
        if at < end - INSTANT_S:
            left.append((at, end))
    return left


def _joined(spans: Spans) -> Spans:
    """Stretches that follow each other as one."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1] + INSTANT_S:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _of_files(config: RunConfig) -> Iterator[str]:
    """Whole checkpoints only, not more than asked for; nothing half written, no sockets.

    What a killed process was writing into a checkpoint goes with that checkpoint.
    """
    folder = Path(config.run.run_url)
    checkpoints = sorted((folder / "checkpoints").iterdir())
    if len(checkpoints) > config.training.keep_checkpoints:
        yield f"files: {len(checkpoints)} checkpoints are kept"
    for path in checkpoints:
        if not (path / "manifest.json").exists():
            yield f"files: {path.name} has no manifest"
    for path in folder.rglob("*"):
        half = ".tmp-" in path.name and "checkpoints" not in path.parts
        if half or not (path.is_file() or path.is_dir()):
            yield f"files: {path} was left behind"


def hits(config: RunConfig) -> tuple[Row, ...]:
    """The faults that have hit a process, in order."""
    path = Path(config.run.run_url) / "faults.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else ()
    return tuple(json.loads(line) for line in lines)


def alive(pids: Iterable[int]) -> tuple[int, ...]:
    """Those of these processes that have not ended."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return tuple(found)
