"""What workers have done and held: whole steps and checkpoints, time; how far they may go."""

import math
import sys
import time
from collections import deque
from collections.abc import Iterable

from orchestrator.core.durable import CheckpointFile, CheckpointPart
from orchestrator.core.slot import StepReport, Usage
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.telemetry.trends import WINDOW_STEPS


class Progress:
    """Gathers what single workers report until all workers of the plan have said the same.

    A step counts once every device of its plan has reported it: what goes to the loop never
    holds half a step, however the reports of unlike devices arrive.
    """

    def __init__(self, next_step: int, evaluations: Evaluations | None = None) -> None:
        """``evaluations``: of the run, where there are any."""
        self.next_step = next_step
        self.evaluations = evaluations or Evaluations()
        self._devices: frozenset[str] = frozenset()
        self._generation = -1
        self._reports: dict[int, dict[str, StepReport]] = {}
        self.recent_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Real times of the newest whole steps of the plan."""

        self._whole: list[StepReport] = []
        self._fresh: list[tuple[StepReport, ...]] = []
        self._files: dict[tuple[int, int], dict[int, CheckpointFile]] = {}  # by layer
        self._write_s: dict[tuple[int, int], float] = {}
        self._unwritten: dict[tuple[int, int], str] = {}  # these three by generation and step
        self._last_checkpoint = (-1, -1)  # that is whole, or was given up

    @property
    def owes_evaluation(self) -> bool:
        """Whether something of an evaluation comes before the next step."""
        return self.evaluations.owes(self.next_step)

    def expect(self, device_ids: Iterable[str], generation: int) -> None:
        """From now on the steps of these devices, under this generation, count."""
        self._devices, self._generation = frozenset(device_ids), generation
        self.evaluations.expect(self._devices, generation)
        self._reports.clear()
        self.recent_s.clear()
        # After a rewind the same plan may go on: its checkpoints from here on count again.
        self._last_checkpoint = min(self._last_checkpoint, (generation, self.next_step))

    def report(self, report: StepReport) -> None:
        """Take in one device's report of one step; one of another generation is dropped."""
        if report.generation == self._generation and report.step >= self.next_step:
            self._reports.setdefault(report.step, {})[report.device_id] = report
        while len(found := self._reports.get(self.next_step, {})) == len(self._devices) and found:
            reports = tuple(found[device_id] for device_id in sorted(found))
            self._whole += reports
            self._fresh.append(reports)
            self.recent_s.append(max(max(r.step_s, r.wall_step_s) for r in reports))
            del self._reports[self.next_step]
            self.next_step += 1

    def settle(self, next_step: int) -> None:
        """Count every step before ``next_step``: all who are left have applied them.

        What a lost device did not report any more is missing from them.
        """
        while self.next_step < next_step:
            found = self._reports.pop(self.next_step, {})
            assert found, f"somebody applied step {self.next_step}, and whoever does reports it"
            reports = tuple(found[device_id] for device_id in sorted(found))
            self._whole += reports
            self._fresh.append(reports)
            self.next_step += 1

    def rewind(self, next_step: int) -> None:
        """Go on with ``next_step``: later steps, and checkpoints under way, are undone."""
        self.next_step = next_step
        self.evaluations.rewind(next_step)
        self._reports.clear()
        self._files.clear()
        self._write_s.clear()
        self._last_checkpoint = (self._generation, sys.maxsize)  # a late part must not count

    def take(self) -> tuple[StepReport, ...]:
        """Reports of the steps completed since the last call, in order of step and device."""
        taken, self._whole = tuple(self._whole), []
        return taken

    def fresh(self) -> tuple[tuple[StepReport, ...], ...]:
        """Steps completed since the last call, each with its devices' reports."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def part(self, part: CheckpointPart) -> None:
        """Take in what one device wrote of a checkpoint; the plan may have changed since."""
        key = (part.generation, part.step)
        if key <= self._last_checkpoint:
            return
        if part.problem:
            self._unwritten.setdefault(key, part.problem)
        self._files.setdefault(key, {}).update({file.layer: file for file in part.files})
        self._write_s[key] = max(self._write_s.get(key, 0.0), part.write_s)

    def whole_checkpoints(self, num_layers: int) -> tuple[CheckpointPart, ...]:
        """Checkpoints with every layer, and whose steps are committed, as one part; once each."""
        keys = sorted(
            (generation, step)
            for (generation, step), files in self._files.items()
            if step <= self.next_step and len(files) == num_layers
        )
        found = []
        for key in keys:
            files = tuple(file for _, file in sorted(self._files[key].items()))
            found.append(CheckpointPart(key[1], key[0], files, write_s=self._write_s[key]))
            self._last_checkpoint = key
        self._files = {k: files for k, files in self._files.items() if k > self._last_checkpoint}
        self._write_s = {k: self._write_s[k] for k in self._files}
        return tuple(found)

    def unwritten_checkpoints(self) -> tuple[tuple[int, str], ...]:
        """(step, why) of checkpoints that some device could not write since the last call."""
        found = tuple((step, problem) for (_, step), problem in sorted(self._unwritten.items()))
        for key in self._unwritten:
            self._last_checkpoint = max(self._last_checkpoint, key)  # no more of it
        self._unwritten = {}
        return found


class RunClock:
    """Seconds since the run started, over all its lives; it stands until the first decision."""

    def __init__(self, since_s: float = 0.0) -> None:
        """``since_s``: what lives in earlier processes have used."""
        self._since_s = since_s
        self._started_s: float | None = None

    def start(self) -> None:
        """Run from now on; nothing happens when it does already."""
        if self._started_s is None:
            self._started_s = time.monotonic()

    def now_s(self) -> float:
        """What it shows."""
        if self._started_s is None:
            return self._since_s
        return self._since_s + time.monotonic() - self._started_s


class Meter:
    """Which devices are held for the plan, and the stretches of the run's clock they were."""

    def __init__(self, clock: RunClock, usage: Iterable[Usage] = ()) -> None:
        """``usage``: what was held before the clock went on."""
        self.clock = clock
        self._since_s: dict[str, float] = {}
        self._usage = list(usage)

    @property
    def held(self) -> frozenset[str]:
        """Devices held now."""
        return frozenset(self._since_s)

    def hold(self, device_ids: Iterable[str], now_s: float) -> None:
        """From ``now_s`` on hold exactly these devices."""
        wanted = set(device_ids)
        for device_id in set(self._since_s) - wanted:
            self.release(device_id, now_s)
        for device_id in wanted - set(self._since_s):
            self._since_s[device_id] = now_s

    def release(self, device_id: str, now_s: float) -> None:
        """One device is no longer held; nothing happens when it was not."""
        from_s = self._since_s.pop(device_id, None)
        if from_s is not None and now_s > from_s:
            self._usage.append(Usage(device_id, from_s, now_s))

    def cut(self, now_s: float) -> tuple[Usage, ...]:
        """What was held since the last cut; what is still held goes on from ``now_s``."""
        held = self.held
        self.hold((), now_s)
        self.hold(held, now_s)
        usage, self._usage = tuple(sorted(self._usage, key=lambda u: (u.from_s, u.device_id))), []
        return usage


def window_steps(slot_s: float, step_s: float) -> int:
    """Steps that workers may run without hearing from the head: two slots' worth, at least 4.

    Long enough that a kept plan never pauses at the end of a slot, short enough that workers
    whose head has stopped thinking do not run on.
    """
    return max(4, math.ceil(2.0 * slot_s / step_s)) if step_s > 0 else 4
