"""Whether a run still gets on, through losses and steps that change nothing: else it is ended."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from orchestrator.control.recovery import is_cause, resume_text
from orchestrator.core.slot import (
    CommittedStep,
    DeviceLost,
    Observation,
    Recovered,
    WorkerFailed,
)
from orchestrator.errors import LostWorkerError, UserCodeError

MOST_IN_VAIN = 5
"""So many failures in a row without a step or a checkpoint that is new end the run: what goes
wrong is in what it does, and no other device would do better."""

MOST_SKIPPED = 50
"""So many steps in a row that change nothing end the run: fp16 has come down to the least loss
scale by then, and without it weights that stay as they are go on giving the same."""


@dataclass(slots=True)
class Headway:
    """How far a run has come, and how often it failed since.

    What is run again after a fault is nothing new, and neither is what only other devices do.
    Devices that are taken away, and nodes that are out of reach, say nothing about the step.
    """

    _reached: int = -1
    _checkpoint_step: int = -1
    _num_failures: int = 0
    _changed_step: int | None = None  # the newest that changed something; None: not known yet

    def look(self, observation: Observation, in_use: Collection[str]) -> None:
        """Count what a slot brought; for a run that would survive it.

        Args:
            observation: Of the slot.
            in_use: Devices of its plan.

        Raises:
            LostWorkerError: If the run has failed so often without getting on.
        """
        if (cause := _cause(observation, in_use)) is None:
            return
        undone = [e for e in observation.events if isinstance(e, Recovered)]
        reached = max([observation.next_step, *(e.next_step + e.num_undone for e in undone)])
        saved = observation.checkpoint_step
        saved_step = -1 if saved is None else saved
        if reached > self._reached or saved_step > self._checkpoint_step:
            self._num_failures = 0
        self._reached = max(self._reached, reached)
        self._checkpoint_step = max(self._checkpoint_step, saved_step)
        self._num_failures += 1
        if self._num_failures >= MOST_IN_VAIN:
            raise LostWorkerError(
                f"the run failed {self._num_failures} times in a row without coming further than "
                f"step {self._reached}; the last time {cause}; mend what happens there: "
                f"{resume_text(saved)}"
            )

    def learn(self, steps: Iterable[CommittedStep]) -> None:
        """Count committed steps that changed nothing, those that are run again only once.

        Raises:
            UserCodeError: If there were too many of them in a row.
        """
        for step in steps:
            if not step.skipped:
                self._changed_step = step.step
                continue
            if self._changed_step is None:
                self._changed_step = step.step - 1
            num_skipped = step.step - self._changed_step
            if num_skipped >= MOST_SKIPPED:
                raise UserCodeError(_skipped_text(step, num_skipped))


def _skipped_text(last: CommittedStep, num_skipped: int) -> str:
    where = ""
    mend = (
        "look for what divides by zero or takes the logarithm of it, for samples that are not "
        "finite or that the loss gives no weight; a lower lr or training.clip_grad_norm keeps "
        "weights from growing so large"
    )
    if last.loss_scale != 1.0:
        where = f" at a loss scale of {last.loss_scale:g}"
        mend = (
            "this is too large for fp16: write training.precision: bf16 or fp32; where that "
            f"happens in fp32, too, {mend}"
        )
    return (
        f"the last {num_skipped} steps up to step {last.step} changed nothing: the gradient was "
        f"not finite in any of them{where}; {mend}"
    )


def _cause(observation: Observation, in_use: Collection[str]) -> str | None:
    """What failed by itself, in words; None: nothing did."""
    for event in observation.events:
        if isinstance(event, DeviceLost) and event.device_id in in_use and not event.preempted:
            if is_cause(event.reason):
                return f"device {event.device_id} was lost: {event.reason}"
        elif isinstance(event, WorkerFailed) and is_cause(event.message):
            return f"device {event.device_id} failed: {event.message}"
    return None
