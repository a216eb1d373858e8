"""Head and workers over many changes of plan: memory, threads, files and sockets must not grow.

A run on an embedded Ray, in which speeds and prices flip, devices are taken away and others
join, and workers are killed, is looked at through /proc every few seconds.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.live import make_config, processes, stop
from benchmarks.result import Figure, Result, main
from orchestrator.config import RunConfig
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord
from orchestrator.runtime.driver import run_job
from orchestrator.runtime.session import ray_session

SAMPLE_EVERY_S = 3.0
KILL_EVERY_S = 30.0
EVENT_EVERY_STEPS = 50  # some 4 s
WARM_UP_SHARE = 1 / 3  # of the run, for every process: caches fill, and allocators find their size
COUNTS = ("threads", "files", "sockets")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process."""

    at_s: float
    memory_bytes: int  # private to it, and written to
    threads: int
    files: int
    sockets: int


def look(pid: int, now_s: float) -> Sample:
    """Read /proc. Raises OSError when the process has ended."""
    process = Path("/proc", str(pid))
    rows = (line.split() for line in (process / "smaps_rollup").read_text("utf-8").splitlines())
    # Clean pages are code from files: private or not as other processes that run it come and go.
    written = next(int(row[1]) for row in rows if row[0] == "Private_Dirty:")
    targets = []
    for file in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, if it only listed this folder
            targets.append(str(file.readlink()))
    num_sockets = sum(target.startswith("socket:") for target in targets)
    threads = len(list((process / "task").iterdir()))
    return Sample(now_s, 1024 * written, threads, len(targets), num_sockets)


def growth(at_s: Sequence[float], values: Sequence[float]) -> float:
    """How much the values grow from the first to the last time: the median slope of all pairs."""
    t, y = np.asarray(at_s, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(t), 1)
    slopes = (y[second] - y[first]) / (t[second] - t[first])
    return float(np.median(slopes) * (t[-1] - t[0]))


def disturbances(num_events: int) -> list[str]:
    """What happens to the cluster: each event undoes, or makes up for, the one before it."""
    cycle = (
        "device: fast-0, speed_ratio: 0.25",
        "device: fast-0, speed_ratio: 1.0",
        "pool: slow, price_per_hour: 8.0",
        "pool: slow, price_per_hour: 1.0",
    )
    events, leaver = [], 1
    for index in range(num_events):
        at = EVENT_EVERY_STEPS * (index + 1)
        if index % 24 == 22:
            events.append(f"{{at_step: {at}, device: slow-{leaver}, notice_s: 2}}")
            leaver += 1
        elif index % 24 == 23:
            events.append(f"{{at_step: {at}, pool: slow, joined: 1}}")
        else:
            events.append(f"{{at_step: {at}, {cycle[index % 4]}}}")
    return events


class Observer:
    """A view that samples the run's processes, kills workers and stops the run in time."""

    def __init__(self, config: RunConfig, *, seconds: float, rng: np.random.Generator) -> None:
        self._config, self._seconds, self._rng = config, seconds, rng
        self._since_s = 0.0  # when the first step was done
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
        self.events: list[RunEvent] = []
        self.step_s: list[float] = []
        self.num_kills = 0
        self.num_changes = -1  # the first plan is none
        self._generation = -1

    def phase(self, text: str) -> None:
        """Nobody asked."""

    def step(self, step: CommittedStep) -> None:
        """A step was committed: from the first one on the time runs."""
        self.step_s.append(step.step_s)
        if step.generation != self._generation:
            self._generation = step.generation
            self.num_changes += 1
        if not self._since_s:
            self._since_s = time.monotonic()
            self._thread.start()

    def slot(self, record: SlotRecord) -> None:
        """Nobody asked."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Nobody asked."""

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        self.events.append(event)

    def close(self) -> None:
        """Sample no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        kill_s = KILL_EVERY_S
        while not self._over.wait(SAMPLE_EVERY_S):
            now_s = time.monotonic() - self._since_s
            if now_s > self._seconds:
                stop()
                return
            living = processes(self._config)
            for name, pid in living.items():
                with suppress(OSError):  # it ended meanwhile
                    self.samples[name, pid].append(look(pid, now_s))
            slow = sorted(name for name in living if name.startswith("slow-"))
            if now_s > kill_s and slow:
                os.kill(living[slow[int(self._rng.integers(len(slow)))]], signal.SIGKILL)
                self.num_kills += 1
                kill_s += KILL_EVERY_S


def row_of(name: str, pid: int, samples: Sequence[Sample]) -> dict[str, object]:
    """What grew in one process."""
    at_s = [sample.at_s for sample in samples]

    def grown(value: Callable[[Sample], float]) -> float:
        return growth(at_s, [value(sample) for sample in samples])

    median_bytes = float(np.median([sample.memory_bytes for sample in samples]))
    return {
        "process": name,
        "pid": pid,
        "samples": len(samples),
        "memory_mb": median_bytes / 1e6,
        "memory_growth_pct": 100.0 * grown(lambda s: s.memory_bytes) / median_bytes,
        **{f"{c}_growth": grown(lambda s, c=c: getattr(s, c)) for c in COUNTS},  # type: ignore[misc]  # of a lambda
        **{c: max(getattr(s, c) for s in samples) for c in COUNTS},
    }


def run(options: argparse.Namespace) -> Result:
    """One run of so many minutes; a tenth of them in the short form."""
    seconds = options.minutes * (6.0 if options.quick else 60.0)
    num_events = int(seconds / 0.05 / EVENT_EVERY_STEPS)
    with tempfile.TemporaryDirectory() as folder, ray_session(5):
        events = disturbances(num_events)
        config = make_config(Path(folder), fast=2, slow=2, events=events)
        observer = Observer(config, seconds=seconds, rng=np.random.default_rng(options.seed))
        run_job(config, view=observer)
        observer.close()
    from_s = WARM_UP_SHARE * seconds
    rows = []
    for (name, pid), samples in observer.samples.items():
        kept = [sample for sample in samples if sample.at_s >= samples[0].at_s + from_s]
        if len(kept) > 1 and kept[-1].at_s - kept[0].at_s > (seconds - from_s) / 2.0:
            rows.append(row_of(name, pid, kept))

    def worst(key: str) -> float:
        return max((float(str(row[key])) for row in rows), default=float("inf"))

    head = [row for row in rows if row["process"] == "head"]
    figures = (
        Figure("head_seen", len(head), "1", "== 1"),
        Figure("memory_growth_pct", worst("memory_growth_pct"), "%", "<= 1"),
        *(Figure(f"{c}_growth", worst(f"{c}_growth"), "1", "<= 3") for c in COUNTS),
        Figure("changes_per_min", observer.num_changes / seconds * 60.0, "1/min", ">= 5"),
        Figure("changes_of_plan", observer.num_changes, "1"),
        Figure("kills", observer.num_kills, "1"),
        Figure("steps", len(observer.step_s), "1"),
        Figure("step_s", float(np.median(observer.step_s)), "s"),
    )
    kinds = sorted({event.kind for event in observer.events})
    counts = {kind: sum(event.kind == kind for event in observer.events) for kind in kinds}
    return Result(figures, tuple(rows), {"events": counts})


if __name__ == "__main__":
    main("soak", run, (("minutes", 20, "how long the run goes on"),))
