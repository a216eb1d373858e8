"""One optimizer step of an active worker: share, Program, sums, vote, update, report."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from orchestrator.core.plan import Plan, step_range, step_shares
from orchestrator.core.schedule import BACKWARD, FORWARD
from orchestrator.core.slot import StepReport, Transfer
from workers.clock import Clock, StepTimes
from workers.device import forget_peak, peak_memory_bytes
from workers.executor import Executor, Patience, Place, StepShare
from workers.reduction import GradientSums
from workers.stage import Stage
from workers.update import Ballot, Updater, Verdict, Vote, sum_of_squares


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a step and of the whole run; which step consumes which says ``step_range``."""

    batch: int
    total: int

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; the last may be short."""
        return -(-self.total // self.batch)

    def num_samples(self, step: int) -> int:
        """Samples of one step, all groups together."""
        first, end = step_range(step, self.batch, self.total)
        return end - first

    def share(self, plan: Plan, group_index: int, step: int) -> StepShare:
        """A group's part of a step; without microbatches when a short step left it none."""
        first, end = step_range(step, self.batch, self.total)
        shares = step_shares(plan.groups, end - first)
        return StepShare(
            step=step,
            first_sample=first + sum(sum(share) for share in shares[:group_index]),
            microbatches=shares[group_index],
            num_samples=end - first,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """What a worker wishes for the time after the step: to stop, and where its window ends."""

    hold: bool
    end_step: int
    patience_s: float  # how long others are waited for, from the start of the step on
    due: bool = False  # a checkpoint is
    busy: bool = False  # with writing one


@dataclass(slots=True)
class StepTrace:
    """How far a worker has come with its newest step: what settles it after a fault.

    Once any worker has applied a step, every other one holds its summed gradients: the vote
    ends nowhere before everybody has entered it.
    """

    summed: bool = False  # the gradients of a step that is not applied here are complete
    verdict: Verdict | None = None  # of the newest step that was applied here


@dataclass(slots=True)
class StepRunner:
    """Everything an active worker needs for the steps of one plan."""

    device_id: str
    plan: Plan
    place: Place
    samples: Samples
    stage: Stage
    executor: Executor
    sums: GradientSums
    vote: Vote
    updater: Updater
    trace: StepTrace
    clock: Clock
    emulated: bool
    state_bytes: Callable[[], int]  # parameters, gradients, optimizer state, buckets
    clock_zero_s: float
    receive_s: float  # least time of a wait

    def agree(self, window: Window, ready_s: float) -> Verdict:
        """Before the first step: the window that all keep to, and when the last worker is ready."""
        return self.vote.cast(
            Ballot(0.0, 0.0, 0.0, window.hold, window.end_step, ready_s), window.patience_s
        )

    def run(self, step: int, at_s: float, window: Window) -> tuple[Verdict, StepReport]:
        """Run one step that starts at ``at_s``; on return it is applied, or skipped, everywhere.

        Raises:
            UserCodeError: If the user's code raises.
            PeerLostError, LostContactError: If a worker is gone.
        """
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        lr = self.updater.lr(step)  # the user's function: it must not raise between two votes
        patience = Patience(wall_s + window.patience_s, min(self.receive_s, window.patience_s))
        share = self.samples.share(self.plan, self.place.group_index, step)
        reach = partial(self.executor.faults.reach, step)
        forget_peak(self.stage.work.device)
        loss_scale = self.stage.work.loss_scale.scale
        self.clock.begin_step(step, at_s)
        self.executor.run(share, self.clock, patience)
        worked_s = time.monotonic()
        self.sums.run(partial(reach, "reduce"), patience.left_s(worked_s))
        self.trace.summed = True
        ballot = Ballot(
            squares=sum_of_squares(self.sums.counted()) / loss_scale**2,
            weight_sum=self.stage.weight_sum,
            loss_sum=self.stage.loss_sum,
            hold=window.hold,
            end_step=window.end_step,
            end_s=self.clock.times.end_s,
            due=window.due,
            busy=window.busy,
        )
        left_s = patience.left_s(time.monotonic())
        verdict = self.vote.cast(ballot, left_s, partial(reach, "vote"))
        voted_s = time.monotonic()
        reach("agreed")
        self.updater.apply(step, verdict, share.num_samples)
        self.trace.summed, self.trace.verdict = False, verdict
        reach("apply")
        ended_s = self.clock.end_step(verdict.end_s)
        now_s = time.monotonic()
        times = self.clock.times
        report = StepReport(
            generation=self.plan.generation,
            step=step,
            device_id=self.device_id,
            group_index=self.place.group_index,
            num_samples=sum(share.microbatches),
            started_s=at_s - self.clock_zero_s,
            ended_s=ended_s - self.clock_zero_s,
            step_s=ended_s - at_s,
            compute_s=times.compute_s,
            receive_s=times.receive_s if self.emulated else self.executor.receive_s,
            reduce_s=ended_s - times.end_s if self.emulated else voted_s - worked_s,
            update_s=0.0 if self.emulated else now_s - voted_s,
            data_s=times.data_s if self.emulated else self.executor.data_s,
            wall_step_s=now_s - wall_s if self.emulated else ended_s - at_s,
            num_operations=times.num_operations,
            num_late=times.num_late,
            cpu_s=time.thread_time() - cpu_s,
            peak_memory_bytes=self._peak_memory_bytes(),
            loss=verdict.loss,
            grad_norm=verdict.grad_norm(share.num_samples),
            lr=lr,
            loss_scale=loss_scale,
            skipped=verdict.skip,
            transfers=self._sent(times) if self.emulated else self.executor.transfers,
        )
        return verdict, report

    def _sent(self, times: StepTimes) -> tuple[Transfer, ...]:
        """What went to the neighbours, by the virtual clock."""
        found = []
        for op, step in ((FORWARD, 1), (BACKWARD, -1)):
            mine = [(size_bytes, busy_s) for of, size_bytes, busy_s in times.sent if of == op]
            if mine:
                neighbour = self.place.group.stages[self.place.stage_index + step]
                ends = self.device_id, neighbour.team.device_ids[0]
                sizes, busy = zip(*mine, strict=True)
                found.append(Transfer(*ends, len(mine), sum(sizes), sum(busy)))
        return tuple(found)

    def _peak_memory_bytes(self) -> int:
        counted = peak_memory_bytes(self.stage.work.device)
        return self.state_bytes() + self.stage.peak_stash_bytes if counted is None else counted
