"""Which trouble ends a run, with which error, and the one time-out that all others follow."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from orchestrator.core.durable import ControlState
from orchestrator.core.slot import CheckpointFailed, ClusterEvent, DeviceLost, WorkerFailed
from orchestrator.errors import DeviceMemoryError, LostWorkerError, OrchestratorError, UserCodeError
from orchestrator.telemetry.trends import SIGMA_PER_MEDIAN_DEVIATION

LOST_CONTACT = "lost contact"
"""How the message of a worker begins that only saw a neighbour vanish: never the cause itself."""

PATIENCE_SIGMAS, LEAST_SIGMA_RATIO = 10.0, 0.5
"""How far from the usual step one may be, and what steps differ by at least, as a share of the
usual one: a device that becomes five times as slow is alive, and the next plan sees to it."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The ladder derived from ``failure.timeout_s``: each wait outlasts the ones it contains."""

    receive_s: float
    """A receive or a collective, and the least that a step may take longer than usual."""

    hold_s: float
    """From asking for a step boundary to standing at it."""

    checkpoint_s: float
    """Writing every layer; joining each other, which is several receives in a row; by how much a
    round of an evaluation may take longer than a step."""

    start_s: float
    """Processes, imports and the first process group; the most that a step may take longer."""

    def __post_init__(self) -> None:
        ladder = (self.receive_s, self.hold_s, self.checkpoint_s, self.start_s)
        assert ladder[0] > 0, "time-outs are positive"
        assert all(inner < outer for inner, outer in pairwise(ladder)), (
            f"time-outs must be strictly nested, not {ladder}"
        )

    def patience_s(self, recent_s: Sequence[float], predicted_s: float) -> float:
        """How long a step may take before whoever keeps the others waiting is taken for dead.

        The usual step (median of the recent ones), and on top of it many of the median deviations
        from it, but no less than a receive and no more than a start is granted. Where nothing
        was measured yet, the prediction is the usual step, and first steps are granted more.

        Args:
            recent_s: Times of the newest steps of the plan, in s.
            predicted_s: What a step of it should take, in s.
        """
        usual_s = median(recent_s) if recent_s else predicted_s
        sigma_s = LEAST_SIGMA_RATIO * usual_s
        if recent_s:
            apart_s = median(abs(step_s - usual_s) for step_s in recent_s)
            sigma_s = max(sigma_s, SIGMA_PER_MEDIAN_DEVIATION * apart_s)
        least_s = self.receive_s if recent_s else self.hold_s
        return usual_s + min(max(PATIENCE_SIGMAS * sigma_s, least_s), self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """YAML section ``failure``."""

    max_failures: int = 3
    """How often the run recovers by itself from the loss of devices in use, over all its lives;
    0: the first loss ends it, resumable; -1: without end. Devices lost at one moment count once.
    Whatever it is, five losses in a row without a new step or checkpoint in between end the run."""

    max_preemptions: int = -1
    """The same for devices that were taken away: spot devices that vanish with their node, and any
    device under notice. They never count as failures."""

    notices: str | None = None
    """File or URL that names devices about to be taken away, read every second: one JSON object of
    device to seconds left, such as {"mid-0": 30}. Ray's own notices (a node that is drained) need
    none."""

    max_checkpoint_failures: int = 3
    """Checkpoints in a row that may fail to be written, each after several tries, while training
    goes on; one more ends the run. 0: the first one does; -1: without end."""

    timeout_s: float = 60.0
    """The one time-out; every other is derived from it and ordered. A step may take longer than the
    recent ones by a quarter to twice as much, the more the longer and the less even they are."""

    def __post_init__(self) -> None:
        for name in ("max_failures", "max_preemptions", "max_checkpoint_failures"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} is {getattr(self, name)}; write -1 (no limit), 0 or more")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")

    @property
    def timeouts(self) -> Timeouts:
        """The ladder of time-outs."""
        whole = self.timeout_s
        return Timeouts(
            receive_s=whole / 4, hold_s=whole / 2, checkpoint_s=whole, start_s=2 * whole
        )


def unbilled_s(
    state: ControlState | None, now_unix_s: float, *, slot_s: float, at_once: bool
) -> float:
    """For how long the plan of a head that died was held after the last slot it wrote down.

    Args:
        state: What it left, None before the first slot.
        now_unix_s: Wall time.
        slot_s: Length of a slot: at its end there would have been another state.
        at_once: Whether this process takes its place at once, so that the devices are held all
            the time; else they went with it at a moment that nobody knows.
    """
    if state is None or state.saved_unix_s is None:
        return 0.0
    since_s = max(0.0, now_unix_s - state.saved_unix_s)
    return since_s if at_once else min(since_s, slot_s)


def judge(
    events: Sequence[ClusterEvent],
    *,
    in_use: Collection[str],
    survives: bool = False,
    checkpoint_step: int | None,
    predicted_bytes: Mapping[str, int] | None = None,
) -> None:
    """Pass over what the run survives and raise what ends it, the cause before its consequences.

    An error in the user's code always ends the run: repeating it would only cost money. A
    device that nobody uses may leave.

    Args:
        events: What the slot brought, in order.
        in_use: Devices of the running plan.
        survives: Whether the run goes on without a device that it used.
        checkpoint_step: Step that a resumed run goes on with, None without a checkpoint.
        predicted_bytes: What the running plan was to take of each device's memory.

    Raises:
        DeviceMemoryError: If a device ran out of memory; says what was predicted.
        UserCodeError: If the user's code raised; carries the user's own frames.
        OrchestratorError: If too many checkpoints in a row could not be written.
        LostWorkerError: If a device in use is gone; names it and says how to resume.
    """
    failed = [event for event in events if isinstance(event, WorkerFailed)]
    for event in failed:
        if event.user_traceback:
            raise UserCodeError(
                f"your code raised on device {event.device_id} at step {event.step}: "
                f"{event.message.removeprefix(f'step {event.step}: ')}",
                event.user_traceback,
            )
        if event.out_of_memory:
            raise DeviceMemoryError(_memory_text(event, predicted_bytes or {}))
    if survives:
        failed = []
    lost = [
        e for e in events if isinstance(e, DeviceLost) and e.device_id in in_use and not survives
    ]
    resume = resume_text(checkpoint_step)
    _judge_checkpoints(events, resume)
    causes = [
        *((e.device_id, f"is gone: {e.reason}") for e in lost),
        *(
            (e.device_id, f"failed at step {e.step}: {e.message}")
            for e in failed
            if is_cause(e.message)
        ),
        *((e.device_id, f"stopped: {e.message}") for e in failed if not is_cause(e.message)),
    ]
    if not causes:
        return
    device_id, what = causes[0]
    others = len({d for d, _ in causes} - {device_id})
    also = f" ({others} other worker{'s' * (others > 1)} stopped with it)" if others else ""
    raise LostWorkerError(f"device {device_id} {what}{also}; {resume}")


def _memory_text(event: WorkerFailed, predicted_bytes: Mapping[str, int]) -> str:
    peak = predicted_bytes.get(event.device_id)
    said = f"; {peak / 2**30:.3g} GiB were predicted for it" if peak else ""
    what = event.message.removeprefix(f"step {event.step}: ")
    return (
        f"device {event.device_id} ran out of memory at step {event.step}: {what}{said}; "
        "write a smaller training.microbatch, give the pool a smaller memory_gib in "
        "cluster.offers, or add devices; the same command goes on from the newest checkpoint"
    )


def _judge_checkpoints(events: Sequence[ClusterEvent], resume: str) -> None:
    for event in events:
        if isinstance(event, CheckpointFailed) and event.ends_run:
            raise OrchestratorError(
                f"the checkpoint of step {event.step} could not be written, and too many before "
                f"it: {event.reason}; when that is mended, {resume}"
            )


def resume_text(checkpoint_step: int | None) -> str:
    """What the same command would do, given the step of the newest checkpoint, if any."""
    if checkpoint_step is None:
        return "no checkpoint was written yet, so the same command starts anew"
    return f"the same command resumes at step {checkpoint_step}"


def is_cause(message: str) -> bool:
    """Whether a loss or a failure is told by whom it happened to, and not by a neighbour."""
    return not message.startswith(LOST_CONTACT)
