"""WorkerActor: the Ray shell around one device's worker; orders come on threads of their own."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

import ray
import torch

from orchestrator.core.durable import CheckpointPart
from orchestrator.core.evaluation import RoundReport
from orchestrator.core.model import ModelProfile
from orchestrator.core.slot import StepReport, WorkerFailed
from workers.code import loaded_code
from workers.link_speed import Timings, one_way
from workers.meeting import Invitation
from workers.output import send_output_to
from workers.preflight import Echo, reach
from workers.update import Verdict
from workers.worker import (
    Assignment,
    RunEnd,
    Standing,
    TaskInfo,
    Worker,
    WorkerSpec,
)

logger = logging.getLogger(__name__)

_Item = StepReport | RoundReport | CheckpointPart | RunEnd | WorkerFailed


@dataclass(frozen=True, slots=True)
class WorkerGreeting:
    """Where a worker's process lives."""

    pid: int
    ray_node_id: str


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What a worker has to say since it was last asked, in nouns that need no torch."""

    reports: tuple[StepReport, ...] = ()
    rounds: tuple[RoundReport, ...] = ()
    parts: tuple[CheckpointPart, ...] = ()
    failure: WorkerFailed | None = None
    ended_before: int | None = None
    waits_for: str = ""


class WorkerActor:
    """One device's process. ``run`` blocks one thread; every other call comes on its own."""

    def __init__(self, device_id: str, log_path: Path | None, num_threads: int) -> None:
        """Set the process up.

        Args:
            device_id: The device this process drives.
            log_path: A file for stdout and stderr of the process; None leaves them with Ray.
            num_threads: Threads of torch's operations.
        """
        self._device_id = device_id
        self._worker: Worker | None = None
        self._num_threads = num_threads
        self._echo: Echo | None = None
        if log_path is not None:
            send_output_to(log_path)

    def hello(self) -> WorkerGreeting:
        """Say where the process lives."""
        return WorkerGreeting(
            pid=os.getpid(),
            ray_node_id=ray.get_runtime_context().get_node_id(),
        )

    def load(self, spec: WorkerSpec) -> TaskInfo:
        """Import the user's task, build and split the model.

        Raises:
            UserCodeError: If the user's code raises, with the user's own frames.
            ConfigError: If it is not what the job runs.
        """
        torch.set_num_threads(self._num_threads)
        self.close()  # of an earlier life
        self._worker = Worker(spec, self._device_id)
        info = self._worker.load()
        code = loaded_code(spec.task, Path.cwd())
        if spec.code is not None:
            spec.code.check(self._device_id, code)
        # torch loads its compiler with the first optimizer: a second that nobody should be
        # billed for between two steps.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()
        return replace(info, code=code)

    def profile(self, wall: bool, fresh: bool) -> ModelProfile:
        """Measure the layers on this device; see ``known_or_measured``."""
        return self._loaded().profile(wall, fresh)

    def listen(self, host: str, secret: bytes, timeout_s: float) -> str:
        """Send back what others send, see ``Echo``; return the address."""
        self.stop_listening()
        self._echo = Echo(host, secret, timeout_s)
        return self._echo.address

    def reach(
        self, secret: bytes, timeout_s: float, addresses: Mapping[str, str]
    ) -> tuple[tuple[str, str, str], ...]:
        """Which other devices do not answer, at which address, and why; see ``preflight.reach``."""
        return reach(addresses, secret, timeout_s)

    def time_messages(self, secret: bytes, timeout_s: float, address: str) -> Timings:
        """How long messages take to another device; see ``one_way``."""
        return one_way(address, secret, timeout_s)

    def stop_listening(self) -> None:
        """Others have been heard, or will not be."""
        if self._echo is not None:
            self._echo.close()
            self._echo = None

    def connect(self, invitation: Invitation, rank: int, world_size: int) -> None:
        """Join all workers; see ``Peers.join``."""
        self._loaded().connect(invitation, rank, world_size)

    def install(self, assignment: Assignment, wall_zero_s: float | None) -> None:
        """Take a place in a plan: process groups, layer state, Program. Collective.

        Args:
            assignment: The same for all workers.
            wall_zero_s: Wall time of the run clock's zero; None where all workers share the
                head's machine, whose monotonic clock the assignment speaks of.
        """
        if wall_zero_s is not None:
            zero_s = time.monotonic() - (time.time() - wall_zero_s)
            assignment = replace(assignment, clock_zero_s=zero_s)
        self._loaded().install(assignment)

    def run(self, end_step: int, patience_s: float) -> None:
        """Run steps until held or ``end_step``; what happens goes out through ``poll``.

        ``patience_s``: how long to wait for others in a step, from its start on.
        """
        worker = self._loaded()
        torch.set_num_threads(self._num_threads)  # counts for the thread that calls it
        try:
            worker.extend(end_step, patience_s)
            end = worker.run()
            if end.reason != "failed":  # a failure is in the outbox already
                _outbox(worker).put(end)
        except Exception as error:
            logger.exception("device %s", self._device_id)
            message = f"{type(error).__name__}: {error}"
            worker.outbox.put(WorkerFailed(self._device_id, -1, message))

    def poll(self, linger_s: float) -> WorkerNews:
        """Return what has happened: after ``linger_s``, at once if it is no step's or round's."""
        if self._worker is None:
            time.sleep(linger_s)
            return WorkerNews()
        outbox, deadline_s = _outbox(self._worker), time.monotonic() + linger_s
        items: list[_Item] = []
        while True:
            try:
                items.append(outbox.get(timeout=max(0.0, deadline_s - time.monotonic())))
            except Empty:
                return replace(_sorted_news(items), waits_for=self._worker.waits_for)
            if not isinstance(items[-1], StepReport | RoundReport):
                deadline_s = 0.0

    def extend(self, end_step: int, patience_s: float) -> None:
        """Let the run go on to ``end_step`` without a pause; ``patience_s`` as for ``run``."""
        self._loaded().extend(end_step, patience_s)

    def hold(self) -> None:
        """Ask for a stop at the next step boundary that all workers agree on."""
        self._loaded().hold()

    def rewind(self, step: int) -> None:
        """Forget every layer: all of them will be restored as of ``step``."""
        self._loaded().rewind(step)

    def save(self, step: int, layers: Sequence[int]) -> CheckpointPart:
        """Write these layers; only while it stands at a step boundary."""
        return self._loaded().save(step, layers)

    def abort(self) -> None:
        """End the run under way; its end comes through ``poll`` like any other."""
        self._loaded().abort()

    def standing(self) -> Standing:
        """Where the worker stands, once its run has ended."""
        return self._loaded().standing()

    def settle(self, step: int, verdict: Verdict | None) -> None:
        """Come to the step boundary that all who are left agree on."""
        self._loaded().settle(step, verdict)

    def close(self) -> None:
        """Destroy process groups and sockets. Safe at any time, twice is fine."""
        if self._worker is not None:
            self._worker.close()

    def _loaded(self) -> Worker:
        assert self._worker is not None, "load comes first"
        return self._worker


def _outbox(worker: Worker) -> "SimpleQueue[_Item]":
    # The end of a run travels behind its last report, in the same queue.
    return cast("SimpleQueue[_Item]", worker.outbox)


def _sorted_news(items: Sequence[_Item]) -> WorkerNews:
    news = WorkerNews()
    for item in items:
        match item:
            case StepReport():
                news = replace(news, reports=(*news.reports, item))
            case RoundReport():
                news = replace(news, rounds=(*news.rounds, item))
            case WorkerFailed():
                news = replace(news, failure=news.failure or item)
            case CheckpointPart():
                news = replace(news, parts=(*news.parts, item))
            case RunEnd():
                news = replace(news, ended_before=item.next_step)
    return news
