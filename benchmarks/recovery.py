"""From the loss of a worker to the next step that counts, on an embedded Ray with a replica left.

Workers are killed (kill -9) or stopped (SIGSTOP) at random moments of a run on two fast devices
and a slow one, whose plans have two groups at least: every layer is held twice.
"""

import argparse
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.live import TIMEOUT_S, make_config, processes, stop
from benchmarks.result import Figure, Result, main
from orchestrator.config import RunConfig
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord
from orchestrator.runtime.driver import run_job
from orchestrator.runtime.session import ray_session

BAR_S = 3.0
KILLS_PER_RUN = 5  # a device that is lost again and again waits ever longer before it comes back
UNUSED = "the plan did without the device"
PATIENCE_S = 60.0  # after a hit, for the next one to become due
SETTLED_SLOTS = 2  # with replicas, before the next hit
_LOST = re.compile(r"^(\S+ \S+) WARNING device (\S+) is lost: (.*)$", re.MULTILINE)


@dataclass(slots=True)
class Hit:
    """One signal sent to one worker; times on this process's monotonic clock."""

    signal: signal.Signals
    device_id: str
    at_s: float
    wall_s: float
    detected_s: float | None = None
    """Until the head knew."""

    resumed_s: float | None = None
    """Until the first step that began after it was known had ended."""

    step_s: float | None = None
    """How long that step took."""

    source: str = ""
    """Where layers came from, as the run says."""


@dataclass(slots=True)
class Hitter:
    """A view that hits workers once replicas have been there for a while, and ends the run."""

    config: RunConfig
    rng: np.random.Generator
    signals: Sequence[signal.Signals]  # one hit each, on a device that the plan uses
    hits: list[Hit] = field(default_factory=list)
    steps: list[tuple[CommittedStep, float]] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)  # losses, and what made up for them
    _num_settled: int = 0
    _pending: bool = False
    _stopped: bool = False
    _since_s: float = 0.0  # of the newest hit, or of the run

    def phase(self, text: str) -> None:
        """Nobody asked."""

    def step(self, step: CommittedStep) -> None:
        """A step was committed."""
        self.steps.append((step, time.monotonic()))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Nobody asked."""

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        if event.kind == "lost" or (event.kind, event.device) == ("recovered", ""):
            self.events.append(event)

    def slot(self, record: SlotRecord) -> None:
        """A slot ended: another hit is due once all layers are held twice again."""
        self._since_s = self._since_s or time.monotonic()
        self._num_settled += 1
        if (
            min(len(record.plan.groups), len(record.next_plan.groups)) < 2
            or self._pending
            or len(self._sources()) < len(self.hits)
        ):
            self._num_settled = 0
        due = self._num_settled >= SETTLED_SLOTS
        over = self._num_used() == len(self.signals) or len(self.hits) == 2 * len(self.signals)
        if (over and due) or time.monotonic() - self._since_s > PATIENCE_S:
            if not self._stopped:  # a second signal would end the run at once
                stop()
            self._stopped = True
        elif due:
            self._pending = True
            victim = str(self.rng.choice(record.next_plan.device_ids))
            threading.Timer(float(self.rng.uniform(0.0, 1.0)), self._hit, [victim]).start()

    def close(self) -> None:
        """Nothing to take down."""

    def _hit(self, device_id: str) -> None:
        pid = processes(self.config).get(device_id)
        if pid is not None:  # else it was lost by itself meanwhile
            kind = self.signals[self._num_used()]
            os.kill(pid, kind)
            self._since_s = time.monotonic()
            self.hits.append(Hit(kind, device_id, self._since_s, time.time()))
        self._num_settled, self._pending = 0, False

    def _sources(self) -> list[str]:
        """Of every loss so far: what made up for it."""
        told = [*self.events, None]
        return [
            after.detail if after and after.kind == "recovered" else UNUSED
            for event, after in pairwise(told)
            if event and event.kind == "lost"
        ]

    def _num_used(self) -> int:
        """Hits that counted: where a plan already did without the device, there is another."""
        return sum(source != UNUSED for source in self._sources())

    def settle(self) -> None:
        """Work out what every hit led to, from steps and from the head's log."""
        # Nobody hears of a step before it has ended: so the run's clock began at most so early.
        zero_s = min(seen_s - step.ended_s for step, seen_s in self.steps)
        log = (Path(self.config.run.run_url) / "logs" / "head.log").read_text("utf-8")
        lost = [(_unix_s(at), device_id) for at, device_id, _ in _LOST.findall(log)]
        for hit in self.hits:
            for at_s, device_id in lost:
                if device_id == hit.device_id and at_s > hit.wall_s:
                    hit.detected_s = at_s - hit.wall_s
                    break
            known_s = hit.at_s + (hit.detected_s or 0.0)
            for step, _ in self.steps:
                ended_s = zero_s + step.ended_s
                if hit.detected_s is not None and ended_s - step.step_s > known_s:
                    hit.resumed_s, hit.step_s = ended_s - hit.at_s, step.step_s
                    break
        for hit, source in zip(self.hits, self._sources(), strict=False):
            hit.source = source


def _unix_s(logged: str) -> float:
    return datetime.strptime(logged, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def hit_workers(signals: Sequence[signal.Signals], rng: np.random.Generator) -> list[Hit]:
    """One run that is hit so often."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), fast=2, slow=1)
        hitter = Hitter(config, rng, signals)
        run_job(config, view=hitter)
        hitter.settle()
    return hitter.hits


def run(options: argparse.Namespace) -> Result:
    """Several runs of a few hits each: the last of every run is a SIGSTOP."""
    rng = np.random.default_rng(options.seed)
    hits: list[Hit] = []
    with ray_session(3):
        for _ in range(1 if options.quick else options.runs):
            hits += hit_workers([signal.SIGKILL] * KILLS_PER_RUN + [signal.SIGSTOP], rng)
    used = [hit for hit in hits if hit.source != UNUSED]
    killed = [hit for hit in used if hit.signal == signal.SIGKILL]
    stopped = [hit for hit in used if hit.signal == signal.SIGSTOP]

    def worst(values: Sequence[float | None]) -> float:
        return max((float("inf") if v is None else v for v in values), default=float("inf"))

    resumed_s = [worst([hit.resumed_s]) for hit in killed]
    over_s = [worst([h.resumed_s]) - (h.step_s or 0.0) for h in killed]
    figures = (
        Figure("not_recovered", sum(not hit.source for hit in hits), "1", "== 0"),
        Figure("from_replica", min("replica" in hit.source for hit in used), "1", "== 1"),
        Figure("resumed_less_a_step_max_s", max(over_s), "s", f"<= {BAR_S:g}"),
        *(
            Figure(f"resumed_p{p}_s", float(np.percentile(resumed_s, p, method="higher")), "s")
            for p in (50, 90, 100)
        ),
        Figure("killed_detected_max_s", worst([h.detected_s for h in killed]), "s", "<= 1"),
        Figure(
            "stopped_detected_max_s",
            worst([h.detected_s for h in stopped]),
            "s",
            f"<= {TIMEOUT_S:g}",
        ),
        Figure("stopped_resumed_max_s", worst([h.resumed_s for h in stopped]), "s"),
        Figure("kills", len(killed), "1"),
        Figure("stops", len(stopped), "1"),
    )
    rows = tuple(
        {
            "signal": hit.signal.name,
            "device": hit.device_id,
            "detected_s": hit.detected_s,
            "resumed_s": hit.resumed_s,
            "step_s": hit.step_s,
            "source": hit.source,
        }
        for hit in hits
    )
    return Result(figures, rows)


if __name__ == "__main__":
    main("recovery", run, (("runs", 5, "runs of 5 kills and a stop each"),))
