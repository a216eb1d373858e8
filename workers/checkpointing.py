"""Checkpoints are written while training goes on: from copies, by a thread of their own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.durable import CheckpointFile, CheckpointPart
from workers.device import machine_bytes
from workers.state import Tensors, checkpoint_folder, host_copy, save_layer

logger = logging.getLogger(__name__)


class LayerState(NamedTuple):
    """The live tensors of a layer that is to be written."""

    layer: int
    tensors: Tensors
    state_keys: Mapping[str, str]  # see SplitModel

    @property
    def size_bytes(self) -> int:
        """Bytes of its copy."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(slots=True, eq=False)
class _Job:
    """One checkpoint under way: copies that wait to be written, oldest first."""

    folder: str
    step: int
    generation: int
    tells: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[LayerState] = field(default_factory=deque)
    held_bytes: int = 0  # by copies that are not written yet
    complete: bool = False  # no more copies will come
    cancelled: bool = False
    thread: threading.Thread | None = None
    part: CheckpointPart | None = None  # what has become of it
    begun_s: float = field(default_factory=time.monotonic)


class CheckpointWriter:
    """Writes this worker's part of checkpoints, one at a time.

    The copies lie in the memory of the machine, not of an accelerator. At most half of what the
    machine has left is taken: beyond that copying, and with it training, waits until a layer
    has been written, so that never more than one layer's copy is needed.
    """

    def __init__(
        self,
        run_url: str,
        every_steps: int,
        tell: Callable[[CheckpointPart], None],
        wrote: Callable[[int], None] = lambda _: None,
        available_bytes: Callable[[], float] | None = None,
    ) -> None:
        """Set up; nothing is written yet.

        Args:
            run_url: Folder of the run.
            every_steps: Steps after which a checkpoint is due.
            tell: Called on the writing thread once all is durable, or could not be written.
            wrote: Called on that thread after each layer, with the step of its checkpoint.
            available_bytes: What memory the machine has left; absent: it is asked.
        """
        self._run_url, self._every_steps, self._tell = run_url, every_steps, tell
        self._wrote = wrote
        self._available_bytes = available_bytes or machine_bytes
        self._job: _Job | None = None
        self.late = False
        """Whether one is due whose time came while the one before was being written."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._job is not None and self._job.part is None and not self._job.cancelled

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint should be begun at the boundary before ``step``.

        All workers begin one together, as their vote on the step before says. One whose time
        comes while any of them still writes is begun as soon as none does, not at the next
        time: a slow store gets as many as it can take, and no step ever waits for it.
        """
        return self.late or step % self._every_steps == 0

    def begin(
        self, step: int, generation: int, layers: Iterable[LayerState], *, tells: bool = True
    ) -> None:
        """Copy layers as they are now and have them written; waits for one that is under way.

        Args:
            step: The step that it goes on with.
            generation: Of the plan.
            layers: Read one after another; their tensors may change once this has returned.
            tells: Whether the end of it is told; ``write`` returns it instead.
        """
        self.wait()
        folder = checkpoint_folder(self._run_url, step)
        job = self._job = _Job(folder, step, generation, tells)
        job.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        job.thread.daemon = True  # files appear whole or not at all: nobody must wait for it
        job.thread.start()
        try:
            for state in layers:
                self._copy(job, state)
        finally:
            with job.changed:
                job.complete = True
                job.changed.notify_all()

    def write(self, step: int, generation: int, layers: Sequence[LayerState]) -> CheckpointPart:
        """Write layers while the caller waits, unless that is what is under way, or was done."""
        wanted, part = {state.layer for state in layers}, self.wait()
        done = {file.layer for file in part.files} if part and part.step == step else set()
        if done != wanted:
            self.begin(step, generation, layers, tells=False)
            part = self.wait()
        assert part is not None, "it was begun"
        return part

    def wait(self) -> CheckpointPart | None:
        """Wait for what is under way; return the newest part, None when none was ever begun."""
        if self._job is None:
            return None
        if self._job.thread is not None:
            self._job.thread.join()
        return self._job.part

    def cancel(self, timeout_s: float = 0.0) -> None:
        """Give up what is under way, and tell nobody; waits for the file that is being written.

        Raises:
            TimeoutError: If it is still being written after a positive ``timeout_s``.
        """
        self.late, job = False, self._job
        if job is None or job.thread is None:
            return
        with job.changed:
            job.cancelled = True
            job.changed.notify_all()
        if timeout_s > 0:
            job.thread.join(timeout_s)
            if job.thread.is_alive():
                raise TimeoutError(f"{job.folder} is still being written after {timeout_s:.0f} s")

    def _copy(self, job: _Job, state: LayerState) -> None:
        size_bytes = state.size_bytes
        with job.changed:
            job.changed.wait_for(
                lambda: job.held_bytes == 0 or 2 * size_bytes <= self._available_bytes()
            )
            if job.part is not None or job.cancelled:
                return  # it has failed already
            job.held_bytes += size_bytes
        copy = state._replace(tensors=host_copy(state.tensors))
        with job.changed:
            job.waiting.append(copy)
            job.changed.notify_all()

    def _run(self, job: _Job) -> None:
        files: list[CheckpointFile] = []
        problem = ""
        try:
            while (state := _next(job)) is not None:
                files.append(save_layer(job.folder, *state))
                self._wrote(job.step)
                size_bytes = state.size_bytes
                del state
                with job.changed:
                    job.held_bytes -= size_bytes
                    job.changed.notify_all()
        except Exception as error:  # the training goes on: whoever hears of it decides
            logger.exception("checkpoint of step %s", job.step)
            problem = str(error) or type(error).__name__
        write_s = time.monotonic() - job.begun_s
        written = () if problem else tuple(files)
        part = CheckpointPart(job.step, job.generation, written, problem, write_s)
        with job.changed:
            told = job.tells and not job.cancelled
            job.part, job.held_bytes = part, 0
            job.waiting.clear()
            job.changed.notify_all()
        if told:
            self._tell(part)


def _next(job: _Job) -> LayerState | None:
    with job.changed:
        job.changed.wait_for(lambda: job.waiting or job.complete or job.cancelled)
        return job.waiting.popleft() if job.waiting and not job.cancelled else None
