"""The head: an actor that owns the workers and runs the control loop on one of its threads."""

import logging
import time
from dataclasses import replace
from typing import Any

import ray

from orchestrator import lines
from orchestrator.config import RunConfig
from orchestrator.control.books import LoopOptions
from orchestrator.control.loop import ControlLoop
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.control.recovery import unbilled_s
from orchestrator.core.code import NO_CODE
from orchestrator.core.durable import ControlState
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import (
    CommittedStep,
    Outcome,
    RunEvent,
    SlotJournal,
    SlotRecord,
    Usage,
)
from orchestrator.errors import ConfigError, DamagedCheckpointError, OrchestratorError
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.reports.records import slot_json
from orchestrator.runtime.backend import RayBackend
from orchestrator.runtime.budget_file import BudgetFile
from orchestrator.runtime.compare import compare_once
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.runtime.garbage import collect_rarely
from orchestrator.runtime.news import Comparing, Cursor, Feed, HeadNews
from orchestrator.runtime.processes import head_injector
from orchestrator.runtime.progress import Meter, RunClock
from orchestrator.runtime.provisioner import autoscaler_of
from orchestrator.runtime.result import result_ending, result_figures
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.setup import set_up
from orchestrator.strategies.registry import make_strategy
from orchestrator.telemetry.discovery import announce
from orchestrator.telemetry.exporter import Exporter, RunFacts

logger = logging.getLogger(__name__)


class _StoppedEarlyError(Exception):
    """Asked to stop while there was nothing to save yet."""


class Head:
    """Behind the actor: ``run`` blocks one thread, ``status`` and ``stop`` come on others."""

    def __init__(
        self,
        config: RunConfig,
        working_dir: str,
        *,
        actors: Any = ray,
        driver_pid: int | None = None,
    ) -> None:
        """Begin with what the folder of the run holds.

        Args:
            config: The whole file.
            working_dir: Where the user's task is imported from.
            actors: Ray, or what offers as much of it.
            driver_pid: The job's process.
        """
        self._config = config
        self._working_dir = working_dir
        self._actors = actors
        self._faults = head_injector(config, driver_pid)
        self._store = RunStore(config.run.run_url)
        self._checkpoints = CheckpointStore(
            config.run.run_url, keep_checkpoints=config.training.keep_checkpoints
        )
        self._budget_file = BudgetFile(config)
        self._phase = "starting"
        self._steps: Feed[CommittedStep] = Feed()
        self._unwritten: list[CommittedStep] = []  # not in their file yet
        self._slots: Feed[SlotRecord] = Feed()
        self._events: Feed[RunEvent] = Feed()
        self._evaluations: Feed[Evaluation] = Feed()
        self._judged = Evaluations()
        self._exporter: Exporter | None = None
        self._uncounted: list[RunEvent] = []  # they came when nobody listened for metrics
        self._end_reason: str | None = None  # before the last step, and yet finished
        self._stop_reason: str | None = None
        self._backend: RayBackend | None = None
        self._code = NO_CODE
        self._saved: ControlState | None = None
        self._loop: ControlLoop | None = None

    def run(self, comparing: Comparing | None = None, *, at_once: bool = False) -> Outcome:
        """Train to the end; every file of the run is written when this returns or raises.

        Args:
            comparing: Strategies to measure before the first step.
            at_once: Whether this head takes the place of one that died just now.

        Raises:
            OrchestratorError: What ended the run, with its message for the user.
        """
        try:
            outcome = self._run(comparing, at_once=at_once)
        except _StoppedEarlyError:
            at = "before the next step" if self._slots else "before the first step"
            return Outcome("stopped", f"{self._stop_reason} {at}", resumable=True)
        except OrchestratorError as error:
            self._write_result(error.status, str(error), resumable=True)
            raise
        except Exception as error:
            logger.exception("the head failed")
            self._write_result("failed", f"{type(error).__name__}: {error}", resumable=True)
            raise
        else:
            self._write_result(outcome.status, outcome.reason, resumable=outcome.resumable)
            return outcome
        finally:
            if self._backend is not None:
                self._backend.close()
            if self._saved is not None and self._loop is not None and self._loop.is_billed:
                self._store.save_state(self._saved)  # no time of writing: nothing is held since

    def status(self, cursor: Cursor) -> HeadNews:
        """What happened since ``cursor``, and forget what was before it; the first is all 0."""
        steps, slots, events, evaluations = (
            self._steps.since(cursor[0]),
            self._slots.since(cursor[1]),
            self._events.since(cursor[2]),
            self._evaluations.since(cursor[3]),
        )
        news = (steps, slots, events, evaluations)
        at = [position + len(found) for position, found in zip(cursor, news, strict=True)]
        return HeadNews(self._phase, *news, cursor=(at[0], at[1], at[2], at[3]))

    def stop(self, reason: str) -> None:
        """Stop at the next step boundary, after a checkpoint; ``run`` returns then."""
        self._stop_reason = reason
        if self._backend is not None:
            self._backend.interrupt()

    def finish(self, reason: str) -> None:
        """End the run as a finished one at the next step boundary; ``run`` returns then."""
        self._end_reason = reason
        if self._backend is not None:
            self._backend.interrupt()

    def _run(self, comparing: Comparing | None, *, at_once: bool) -> Outcome:
        """Live from the newest checkpoint that is not damaged."""
        while True:
            try:
                return self._live(comparing, at_once=at_once)
            except DamagedCheckpointError as error:
                self._fall_back(error)
                # What was decided in this process is held until the next decision, and billed.
                at_once = at_once or self._saved is not None

    def _fall_back(self, error: DamagedCheckpointError) -> None:
        """Make ready for another life, from the checkpoint before a damaged one.

        Raises:
            ConfigError: If there is none.
        """
        older = [step for step in self._checkpoints.steps() if step < error.step]
        if not older:
            raise ConfigError(
                f"{error}; no older checkpoint is left: put a copy back, or start under another "
                "run.name"
            ) from None
        if self._backend is not None:
            self._backend.close()
        self._write_steps()
        self._checkpoints.set_aside(error.step)
        self._warn(f"checkpoint_damaged: {error}; going on from the one of step {older[-1]}")

    def _warn(self, detail: str) -> None:
        """Put an event of this process beside the loop's; ``detail`` begins with word and colon."""
        logger.warning("%s", detail)
        state = self._load()
        time_s = state.time_s * self._config.emulation.billing_speedup if state else 0.0
        event = RunEvent(time_s, state.slot if state else 0, "warning", detail)
        self._store.write_journal(SlotJournal(events=(event,)))
        self._events.append(event)
        self._uncounted.append(event)

    def _live(self, comparing: Comparing | None, *, at_once: bool) -> Outcome:
        # The driver imports this module, too; here CVXPY is loaded before a slot waits for it.
        from orchestrator.planning.program import SlotProgram  # noqa: PLC0415 - as above

        assignment = SlotAssignment(self._config.control.plan_deadline_s, compiled=SlotProgram)
        self._store.delete_unfinished()
        state, manifest = self._load(), self._checkpoints.latest()
        self._store.rewind_steps(manifest.step if manifest else 0)
        self._store.rewind_evaluations(manifest.step if manifest else 0)
        next_step = state.next_step if state else 0
        rig = set_up(
            self._config, self._working_dir, self._say,
            warn=self._warn, next_step=next_step, actors=self._actors,
        )  # fmt: skip
        self._code = rig.code
        evaluations = Evaluations(
            self._config.training,
            num_steps=rig.num_steps,
            num_samples=rig.evaluation_samples,
            recorded=self._store.read_evaluations(),
            tell=self._evaluated,
        )
        self._judged, self._end_reason = evaluations, evaluations.end_reason
        self._backend = backend = RayBackend(
            self._config,
            rig,
            meter=self._meter(state, at_once=at_once),
            restore=manifest,
            evaluations=evaluations,
            on_step=self._commit,
            before_checkpoint=self._write_steps,
        )
        if comparing is not None:
            compare_once(self._config, comparing, rig, backend.measure, self._say)
        self._exporter = exporter = self._export(rig)
        if manifest:
            exporter.checkpoint(manifest)
        try:
            self._loop = self._make_loop(rig, backend, assignment, exporter, state)
            self._say("planning")
            with self._budget_file.watched():
                return self._tick(self._loop)
        finally:
            exporter.close()

    def _make_loop(
        self,
        rig: Rig,
        backend: RayBackend,
        assignment: SlotAssignment,
        exporter: Exporter,
        state: ControlState | None,
    ) -> ControlLoop:
        """The loop, with the files and metrics that it fills."""

        def book(journal: SlotJournal) -> None:
            self._write_steps()
            if journal.undone_from is not None:
                self._store.rewind_steps(journal.undone_from)
                self._store.rewind_evaluations(journal.undone_from)
            self._store.write_journal(replace(journal, steps=()))
            self._events.extend(journal.events)
            exporter.journal(replace(journal, events=(*self._uncounted, *journal.events)))
            self._uncounted.clear()

        return ControlLoop(
            backend=backend,
            strategy=make_strategy(self._config.control.strategy),
            assignment=assignment,
            options=self._options(rig, state),
            cluster=rig.cluster,
            model=rig.model,
            state=state,
            autoscaler=autoscaler_of(self._config, rig),
            sinks=(self._record, exporter.slot),
            save=self._save,
            book=book,
            stopwatch=time.monotonic,
            cpu_clock=time.process_time,
            news_of_budget=self._budget_file.news,
        )

    def _tick(self, loop: ControlLoop) -> Outcome:
        """Slot by slot, until the run has ended or is asked to stop."""
        collect_rarely()
        started_cpu_s = time.process_time()
        try:
            while loop.outcome is None and self._stop_reason is None and self._end_reason is None:
                loop.tick()
            if loop.outcome is None and self._end_reason is not None:
                loop.end("finished", self._end_reason)
            elif loop.outcome is None:
                loop.end("stopped", str(self._stop_reason))
        finally:
            cpu_s = time.process_time() - started_cpu_s
            logger.info("the head used %.1f CPU seconds in %s slots", cpu_s, len(self._slots))
        assert loop.outcome is not None, "an ended loop has an outcome"
        return loop.outcome

    def _load(self) -> ControlState | None:
        return self._store.load_state(self._config.emulation.billing_speedup)

    def _save(self, state: ControlState) -> None:
        """Persist the state with the time: what is held after it is billed if this process dies."""
        self._saved = state
        self._store.save_state(replace(state, saved_unix_s=time.time()))

    def _meter(self, state: ControlState | None, *, at_once: bool) -> Meter:
        """Go on where the state was saved, or later, with what a head that died had held since."""
        if state is None:
            return Meter(RunClock())
        slot_s = self._config.control.slot_s
        gap_s = unbilled_s(state, time.time(), slot_s=slot_s, at_once=at_once)
        until_s = state.time_s + gap_s
        if not gap_s:
            return Meter(RunClock(until_s))
        logger.info("the last head died: %.1f s of its plan are billed now", gap_s)
        held = (Usage(device_id, state.time_s, until_s) for device_id in state.plan.device_ids)
        meter = Meter(RunClock(until_s), held)
        meter.hold(state.plan.device_ids, until_s)
        return meter

    def _export(self, rig: Rig) -> Exporter:
        """Listen for Prometheus, and say where beside the run's folder."""
        config = self._config
        facts = RunFacts(
            strategy=config.control.strategy,
            zone_of_pool={offer.pool: offer.zone for offer in rig.cluster.offers},
            num_samples=rig.num_samples,
            billing_speedup=config.emulation.billing_speedup,
            unix_time=time.time,
        )
        exporter = Exporter(config.metrics.port, config.metrics.host, config.run.name, facts)
        announce(config.run.run_url, config.run.name, exporter.address)
        return exporter

    def _options(self, rig: Rig, state: ControlState | None) -> LoopOptions:
        config, feed = self._config, self._config.cluster.price_feed
        known = state.budget if state else None
        return LoopOptions(
            training=config.training,
            budget=self._budget_file.at_start(known or config.budget),
            control=config.control,
            billing_speedup=config.emulation.billing_speedup,
            price_max_age_s=feed.max_age_s if feed else None,
            num_steps=rig.num_steps,
            num_samples=rig.num_samples,
            max_failures=config.failure.max_failures,
            max_preemptions=config.failure.max_preemptions,
            seed=config.run.seed,
            code=str(rig.code),
        )

    def _say(self, phase: str) -> None:
        if self._stop_reason is not None:
            raise _StoppedEarlyError
        logger.info("%s", phase)
        self._phase = phase

    def _record(self, record: SlotRecord) -> None:
        lines.append_lines(self._store.url("slots.jsonl"), (slot_json(record),))
        self._slots.append(record)

    def _commit(self, step: CommittedStep) -> None:
        self._unwritten.append(step)
        self._steps.append(step)

    def _evaluated(self, evaluation: Evaluation) -> None:
        """Write an evaluation down, show it, and end the run if it has come to that."""
        self._write_steps()
        self._store.write_evaluation(evaluation)
        self._evaluations.append(evaluation)
        if self._exporter is not None:
            self._exporter.evaluation(evaluation)
        if reason := self._judged.end_reason:
            self.finish(reason)

    def _write_steps(self) -> None:
        """Write the steps that are not in their file yet, each once.

        A checkpoint that becomes whole in mid-slot may be all that a crash leaves: what it
        builds on must be on record before it, and not only at the end of the slot.
        """
        steps = tuple(self._unwritten)
        if steps:
            self._faults.reach(steps[-1].step, "save")
        self._store.write_journal(SlotJournal(steps=steps))
        del self._unwritten[: len(steps)]

    def _write_result(self, status: str, reason: str, *, resumable: bool) -> None:
        code = self._code.digest if self._code.modules else None
        how = result_ending(
            self._config.run.run_url, status, reason, resumable=resumable, code=code
        )
        state, slot, step = self._load(), self._slots.last, self._steps.last
        self._store.write_result({**how, **result_figures(state, slot, step, self._judged)})
