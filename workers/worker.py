"""One device's worker: loads the task, takes places in plans, runs steps, hands out reports."""

import logging
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from orchestrator.core.durable import CheckpointPart
from orchestrator.core.model import ModelProfile
from orchestrator.errors import DeviceMemoryError
from workers.checkpointing import CheckpointWriter
from workers.clock import RealClock
from workers.device import give_back, is_out_of_memory, take
from workers.emulation import VirtualClock
from workers.evaluation import Evaluator
from workers.executor import Executor, Place, make_place
from workers.failures import in_one_line, worker_failed
from workers.faults import NO_FAULTS, Injector
from workers.feed import Feed
from workers.holding import Holding
from workers.loading import Loaded, load
from workers.meeting import Invitation
from workers.orders import Assignment, EndReason, RunEnd, Standing, TaskInfo, WorkerSpec
from workers.peers import Peers
from workers.process_groups import OwnerSet
from workers.profile_cache import known_or_measured
from workers.reduction import GradientSums, layer_owners, make_buckets, tie_owners
from workers.stage import Stage, StageWork
from workers.step import StepRunner, Window
from workers.update import Verdict, Vote

if TYPE_CHECKING:
    from orchestrator.core.evaluation import RoundReport
    from orchestrator.core.slot import StepReport, WorkerFailed

__all__ = ["Assignment", "RunEnd", "Standing", "TaskInfo", "Worker", "WorkerSpec"]

logger = logging.getLogger(__name__)


class Worker:
    """One device's part. ``run`` blocks its thread; ``extend``, ``hold``, ``close`` come on any."""

    def __init__(self, spec: WorkerSpec, device_id: str) -> None:
        self.outbox: SimpleQueue[StepReport | RoundReport | CheckpointPart | WorkerFailed]
        self.outbox = SimpleQueue()
        self._spec, self._device_id = spec, device_id
        self._device = torch.device(spec.device)
        self._found: Loaded | None = None
        self._peers = Peers(spec.transport, spec.timeout_s)
        self._holding = Holding(spec, self._peers)
        self._first_owned: tuple[int, ...] = ()  # layers this worker saves
        self._faults = Injector(device_id, spec.faults, spec.run_url, self._peers.cut)
        every = spec.options.checkpoint_every_steps
        self._writer = CheckpointWriter(spec.run_url, every, self.outbox.put, self._faults.wrote)
        self._runner: StepRunner | None = None
        self._evaluator: Evaluator | None = None
        self._assignment: Assignment | None = None
        self._end_step, self._patience_s = 0, spec.timeout_s
        self._hold, self._closed = False, False

    @property
    def _loaded(self) -> Loaded:
        assert self._found is not None, "load comes first"
        return self._found

    # Set-up ------------------------------------------------------------------------------

    def load(self) -> TaskInfo:
        """Import the task, build the whole model from the run's seed, and split it.

        Raises:
            UserCodeError: If the user's code raises.
            ConfigError: If the model, its weights, its groups or the data will not do.
        """
        self._device = self._peers.device = take(self._spec.device)
        self._found = load(self._spec, self._device_id)
        return self._found.info(self._device)

    def profile(self, wall: bool, fresh: bool) -> ModelProfile:
        """Measure the layers on this device; see ``known_or_measured``."""
        try:
            profile = known_or_measured(
                self._loaded.model,
                self._loaded.task,
                self._spec.options,
                wall=wall,
                fresh=fresh,
                device=self._device,
            )
        except DeviceMemoryError as error:
            raise DeviceMemoryError(
                f"device {self._device_id} has too little memory to measure the model: {error}; "
                "write a smaller training.microbatch"
            ) from error
        give_back(self._device)
        return profile

    def connect(self, invitation: Invitation, rank: int, world_size: int) -> None:
        """Join all workers of the run; collective, see ``Peers.join``. The layers here stay."""
        self._peers.join(invitation, rank, world_size)

    # Taking a place in a plan ------------------------------------------------------------

    def install(self, assignment: Assignment) -> None:
        """Take a place in a plan at a step boundary; collective over all workers of the world.

        Layers that changed hands come from running workers with their optimizer state, else
        from ``restore``, else fresh from the seed. Unmoved layers keep their tensors.

        Raises:
            ConfigError: If the checkpoint or the optimizer does not fit the model.
            PeerLostError, LostContactError: If a worker is gone; the peers of this one are freed.
            DeviceMemoryError: If the layers do not fit.
        """
        try:
            self._install(assignment)
        except Exception as error:
            logger.exception("device %s", self._device_id)
            self._leave(error)
            if is_out_of_memory(error):
                raise DeviceMemoryError(
                    f"device {self._device_id} ran out of memory taking its layers: "
                    f"{in_one_line(error)}"
                ) from error
            raise

    def _install(self, assignment: Assignment) -> None:
        self._assignment, self._peers.device_ids = assignment, assignment.device_ids
        self._end_step, self._hold = assignment.end_step, False
        self._retire()
        if assignment.restore is not None:
            self._writer.cancel(self._spec.timeout_s)  # of steps that are undone: not to be mixed
        if assignment.plan.is_idle:
            self._peers.groups.prepare(())
            return  # the old owners keep their layers: nobody else has them
        ranks = {device_id: rank for rank, device_id in enumerate(assignment.device_ids)}
        owners = layer_owners(assignment.plan, ranks)
        model = self._loaded.model
        if len(owners) != len(model.layers):
            raise ValueError(
                f"the plan has {len(owners)} layers, but the model has {len(model.layers)}"
            )
        active = tuple(sorted(ranks[d] for d in assignment.plan.device_ids))
        self._peers.groups.prepare({active, *owners, *tie_owners(owners, model.ties)})
        self._holding.take_place(model, assignment, owners, ranks)
        rank = self._peers.rank
        self._first_owned = tuple(i for i, own in enumerate(owners) if own[0] == rank)
        if rank in active:
            self._runner = self._make_runner(owners, ranks)
            if self._loaded.evaluation is not None and not assignment.discard:
                self._evaluator = Evaluator(
                    self._runner,
                    self._loaded.evaluation,
                    self._peers.transport,
                    is_due=self._evaluates_at,
                    longer_s=self._spec.evaluation_s,
                    done=assignment.evaluated,
                )

    def _make_runner(self, owners: Sequence[OwnerSet], ranks: Mapping[str, int]) -> StepRunner:
        assert self._assignment is not None
        assignment, options, samples = self._assignment, self._spec.options, self._loaded.samples
        holding, layers = self._holding, self._holding.state.layers
        place = make_place(assignment.plan, self._device_id, ranks)
        span = place.stage.layers
        stage = Stage(
            StageWork(
                first_layer=span.start,
                layers=layers[span.start : span.stop],
                names=self._loaded.model.names[span.start : span.stop],
                seed=self._spec.seed,
                precision=options.precision,
                device=self._device,
                loss=self._loaded.task.loss if place.is_last else None,
                loss_scale=holding.state.loss_scale,
                recompute=place.stage.recompute,
            )
        )
        emulated = (assignment.emulation or {}).get(self._device_id)
        buckets = make_buckets(layers, span, owners, self._loaded.model.ties)
        bucket_bytes = sum(bucket.size_bytes for bucket in buckets)
        active = tuple(sorted(ranks[d] for d in assignment.plan.device_ids))
        faults = NO_FAULTS if assignment.discard else self._faults
        return StepRunner(
            device_id=self._device_id,
            plan=assignment.plan,
            place=place,
            samples=samples,
            stage=stage,
            executor=Executor(place, stage, self._peers.transport, self._make_feed(place), faults),
            sums=GradientSums(buckets, self._peers.groups),
            vote=Vote(self._peers.groups.get(active), active.index(self._peers.rank), len(active)),
            updater=holding.make_updater(self._loaded.lr),
            trace=holding.trace,
            clock=VirtualClock(emulated) if emulated else RealClock(self._device),
            emulated=emulated is not None,
            state_bytes=lambda: holding.state_bytes() + bucket_bytes,
            clock_zero_s=assignment.clock_zero_s,
            receive_s=self._spec.timeout_s,
        )

    def _evaluates_at(self, step: int) -> bool:
        return self._spec.options.evaluates_at(step, self._loaded.samples.num_steps)

    def _make_feed(self, place: Place) -> Feed | None:
        """What the first and the last stage of a group draw from; none in between."""
        assert self._assignment is not None
        if not (place.is_first or place.is_last):
            return None
        plan, samples = self._assignment.plan, self._loaded.samples
        return Feed(
            self._loaded.source,
            lambda step: samples.share(plan, place.group_index, step).all_positions(),
            samples.num_steps,
            self._device,
            self._spec.options.prefetch_microbatches,
        )

    # Steps -------------------------------------------------------------------------------

    def run(self) -> RunEnd:
        """Run steps until the window ends, the training ends, or some worker was told to hold.

        Evaluations come where they are due; with ``early_stop`` the window ends behind each. All
        active workers stop after the same step, whenever each of them heard of it. Errors end the
        run too: they are in the outbox before this returns.
        """
        try:
            return self._run()
        except Exception as error:
            self._fail(error)
            return RunEnd(self._holding.next_step, "failed")

    def _run(self) -> RunEnd:
        runner, assignment = self._runner, self._assignment
        if runner is None or assignment is None:
            return RunEnd(self._holding.next_step, "window")  # idle: nothing to do
        if feed := runner.executor.feed:
            feed.begin(self._holding.next_step)
        verdict = runner.agree(self._window(assignment), time.monotonic())
        at_s = verdict.end_s
        while True:
            verdict, at_s, has_evaluated = self._evaluate(assignment, verdict, at_s)
            if reason := self._why_end(verdict, has_evaluated=has_evaluated):
                break
            if not runner.emulated:
                at_s = time.monotonic()
            verdict, report = runner.run(self._holding.next_step, at_s, self._window(assignment))
            at_s = report.ended_s + assignment.clock_zero_s
            self._holding.next_step += 1
            self.outbox.put(report)
            self._save_in_passing(assignment, verdict)
        self._hold = False
        return RunEnd(self._holding.next_step, reason)

    def _evaluate(
        self, assignment: Assignment, verdict: Verdict, at_s: float
    ) -> tuple[Verdict, float, bool]:
        """Do the rounds that are owed here, until somebody is told to hold; whether any was."""
        evaluator, step, begun = self._evaluator, self._holding.next_step, False
        while evaluator is not None and not verdict.hold and evaluator.owes(step):
            verdict, report, at_s = evaluator.run(step, at_s, self._window(assignment))
            self.outbox.put(report)
            begun = True
        return verdict, at_s, begun

    def _why_end(self, verdict: Verdict, *, has_evaluated: bool) -> EndReason | None:
        step, evaluator = self._holding.next_step, self._evaluator
        owes = evaluator is not None and evaluator.owes(step)
        if step >= self._loaded.samples.num_steps and not owes:
            return "finished"
        if verdict.hold:
            return "hold"
        judged = has_evaluated and self._spec.options.early_stop is not None  # by the head
        return "window" if judged or step >= verdict.end_step else None

    def _save_in_passing(self, assignment: Assignment, verdict: Verdict) -> None:
        """Begin a checkpoint, if one is due; one that may be the best waits for the one before."""
        step = self._holding.next_step
        saves = verdict.save or (verdict.due and self._may_be_best(step))
        if saves and self._first_owned:
            layers = self._holding.live(self._first_owned)
            self._writer.begin(step, assignment.generation, layers)
        self._writer.late = verdict.due and not saves

    def _may_be_best(self, step: int) -> bool:
        return self._spec.options.keep_best is not None and self._evaluates_at(step)

    def _window(self, assignment: Assignment) -> Window:
        step = self._holding.next_step + 1
        saves = assignment.checkpoint and not self._holding.discards
        due = saves and (self._writer.is_due(step) or self._may_be_best(step))
        return Window(self._hold, self._end_step, self._patience_s, due, self._writer.busy)

    def extend(self, end_step: int, patience_s: float | None = None) -> None:
        """Let the window end at ``end_step``; the run obeys once every active worker knows.

        ``patience_s``: how long others are waited for in a step from now on, counted from its
        start; as before when absent.
        """
        self._end_step, self._patience_s = end_step, patience_s or self._patience_s

    @property
    def waits_for(self) -> str:
        """Which call of the user's data the run waits for, in words; empty: none. Any thread."""
        return next(filter(None, (feed.waits_for for feed in self._feeds())), "")

    def hold(self) -> None:
        """Ask for a stop at the next step boundary on which all active workers agree."""
        self._hold = True

    def save(self, step: int, layers: Sequence[int] | None = None) -> CheckpointPart:
        """Write layers of this worker; only at the boundary before ``step``.

        Returns once they are durable or could not be written; one that is under way comes first.

        Args:
            step: Where it must stand.
            layers: Which; those it owns first when absent.

        Raises:
            ValueError: If the worker stands elsewhere.
        """
        chosen = self._first_owned if layers is None else layers
        if self._assignment is None or not self._holding.has_begun or not chosen:
            return CheckpointPart(step, 0, ())
        if step != self._holding.next_step:
            raise ValueError(
                f"asked to save step {step}, but stands before step {self._holding.next_step}"
            )
        return self._writer.write(step, self._assignment.generation, self._holding.live(chosen))

    def checksums(self) -> dict[int, str]:
        """SHA-256 of the state of each layer held here; the same on all owners of a layer."""
        return self._holding.checksums()

    # After a fault -----------------------------------------------------------------------

    def abort(self) -> None:
        """End the run under way: a fault elsewhere has made its step impossible. Any thread.

        What waits for a message errs at once; what waits in a collective is freed by the peers
        that err: torch cannot break one off from within.
        """
        self._stop_feed()
        self._peers.hang_up()

    def standing(self) -> Standing:
        """Where the worker stands; only while it does not run."""
        return self._holding.standing()

    def settle(self, step: int, verdict: Verdict | None) -> None:
        """Come to the boundary before ``step``, see ``Holding.settle``."""
        self._holding.settle(step, verdict, self._loaded.samples)
        self._writer.late |= verdict is not None and verdict.due  # whoever was lost has its part

    def rewind(self, step: int) -> None:
        """Forget every layer: all of them will be restored as of ``step``."""
        self._stop_feed()
        self._holding.rewind(step)

    # The end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close sockets and process groups, which frees waiting peers. Any time, any thread."""
        self._closed = True
        self._writer.cancel()
        self._leave()

    def _leave(self, error: Exception | None = None) -> None:
        self._retire()
        self._peers.leave(error)

    def _retire(self) -> None:
        self._stop_feed()
        self._runner = self._evaluator = None  # they hold references to process groups

    def _stop_feed(self) -> None:
        for feed in self._feeds():
            feed.stop()

    def _feeds(self) -> list[Feed]:
        runner, evaluator = self._runner, self._evaluator  # any thread may come here
        feeds = [runner.executor.feed if runner else None, evaluator.feed if evaluator else None]
        return [feed for feed in feeds if feed is not None]

    def _fail(self, error: Exception) -> None:
        """Free the peers at once, then report; an error that ``close`` itself caused is none."""
        asked_to_close = self._closed
        self._leave(error)
        if asked_to_close:
            return
        logger.error("device %s, step %d", self._device_id, self._holding.next_step, exc_info=error)
        self.outbox.put(
            worker_failed(error, self._device_id, self._holding.next_step, self._peers.device_ids)
        )
