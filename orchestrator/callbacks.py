"""What a user's own code hears of a run: callbacks, how they end it, and the TensorBoard writer."""

import logging
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

from orchestrator.core.evaluation import LOSS, Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord
from orchestrator.errors import ConfigError, UserCodeError
from orchestrator.reports.live import View

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)


class Wish(Enum):
    """What a callback may return."""

    STOP = "stop"


STOP = Wish.STOP
"""Returned by a callback: the run ends at the next step boundary, with a checkpoint, finished."""


class Callback:
    """Hears of a run, in the process that started it; any object with some of its methods will do.

    Each may return ``STOP``. One that raises is the user's error: the run stops with a
    checkpoint, can be resumed, and the error is told. After the loss of devices, steps that are
    run again are told of again.
    """

    def on_step(self, step: CommittedStep) -> Wish | None:
        """A step was committed."""

    def on_slot(self, record: SlotRecord) -> Wish | None:
        """A slot ended."""

    def on_event(self, event: RunEvent) -> Wish | None:
        """Something happened."""

    def on_evaluation(self, evaluation: Evaluation) -> Wish | None:
        """The model was evaluated."""

    def close(self) -> None:
        """The run has ended, however that was."""


def only(method: str, function: Callable[..., object]) -> object:
    """A callback with this one method."""
    return SimpleNamespace(**{method: function, "__name__": _name(function)})


class Callbacks:
    """Callbacks as a View, beside another one; what they wish, they tell the head."""

    def __init__(self, callbacks: Sequence[object], view: View | None = None) -> None:
        """``view``: told everything first."""
        self._callbacks, self._view = tuple(callbacks), view
        self._wish: tuple[Literal["finish", "stop"], str] | None = None
        self._head: dict[str, Callable[[str], object]] = {}
        self.error: UserCodeError | None = None
        """What a callback raised; none is called any more from then on."""

    def end_with(
        self, finish: Callable[[str], object] | None, stop: Callable[[str], object] | None
    ) -> None:
        """Whom to tell of a wish, with its reason, also of one that has been uttered already."""
        self._head = {"finish": finish, "stop": stop} if finish and stop else {}
        self._utter()

    def phase(self, text: str) -> None:
        """No callback hears of it."""
        if self._view is not None:
            self._view.phase(text)

    def step(self, step: CommittedStep) -> None:
        """A step was committed."""
        if self._view is not None:
            self._view.step(step)
        self._call("on_step", step, f"at step {step.step}")

    def slot(self, record: SlotRecord) -> None:
        """A slot ended."""
        if self._view is not None:
            self._view.slot(record)
        self._call("on_slot", record, f"at slot {record.slot}")

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        if self._view is not None:
            self._view.event(event)
        self._call("on_event", event, f"at the event {event.kind}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """The model was evaluated."""
        if self._view is not None:
            self._view.evaluation(evaluation)
        self._call("on_evaluation", evaluation, f"at the evaluation of step {evaluation.step}")

    def close(self) -> None:
        """Nothing more will come."""
        if self._view is not None:
            self._view.close()
        for callback in self._callbacks:
            self._ask(callback, "close", (), "at the end")
        self._callbacks = ()

    def _call(self, method: str, what: object, when: str) -> None:
        for callback in self._callbacks:
            if self._ask(callback, method, (what,), when) is STOP and self._wish is None:
                self._wish = "finish", f"stopped early: {_name(callback)} returned STOP {when}"
                self._utter()

    def _ask(self, callback: object, method: str, args: tuple[object, ...], when: str) -> object:
        function = getattr(callback, method, None)
        if function is None or (self.error is not None and method != "close"):
            return None
        try:
            return function(*args)
        except Exception as error:
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            shown = "".join(traceback.format_exception(error.with_traceback(frames)))
            name = f"{_name(callback)}.{method}"
            message = f"the callback {name} raised {type(error).__name__}: {error} ({when})"
            self.error = self.error or UserCodeError(message, shown)
            self._wish = "stop", message
            self._utter()
            return None

    def _utter(self) -> None:
        if self._wish is not None and self._head:
            how, reason = self._wish
            self._head[how](reason)


def _name(callback: object) -> str:
    return getattr(callback, "__name__", None) or type(callback).__name__


class TensorBoardWriter(Callback):
    """Writes what happens as scalars for TensorBoard; the horizontal axis counts steps.

    Steps: ``train/loss``, ``train/grad_norm``, ``train/learning_rate``, ``train/step_seconds``.
    Slots: ``run/samples_per_second``, ``run/cost_usd_per_hour``, ``run/spent_usd``. Evaluations:
    ``eval/loss`` and ``eval/NAME`` of each metric. What a step wrote that is run again vanishes.
    """

    def __init__(self, log_dir: str) -> None:
        """Write into a local folder, which need not exist.

        Raises:
            ConfigError: If it is no local folder, or the package tensorboard is missing.
        """
        if "://" in log_dir:
            raise ConfigError(
                f"TensorBoard files cannot be written to {log_dir}; leave metrics.tensorboard out, "
                "and give Trainer callbacks=[TensorBoardWriter(FOLDER)] with a local folder"
            )
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorBoard files need the package tensorboard, which is not installed; "
                "pip install lyray[tensorboard]"
            )
        self._log_dir = log_dir
        self._writer: SummaryWriter | None = None
        self._next_step = 0
        self._is_broken = False

    def on_step(self, step: CommittedStep) -> None:
        """Loss, norm, rate and time."""
        if step.step < self._next_step:
            self.close()  # a new file says that all from here on is undone
        self._next_step = step.step + 1
        self._add(
            step.step,
            {
                "train/loss": step.loss,
                "train/grad_norm": step.grad_norm,
                "train/learning_rate": step.lr,
                "train/step_seconds": step.step_s,
            },
        )

    def on_slot(self, record: SlotRecord) -> None:
        """Speed and money."""
        self._add(
            record.step,
            {
                "run/samples_per_second": record.measured.samples_per_s,
                "run/cost_usd_per_hour": record.measured.cost_per_hour_usd,
                "run/spent_usd": record.spent_usd,
            },
        )
        if self._writer is not None and not self._is_broken:
            self._writer.flush()

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Loss and metrics."""
        values = {LOSS: evaluation.loss, **evaluation.metrics}
        self._add(evaluation.step, {f"eval/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Let all of it be in the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, values: dict[str, float | None]) -> None:
        """Write; a disk that is full ends the pictures, not the training."""
        if self._is_broken:
            return
        try:
            writer = self._writer = self._writer or self._open(step)
            for name, value in values.items():
                if value is not None:
                    writer.add_scalar(name, value, step)
        except OSError as error:
            logger.warning("%s: nothing more is written for TensorBoard: %s", self._log_dir, error)
            self._is_broken = True

    def _open(self, step: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - it loads torch

        return SummaryWriter(self._log_dir, purge_step=step)
