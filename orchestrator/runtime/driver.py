"""The job process: starts Ray and the head, passes on what happens, and stops when told to."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.model import Task
from orchestrator.core.slot import CommittedStep, Outcome, RunEvent, SlotRecord
from orchestrator.errors import ConfigError, OrchestratorError, as_told
from orchestrator.reports.live import View
from orchestrator.runtime.folder import alone_in, open_folder
from orchestrator.runtime.news import Comparing, Cursor, HeadNews
from orchestrator.runtime.session import ray_session
from orchestrator.runtime.signals import StopSignals, stay

logger = logging.getLogger(__name__)

NEWS_S = 0.5
"""Between two questions to the head."""

NO_CURSOR: Cursor = (0, 0, 0)


class HeadActor:
    """The head's Ray shell: what it needs is loaded in its own process only."""

    def __init__(self, config: RunConfig, working_dir: str, driver_pid: int) -> None:
        # These load torch and CVXPY.
        from orchestrator.runtime.head import Head  # noqa: PLC0415 - as above
        from orchestrator.runtime.processes import send_output  # noqa: PLC0415 - as above

        send_output(config, "head")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        logger.info("the head is process %s", os.getpid())
        self._head = Head(config, working_dir, driver_pid=driver_pid)

    def run(self, comparing: Comparing | None, *, at_once: bool) -> Outcome:
        """See ``Head.run``."""
        return self._head.run(comparing, at_once=at_once)

    def status(self, cursor: Cursor) -> HeadNews:
        """See ``Head.status``."""
        return self._head.status(cursor)

    def stop(self, reason: str) -> None:
        """See ``Head.stop``."""
        self._head.stop(reason)

    def pid(self) -> int:
        """The process, which runs where the job does."""
        return os.getpid()


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
    with alone_in(config.run.run_url):
        done = open_folder(config, resume)
        return done or _run_alone(config, view, comparing)


def _run_alone(config: RunConfig, view: View | None, comparing: Comparing | None) -> Outcome:
    signals = StopSignals()
    num_devices = sum(offer.count for offer in config.cluster.offers)
    try:
        with signals.caught(), ray_session(num_devices):
            signals.catch()  # again: ray.init has put a handler of its own in place for SIGTERM
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

    error: OrchestratorError | None
    """What ended the run before its time."""

    path: str
    """Folder of the run."""


class Trainer:
    """Trains from a script: ``Trainer(task, RunConfig.load("config.yaml")).fit()``."""

    def __init__(
        self,
        task: Callable[..., Task] | None,
        config: RunConfig,
        *,
        on_step: Callable[[CommittedStep], None] | None = None,
        on_slot: Callable[[SlotRecord], None] | None = None,
        on_event: Callable[[RunEvent], None] | None = None,
    ) -> None:
        """Take note of what to train.

        Args:
            task: A function of a module, which returns the Task; None: ``training.task``.
            config: The whole file.
            on_step: Called with every committed step.
            on_slot: Called with every slot's record.
            on_event: Called with every event.

        Raises:
            ConfigError: If workers could not import the task.
        """
        if task is not None:
            training = replace(config.training, task=import_path(task))
            config = config.model_copy(update={"training": training})
        self._config = config
        self._view = _Callbacks(on_step, on_slot, on_event)

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
        run_url = self._config.run.run_url
        error: OrchestratorError | None = None
        try:
            run_job(self._config, resume=resume, view=self._view, comparing=comparing)
        except ConfigError:
            raise
        except OrchestratorError as found:
            error = found
        checkpoints = CheckpointStore(run_url)
        steps = checkpoints.steps()
        return Result(
            metrics=RunStore(run_url).read_result() or {},
            checkpoint=checkpoints.url(steps[-1]) if steps else None,
            error=error,
            path=run_url,
        )


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


class _Callbacks:
    """The user's functions as a View."""

    def __init__(
        self,
        on_step: Callable[[CommittedStep], None] | None,
        on_slot: Callable[[SlotRecord], None] | None,
        on_event: Callable[[RunEvent], None] | None,
    ) -> None:
        self._on_step, self._on_slot, self._on_event = on_step, on_slot, on_event

    def phase(self, text: str) -> None:
        """Nobody asked."""

    def step(self, step: CommittedStep) -> None:
        """A step was committed."""
        if self._on_step is not None:
            self._on_step(step)

    def slot(self, record: SlotRecord) -> None:
        """A slot ended."""
        if self._on_slot is not None:
            self._on_slot(record)

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        """Nothing to take down."""


# The head and this process --------------------------------------------------------------


def _run_head(
    config: RunConfig, view: View | None, comparing: Comparing | None, signals: "StopSignals"
) -> Outcome:
    at_once = False
    while not signals.seen:
        try:
            return _live(config, view, comparing, signals, at_once=at_once)
        except _HeadDiedError as error:
            _count_death(config, error)
            at_once = True
    at = "before the next step" if at_once else "before the first step"
    return Outcome("stopped", f"{signals.reason} {at}", resumable=True)


def _count_death(config: RunConfig, error: "_HeadDiedError") -> None:
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


class _HeadDiedError(Exception):
    """The head's process is gone, and its workers with it."""

    def __init__(self, error: RayActorError, silent_s: float | None) -> None:
        """``silent_s``: for how long it had not answered when it was ended for that."""
        super().__init__(error)
        logger.info("Ray says of the head: %s", error)
        if silent_s is not None:
            how = f"answered nothing for {silent_s:.0f} s and was ended"
        elif error.actor_init_failed:
            how = f"did not start: {str(error).strip().splitlines()[-1]}"
        elif isinstance(error, ActorUnavailableError):
            how = "could not be reached any more and was ended"
        else:
            how = "was killed"
        self.how = f"the head process {how}"
        self.told = OrchestratorError(
            f"{self.how}; workers ended with it, and the same command resumes from the newest "
            "checkpoint"
        )


def _live(
    config: RunConfig,
    view: View | None,
    comparing: Comparing | None,
    signals: "StopSignals",
    *,
    at_once: bool,
) -> Outcome:
    """One head from its start to its end."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # No restart: a head that comes back alone has no workers. Threads: the loop, and answers.
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": 4,
        "scheduling_strategy": here,
        "enable_task_events": False,  # as of workers
    }
    shell: Any = ray.remote(**options)(HeadActor)  # type: ignore[call-overload]  # partly typed
    head = shell.remote(config, str(Path.cwd()), os.getpid())
    try:
        watchdog = _Watchdog(head, config.failure.timeouts.start_s)
        running = head.run.remote(comparing, at_once=at_once)
        signals.stop_with(head.stop.remote)
        return _follow(head, running, view, signals, watchdog)
    finally:
        signals.stop_with(None)
        ray.kill(head)


class _Watchdog:
    """Ends a head that hangs: else its workers would stand, and be paid for, for ever.

    One that still starts is not looked at. What this process slept itself is no silence.
    """

    def __init__(self, head: Any, longest_s: float) -> None:
        """``longest_s``: how long it may answer nothing."""
        self._pid = head.pid.remote()
        self._longest_s = longest_s
        self._silent_s, self._looked_s = 0.0, time.monotonic()
        self.ended_after_s: float | None = None
        """How long it had been silent when it was ended for that."""

    def heard(self) -> None:
        """It has answered."""
        self._silent_s = 0.0

    def look(self) -> None:
        """It has not; called between any two waits of ``NEWS_S``."""
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, 4.0 * NEWS_S)
        self._looked_s = now_s
        if self._silent_s <= self._longest_s or self.ended_after_s is not None:
            return
        if ray.wait([self._pid], timeout=0)[0]:
            self.ended_after_s = self._silent_s
            os.kill(ray.get(self._pid), signal.SIGKILL)  # a stopped process obeys nothing else


def _follow(
    head: Any, running: Any, view: View | None, signals: "StopSignals", watchdog: _Watchdog
) -> Outcome:
    """Pass the head's news on until its run ends, or until a second signal came."""
    cursor, asked = NO_CURSOR, None
    try:
        while len(signals.seen) < 2:
            asked = asked or head.status.remote(cursor)
            ready, _ = ray.wait([running, asked], timeout=NEWS_S)
            if asked in ready:
                cursor, asked = _tell_answer(asked, cursor, view), None
                watchdog.heard()
            else:
                watchdog.look()
            if running in ready:
                _tell_answer(head.status.remote(cursor), cursor, view)
                outcome: Outcome = ray.get(running)
                return outcome
            ray.wait([running], timeout=NEWS_S)
    except RayTaskError as error:
        if isinstance(error.cause, OrchestratorError | OSError):
            raise as_told(error.cause) from None
        raise OrchestratorError(
            f"lyray failed: {type(error.cause).__name__}: {error.cause}; please report this "
            "with the log in the run's folder"
        ) from error
    except RayActorError as error:
        raise _HeadDiedError(error, watchdog.ended_after_s) from None
    reason = f"{signals.reason}, then at once by {signals.seen[1]}"
    return Outcome("stopped", reason, resumable=True)


def _tell_answer(asked: Any, cursor: Cursor, view: View | None) -> Cursor:
    """Pass on what the head answers, if it does; where to ask from next.

    Whether the head lives is judged by its run alone: one that ended has ended as it says, even
    where the process was gone before the last question.
    """
    try:
        return tell(ray.get(asked), view)
    except RayActorError as error:
        logger.info("the head did not answer: %s", error)
        return cursor


def tell(news: HeadNews, view: View | None) -> Cursor:
    """Pass news on to a view; where to ask from next."""
    if view is not None:
        view.phase(news.phase)
        for step in news.steps:
            view.step(step)
        for event in news.events:
            view.event(event)
        for record in news.slots:
            view.slot(record)
    return news.cursor
