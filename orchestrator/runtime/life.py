"""One life of the head: its Ray actor is started, watched and followed until it ends or hangs."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.callbacks import Callbacks
from orchestrator.config import RunConfig
from orchestrator.core.code import SHORT, lyray_digest
from orchestrator.core.slot import Outcome
from orchestrator.errors import ConfigError, OrchestratorError, as_told
from orchestrator.reports.live import View
from orchestrator.runtime.actors import OUT_OF_MEMORY
from orchestrator.runtime.news import Comparing, Cursor, HeadNews
from orchestrator.runtime.signals import StopSignals

logger = logging.getLogger(__name__)

NEWS_S = 0.5
"""Between two questions to the head."""

NO_CURSOR: Cursor = (0, 0, 0, 0)


class HeadActor:
    """The head's Ray shell: what it needs is loaded in its own process only."""

    def __init__(self, config: RunConfig, working_dir: str, driver_pid: int, lyray: str) -> None:
        """``lyray``: the digest of the job's own."""
        # These load torch and CVXPY.
        from orchestrator.runtime.head import Head  # noqa: PLC0415 - as above
        from orchestrator.runtime.processes import send_output  # noqa: PLC0415 - as above

        send_output(config, "head")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        logger.info("the head is process %s", os.getpid())
        self._lyray = lyray
        self._head = Head(config, working_dir, driver_pid=driver_pid)

    def run(self, comparing: Comparing | None, *, at_once: bool) -> Outcome:
        """See ``Head.run``. Raises ConfigError if lyray here is not the job's."""
        if self._lyray != lyray_digest():
            raise ConfigError(
                f"the head process runs another lyray ({lyray_digest()[:SHORT]}) than the job "
                f"({self._lyray[:SHORT]}); leave no copy of lyray in the working directory: name "
                "its folders in .rayignore"
            )
        return self._head.run(comparing, at_once=at_once)

    def status(self, cursor: Cursor) -> HeadNews:
        """See ``Head.status``."""
        return self._head.status(cursor)

    def stop(self, reason: str) -> None:
        """See ``Head.stop``."""
        self._head.stop(reason)

    def finish(self, reason: str) -> None:
        """See ``Head.finish``."""
        self._head.finish(reason)

    def pid(self) -> int:
        """The process, which runs where the job does."""
        return os.getpid()


class HeadDiedError(Exception):
    """The head's process is gone, and its workers with it."""

    def __init__(self, error: RayActorError | OutOfMemoryError, silent_s: float | None) -> None:
        """``silent_s``: for how long it had not answered when it was ended for that."""
        super().__init__(error)
        logger.info("Ray says of the head: %s", error)
        if silent_s is not None:
            how = f"answered nothing for {silent_s:.0f} s and was ended"
        elif isinstance(error, OutOfMemoryError):  # of Ray, which killed it before the system did
            how = OUT_OF_MEMORY
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


def live(
    config: RunConfig,
    view: View | None,
    comparing: Comparing | None,
    signals: StopSignals,
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
    head = shell.remote(config, str(Path.cwd()), os.getpid(), lyray_digest())
    try:
        watchdog = Watchdog(head, config.failure.timeouts.start_s)
        running = head.run.remote(comparing, at_once=at_once)
        signals.stop_with(head.stop.remote)
        if isinstance(view, Callbacks):
            view.end_with(head.finish.remote, head.stop.remote)
        return follow(head, running, view, signals, watchdog)
    finally:
        signals.stop_with(None)
        if isinstance(view, Callbacks):
            view.end_with(None, None)
        ray.kill(head)


class Watchdog:
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


def follow(
    head: Any, running: Any, view: View | None, signals: StopSignals, watchdog: Watchdog
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
    except (RayActorError, OutOfMemoryError) as error:
        raise HeadDiedError(error, watchdog.ended_after_s) from None
    reason = f"{signals.reason}, then at once by {signals.seen[1]}"
    return Outcome("stopped", reason, resumable=True)


def _tell_answer(asked: Any, cursor: Cursor, view: View | None) -> Cursor:
    """Pass on what the head answers, if it does; where to ask from next.

    Whether the head lives is judged by its run alone: one that ended has ended as it says, even
    where the process was gone before the last question.
    """
    try:
        return tell(ray.get(asked), view)
    except (RayActorError, OutOfMemoryError) as error:
        logger.info("the head did not answer: %s", error)
        return cursor


def tell(news: HeadNews, view: View | None) -> Cursor:
    """Pass news on to a view; where to ask from next."""
    if view is not None:
        view.phase(news.phase)
        for step in news.steps:
            view.step(step)
        for evaluation in news.evaluations:
            view.evaluation(evaluation)
        for event in news.events:
            view.event(event)
        for record in news.slots:
            view.slot(record)
    return news.cursor
