"""The checkpoints of one life: each exists once all its parts do; those that fail are counted."""

import time
from collections.abc import Callable, Collection, Sequence

from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.durable import CheckpointManifest, CheckpointPart
from orchestrator.core.plan import step_range
from orchestrator.core.slot import CheckpointFailed
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.progress import Progress


class Checkpoints:
    """Writes the manifest of whatever the workers have written whole."""

    def __init__(
        self,
        config: RunConfig,
        *,
        num_layers: int,
        num_samples: int,
        restore: CheckpointManifest | None,
        also: Callable[[], Collection[int]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the checkpoint that is restored, if any.

        ``also``: steps whose checkpoints are kept beside the newest ones.
        """
        self.newest = restore
        self._config = config
        self._num_layers, self._num_samples = num_layers, num_samples
        self._store = CheckpointStore(
            config.run.run_url, keep_checkpoints=config.training.keep_checkpoints
        )
        self._num_failed = 0  # in a row
        self._failures: list[CheckpointFailed] = []
        self._written: list[CheckpointManifest] = []
        self._also, self._clock = also, clock
        self._heard_step = restore.step if restore else 0  # of any checkpoint, whole or not
        self._heard_s = clock()

    @property
    def newest_step(self) -> int | None:
        """The step that a resumed run goes on with."""
        return self.newest.step if self.newest else None

    def follow(self, progress: Progress, before: Callable[[], None]) -> None:
        """Let checkpoints exist that have become whole; ``before`` is called before each."""
        for part in progress.whole_checkpoints(self._num_layers):
            before()
            if problem := self._commit(part):
                self._fail(part.step, problem)
        for step, problem in progress.unwritten_checkpoints():
            self._fail(step, problem)
        self._look_for_late_ones(progress.next_step)

    def write(
        self,
        step: int,
        generation: int,
        parts: Sequence[CheckpointPart],
        before: Callable[[], None],
    ) -> None:
        """Let the checkpoint exist that all workers wrote at a stand; ``before`` comes first.

        Raises:
            OrchestratorError: If it could not be written.
        """
        files = sorted((file for part in parts for file in part.files), key=lambda f: f.layer)
        problem = next((part.problem for part in parts if part.problem), None)
        if problem is None:
            before()
            write_s = max((part.write_s for part in parts), default=0.0)
            problem = self._commit(CheckpointPart(step, generation, tuple(files), write_s=write_s))
        if problem is not None:
            raise OrchestratorError(
                f"the last checkpoint, of step {step}, could not be written: {problem}; when that "
                "is mended, the same command goes on from the newest one that is whole"
            )

    def failures(self) -> tuple[CheckpointFailed, ...]:
        """Those that could not be written since the last call."""
        failures, self._failures = tuple(self._failures), []
        return failures

    def written(self) -> tuple[CheckpointManifest, ...]:
        """Those that came to exist since the last call, oldest first."""
        written, self._written = tuple(self._written), []
        return written

    def _commit(self, part: CheckpointPart) -> str | None:
        """Write the manifest; return why it could not be written, None when it was."""
        training = self._config.training
        manifest = CheckpointManifest(
            step=part.step,
            generation=part.generation,
            files=part.files,
            num_layers=self._num_layers,
            samples_committed=step_range(part.step, training.global_batch, self._num_samples)[0],
            seed=self._config.run.seed,
            optimizer=training.optimizer.name,
            write_s=part.write_s,
            unix_s=time.time(),
        )
        try:
            self._store.write_manifest(manifest, self._also())
        except OSError as error:
            return str(error)
        self.newest, self._num_failed = manifest, 0
        self._written.append(manifest)
        self._hear(part.step)
        return None

    def _fail(self, step: int, reason: str) -> None:
        self._num_failed += 1
        self._hear(step)
        most = self._config.failure.max_checkpoint_failures
        ends_run = 0 <= most < self._num_failed
        self._failures.append(CheckpointFailed(step, reason, ends_run=ends_run))

    def _hear(self, step: int) -> None:
        self._heard_step, self._heard_s = step, self._clock()

    def _look_for_late_ones(self, next_step: int) -> None:
        """Say so when nothing comes any more: a storage that hangs raises no error."""
        num_due = (next_step - self._heard_step) // self._config.training.checkpoint_every_steps
        silent_s = self._clock() - self._heard_s
        if num_due < 2 or silent_s <= self._config.failure.timeouts.checkpoint_s:
            return
        self._failures.append(
            CheckpointFailed(
                next_step,
                f"none has become whole for {silent_s:.0f} s, though {num_due} were due; the "
                "storage is slow, or hangs",
            )
        )
        self._hear(next_step)
