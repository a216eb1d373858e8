"""Emulated devices: real work is done at once, then the worker waits as the device would."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.core.schedule import FORWARD
from workers.clock import StepTimes

LATE_TOLERANCE_S = 0.001
"""Real work that ends this little after its virtual end is on time: sleeping is no more exact."""


@dataclass(frozen=True, slots=True)
class Delay:
    """From ``first_step`` on and before ``end_step`` the device takes so much longer."""

    first_step: int
    end_step: float
    phase: str
    """Reading a step's samples (``loader``), or each ``forward`` or ``backward``."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class EmulatedStage:
    """What one stage takes on one emulated device, in s of the run; links as (latency, bytes/s)."""

    seconds: Mapping[int, tuple[float, float]]
    """Samples of a microbatch to (forward_s, backward_s) at the device's normal speed."""

    to_next: tuple[float, float] | None = None
    to_previous: tuple[float, float] | None = None
    step_end_s: float = 0.0
    """Gradient sums, vote and update, after the last group."""

    slowdowns: tuple[tuple[int, float], ...] = ()
    """(step, factor) ascending: from that step on the device is that much slower than normal."""

    delays: tuple[Delay, ...] = ()
    narrow_next: tuple[tuple[int, float, float], ...] = ()
    """(first step, end step, share of its bandwidth) of the link to the next stage."""

    narrow_previous: tuple[tuple[int, float, float], ...] = ()

    def __post_init__(self) -> None:
        durations = [d for pair in self.seconds.values() for d in pair]
        if not durations or any(not (d >= 0 and math.isfinite(d)) for d in durations):
            raise ValueError(
                f"emulated durations are {dict(self.seconds)}; each must be finite and >= 0"
            )
        for link in (self.to_next, self.to_previous):
            if link is not None and not (link[0] >= 0 and link[1] > 0):
                raise ValueError(
                    f"emulated link {link} needs a latency >= 0 and a positive bandwidth"
                )
        if list(self.slowdowns) != sorted(self.slowdowns) or any(f <= 0 for _, f in self.slowdowns):
            raise ValueError(
                f"slowdowns are {self.slowdowns}; steps must ascend and factors be positive"
            )

    def slowdown(self, step: int) -> float:
        """Times a duration's normal length in ``step``."""
        return next((factor for at, factor in reversed(self.slowdowns) if at <= step), 1.0)

    def bandwidth_ratio(self, step: int, op: str) -> float:
        """How much of its bandwidth the link has in ``step`` that carries results of ``op``."""
        narrowings = self.narrow_next if op == FORWARD else self.narrow_previous
        return math.prod(ratio for first, end, ratio in narrowings if first <= step < end)

    def delay_s(self, step: int, phase: str) -> float:
        """What a phase takes longer in ``step``, on top of that."""
        return sum(
            delay.delay_s
            for delay in self.delays
            if delay.phase == phase and delay.first_step <= step < delay.end_step
        )


class VirtualClock:
    """The clock of an emulated device (a ``Clock`` of the executor).

    Every time is one of ``time.monotonic``, which all processes of a machine share, so what
    a message carries as its virtual arrival means the same to sender and receiver. An
    operation starts virtually when the device is free and its input has arrived; it ends a
    known duration later, and the process sleeps until then. Only the end of work that took
    longer than that is late: it is counted, and virtual time goes on unmoved.

    Source: docs/model.md, section 3 (the same recursion as the event evaluation).
    """

    def __init__(
        self,
        stage: EmulatedStage,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stage = stage
        self._now, self._sleep = now, sleep
        self._slowdown, self._step = 1.0, 0
        self._forward_delay_s = self._backward_delay_s = 0.0
        self._free_s = 0.0  # when the device is free, virtually
        self._link_free_s: dict[str, float] = {}  # by the operation whose results it carries
        self.times = StepTimes()

    def begin_step(self, step: int, at_s: float) -> None:
        """Start a step, whose first instruction may start at ``at_s``."""
        self._slowdown, self._step = self._stage.slowdown(step), step
        self._forward_delay_s = self._stage.delay_s(step, "forward")
        self._backward_delay_s = self._stage.delay_s(step, "backward")
        loading_s = self._stage.delay_s(step, "loader")
        self._free_s = at_s + loading_s
        self.times = StepTimes(data_s=loading_s, end_s=self._free_s)

    def start(self, op: str, microbatch_samples: int, arrival_s: float) -> None:
        """Start an instruction whose input arrives at ``arrival_s`` (0: nothing to wait for).

        Raises:
            ValueError: If no duration is known for that many samples.
        """
        if microbatch_samples not in self._stage.seconds:
            raise ValueError(
                f"no emulated duration for a microbatch of {microbatch_samples} samples; "
                f"known sizes: {sorted(self._stage.seconds)}"
            )
        forward_s, backward_s = self._stage.seconds[microbatch_samples]
        if op == FORWARD:
            duration_s = self._slowdown * forward_s + self._forward_delay_s
        else:
            duration_s = self._slowdown * backward_s + self._backward_delay_s
        ready_s = max(self._free_s, arrival_s)
        self.times.receive_s += ready_s - self._free_s
        self.times.compute_s += duration_s
        self._free_s = ready_s + duration_s

    def finish(self) -> None:
        """End the instruction: wait for the virtual end, or count that it has passed."""
        self._wait_until(self._free_s)
        self.times.end_s = self._free_s

    def end_work(self, waited_s: float) -> float:
        """Every instruction was waited for when it ended."""
        return 1.0

    def depart(self, op: str, size_bytes: int) -> float:
        """When a result sent now arrives at its neighbour; results of one direction queue up."""
        link = self._stage.to_next if op == FORWARD else self._stage.to_previous
        assert link is not None, "only a stage with a neighbour there sends"
        latency_s, bandwidth_bytes_per_s = link
        begin_s = max(self._link_free_s.get(op, 0.0), self._free_s)
        busy_s = size_bytes / (bandwidth_bytes_per_s * self._stage.bandwidth_ratio(self._step, op))
        self._link_free_s[op] = begin_s + busy_s
        self.times.sent.append((op, size_bytes, busy_s))
        return self._link_free_s[op] + latency_s

    def end_step(self, last_end_s: float) -> float:
        """When the step ends, given the latest virtual end of all workers; waits until then.

        Everybody computes the same time, which is where the next step begins.
        """
        self._free_s = last_end_s + self._stage.step_end_s
        self._wait_until(self._free_s)
        return self._free_s

    def _wait_until(self, end_s: float) -> None:
        slack_s = end_s - self._now()
        self.times.num_operations += 1
        if slack_s > 0:
            self._sleep(slack_s)
        elif slack_s < -LATE_TOLERANCE_S:
            self.times.num_late += 1
