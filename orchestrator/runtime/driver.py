"""The job process: starts Ray and the head, passes on what happens, and stops when told to."""

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator import storage
from orchestrator.callbacks import Callbacks, TensorBoardWriter, only
from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, Outcome, RunEvent, SlotRecord
from orchestrator.core.training import TASK_IS_IMPORTED, Task
from orchestrator.errors import ConfigError, OrchestratorError, as_told
from orchestrator.price_sources import check_token
from orchestrator.reports.live import View
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.runtime.folder import alone_in, open_folder
from orchestrator.runtime.life import HeadDiedError, live
from orchestrator.runtime.news import Comparing
from orchestrator.runtime.provisioner import asking
from orchestrator.runtime.result import result_ending, result_figures
from orchestrator.runtime.session import ray_session
from orchestrator.runtime.signals import StopSignals, stay
from orchestrator.telemetry.discovery import withdraw

logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
"""Folder of a run's TensorBoard files."""


def run_job(
    config: RunConfig,
    *,
    resume: str = "auto",
    view: View | None = None,
    comparing: Comparing | None = None,
) -> Outcome:
    """Train: the whole of ``lyray run``. Nothing it started is left when it returns or raises.

    Args:
        config: The whole file.
        resume: ``auto``, ``never``, or the path of a checkpoint or run to start from.
        view: Told what happens, on this thread.
        comparing: Strategies to measure before the first step.

    Returns:
        How it ended. SIGINT and SIGTERM end it after a checkpoint, with status ``stopped``.

    Raises:
        OrchestratorError: What went wrong; an error in the user's code is a UserCodeError.
    """
    check_token(config.cluster.price_feed)
    with alone_in(config.run.run_url):
        done = open_folder(config, resume)
        try:
            return done or _run_on_record(config, view, comparing)
        finally:
            withdraw(config.run.run_url)


def _run_on_record(config: RunConfig, view: View | None, comparing: Comparing | None) -> Outcome:
    """Run, and see to it that ``result.json`` says how it ended where no head has written it."""
    try:
        outcome = _run_alone(config, view, comparing)
    except (OrchestratorError, OSError) as error:
        told = as_told(error)
        _record_end(config, told.status, str(told))
        if told is error:
            raise
        raise told from error
    _record_end(config, outcome.status, outcome.reason)
    return outcome


def _record_end(config: RunConfig, status: str, reason: str) -> None:
    store = RunStore(config.run.run_url)
    try:
        if store.read_result() is None:
            state = store.load_state(config.emulation.billing_speedup)
            how = result_ending(store.run_url, status, reason, resumable=True)
            store.write_result({**how, **result_figures(state, None, None, Evaluations())})
    except (OrchestratorError, OSError) as error:  # the end itself is what must be told
        logger.warning("result.json could not be written: %s", error)


def _run_alone(config: RunConfig, view: View | None, comparing: Comparing | None) -> Outcome:
    signals = StopSignals()
    num_devices = sum(offer.count for offer in config.cluster.offers)
    try:
        with signals.caught(), ray_session(num_devices):
            signals.catch()  # again: ray.init has put a handler of its own in place for SIGTERM
            with asking(config.cluster.autoscaler):
                return _run_head(config, view, comparing, signals)
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        stay()
        # Ray's own handler, while ray.init was under way.
        reason = f"stopped by {signal.SIGTERM.name} before the first step"
        return Outcome("stopped", reason, resumable=True)


def exit_code(outcome: Outcome) -> int:
    """Exit status of a command that ends with this outcome."""
    if outcome.status == "stopped":
        number = signal.SIGTERM if signal.SIGTERM.name in outcome.reason else signal.SIGINT
        return 128 + number
    return {"finished": 0, "budget": 3}[outcome.status]


@dataclass(frozen=True, slots=True)
class Result:
    """What ``Trainer.fit`` returns."""

    metrics: Mapping[str, object]
    """What ``result.json`` says."""

    checkpoint: str | None
    """Folder of the newest checkpoint."""

    best_checkpoint: str | None
    """Folder of that of the best evaluation, where ``training.keep_best`` keeps it."""

    error: OrchestratorError | None
    """What ended the run before its time."""

    path: str
    """Folder of the run."""


class Trainer:
    """Trains from a script: ``Trainer(task, RunConfig.load("config.yaml")).fit()``."""

    def __init__(  # noqa: PLR0913 - one function each
        self,
        task: Callable[..., Task] | None,
        config: RunConfig,
        *,
        on_step: Callable[[CommittedStep], object] | None = None,
        on_slot: Callable[[SlotRecord], object] | None = None,
        on_event: Callable[[RunEvent], object] | None = None,
        on_evaluation: Callable[[Evaluation], object] | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        """Take note of what to train.

        Args:
            task: A function of a module, which returns the Task; None: ``training.task``.
            config: The whole file.
            on_step: Called with every committed step.
            on_slot: Called with every slot's record.
            on_event: Called with every event.
            on_evaluation: Called with every evaluation.
            callbacks: Objects with some of the methods of ``orchestrator.Callback``.

        Any of them may return ``orchestrator.STOP``.

        Raises:
            ConfigError: If workers could not import the task.
        """
        if task is not None:
            training = replace(config.training, task=import_path(task))
            config = config.model_copy(update={"training": training})
        self._config = config
        functions = {
            "on_step": on_step,
            "on_slot": on_slot,
            "on_event": on_event,
            "on_evaluation": on_evaluation,
        }
        given = (only(name, function) for name, function in functions.items() if function)
        self._callbacks = (*given, *callbacks)

    def fit(self, resume: str = "auto") -> Result:
        """Run to the end and say how it went; errors of the run are in the result.

        Raises:
            ConfigError: If there is nothing to run as the file stands.
        """
        return self._fit(resume, None)

    def compare(self, *strategies: str) -> Result:
        """Measure plans of these strategies beside joint's in short runs, then train.

        What they gave is in ``compare.json`` of the run's folder.
        """
        return self._fit("auto", Comparing(strategies))

    def _fit(self, resume: str, comparing: Comparing | None) -> Result:
        if TASK_IS_IMPORTED.get():
            raise ConfigError(
                "the module of the task starts a training while it is imported, as every worker "
                'does; write if __name__ == "__main__": over what starts it'
            )
        run_url, view = self._config.run.run_url, with_callbacks(self._config, self._callbacks)
        error: OrchestratorError | None = None
        try:
            run_job(self._config, resume=resume, view=view, comparing=comparing)
        except ConfigError:
            raise
        except (OrchestratorError, OSError) as found:
            error = as_told(found)
            if isinstance(error, ConfigError):
                raise error from found
        finally:
            view.close()
        checkpoints = CheckpointStore(run_url)
        steps, best = checkpoints.steps(), RunStore(run_url).best_step()
        return Result(
            metrics=RunStore(run_url).read_result() or {},
            checkpoint=checkpoints.url(steps[-1]) if steps else None,
            best_checkpoint=checkpoints.url(best) if best in steps and best is not None else None,
            error=error or view.error,
            path=run_url,
        )


def with_callbacks(
    config: RunConfig, callbacks: Sequence[object], view: View | None = None
) -> Callbacks:
    """A view that tells callbacks as well, and TensorBoard where the file wants it.

    Raises:
        ConfigError: If the package tensorboard is wanted and missing.
    """
    if config.metrics.tensorboard:
        folder = storage.join(config.run.run_url, TENSORBOARD)
        callbacks = (TensorBoardWriter(folder), *callbacks)
    return Callbacks(callbacks, view)


def import_path(task: Callable[..., Task]) -> str:
    """``module:function`` under which workers find a function.

    Raises:
        ConfigError: If it is no function of a module, or its module cannot be imported from
            the working directory.
    """
    name = task.__qualname__
    if "." in name or "<" in name:
        raise ConfigError(
            f"the task {name} lies inside another function or class, where workers cannot "
            "import it from; define it at the top of a module"
        )
    if task.__module__ != "__main__":
        return f"{task.__module__}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or Path(file).resolve().parent != Path.cwd():
        raise ConfigError(
            f"the task {name} is defined in the main program ({file}), "
            "which workers cannot import; "
            "move it to a module, or start the script from its own folder"
        )
    return f"{Path(file).stem}:{name}"


def _run_head(
    config: RunConfig, view: View | None, comparing: Comparing | None, signals: "StopSignals"
) -> Outcome:
    at_once = False
    while not signals.seen:
        try:
            return live(config, view, comparing, signals, at_once=at_once)
        except HeadDiedError as error:
            _count_death(config, error)
            at_once = True
    at = "before the next step" if at_once else "before the first step"
    return Outcome("stopped", f"{signals.reason} {at}", resumable=True)


def _count_death(config: RunConfig, error: HeadDiedError) -> None:
    """Take note that a head died, as a failure like any other.

    Raises:
        OrchestratorError: If the budget of failures is used up, or nothing ran yet.
    """
    store, most = RunStore(config.run.run_url), config.failure.max_failures
    state = store.load_state(config.emulation.billing_speedup)
    if state is None or 0 <= most <= state.num_failures:
        raise error.told from None
    logger.warning("%s; another one goes on in its place", error.how)
    store.save_state(replace(state, num_failures=state.num_failures + 1))
