"""Of many workers' errors, the cause: who failed or vanished first, and who only lost contact."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.control.recovery import LOST_CONTACT
from orchestrator.core.slot import ClusterEvent, DeviceLost, WorkerFailed

SYMPTOMS = (LOST_CONTACT, "TimeoutError")
"""How the messages begin of a worker that only noticed another's end, or silence."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker whose process is gone, or was ended because it no longer answered."""

    device_id: str
    reason: str


class Trouble:
    """What went wrong since the last ``take``.

    One dead worker makes its neighbours fail within a tenth of a second, often before Ray
    knows of the death: the first report is rarely the cause.
    """

    def __init__(self) -> None:
        self._failures: list[WorkerFailed] = []
        self._losses: list[Loss] = []

    def __bool__(self) -> bool:
        return bool(self._failures or self._losses)

    def failed(self, failure: WorkerFailed) -> None:
        """A worker reported an error."""
        self._failures.append(failure)

    def lost(self, loss: Loss) -> None:
        """A worker is gone."""
        self._losses.append(loss)

    def cause_is_known(self, still_running: Iterable[str]) -> bool:
        """Whether waiting longer can tell nothing new: a loss, an own error, or nobody is left."""
        return (
            bool(self._losses)
            or any(_is_own(failure) for failure in self._failures)
            or not set(still_running)
        )

    def take(self, step: int) -> tuple[ClusterEvent, ...]:
        """The events, causes first: errors that would recur, losses, own errors, lost contacts.

        Args:
            step: First step not known to be done, to name in the reason of a loss.
        """
        failures = sorted(self._failures, key=lambda f: (not f.would_recur, not _is_own(f)))
        step = max([step, *(failure.step for failure in failures)])
        losses = [DeviceLost(x.device_id, f"{x.reason} (step {step})") for x in self._losses]
        num_first = sum(failure.would_recur for failure in failures)
        self._failures, self._losses = [], []
        return (*failures[:num_first], *losses, *failures[num_first:])


def _is_own(failure: WorkerFailed) -> bool:
    return failure.would_recur or not failure.message.startswith(SYMPTOMS)
