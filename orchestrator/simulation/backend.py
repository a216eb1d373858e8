"""SimulatedBackend: the cluster of a Backend on a virtual clock, slots in microseconds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from orchestrator.control.backend import Capabilities
from orchestrator.core.cluster import ClusterState
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Plan, Stage, step_range, step_shares
from orchestrator.core.schedule import SCHEDULES
from orchestrator.core.slot import (
    ClusterEvent,
    Decision,
    DeviceLost,
    Observation,
    StepEstimate,
    StepReport,
    Transfer,
    Usage,
    first_problem,
)
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.cost import CostModel
from orchestrator.simulation.executor import run_step
from orchestrator.simulation.streams import Stream
from orchestrator.simulation.traces import TraceEvent
from orchestrator.simulation.world import World

Speeds = tuple[tuple[str, float, float], ...]
"""Devices with their slow-down and how long they take to draw a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What a simulated run starts from."""

    slot_s: float
    num_samples: int
    """Positions of the whole run; only the last step may be short."""

    start_s: float = 0.0
    """The run's clock at the start; later than 0 in a later life of the run."""

    next_step: int = 0
    seed: int = 0
    max_team: int = 1
    """Largest team that plans may ask for."""

    streams: tuple[Stream, ...] = ()
    """What goes on beside the run: traces, losses, slow-downs."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way: its truth is fixed when it starts."""

    plan: Plan
    step: int
    started_s: float
    truth: StepEstimate
    cluster: ClusterState

    @property
    def ends_s(self) -> float:
        return self.started_s + self.truth.step_s


class SimulatedBackend:
    """Runs plans in virtual time. Step times come from ``executor.run_step`` on the true cluster.

    A step that is under way at the end of a slot, or when another plan is applied, is
    finished first, as workers would; a slow-down counts from the next step on.

    A device in use that is lost takes the step under way with it. Where no other group holds
    its layers, the steps since the last checkpoint are done once more before new ones are: the
    next plan starts so much later, and its devices are billed for it.
    """

    def __init__(
        self,
        cluster: ClusterState,
        model: ModelProfile,
        training: TrainingOptions,
        options: SimulationOptions,
        events: Iterable[TraceEvent] = (),
    ) -> None:
        self._world = World(cluster, events, options.streams, seed=options.seed)
        self.num_redone = 0
        """Steps that were done twice because a loss took their result."""

        self._redo = 0  # steps still to be done again
        self._model = model
        self._training = training
        self._options = options
        self._now_s = options.start_s
        self._next_step = options.next_step
        self._plan: Plan | None = None  # None: nothing applied since the start or a checkpoint
        self._running: _Step | None = None
        self._ready_s = options.start_s
        self._run_until_s = inf
        self._held: dict[str, float] = {}  # device -> release time, infinite while in use
        self._usage: list[Usage] = []
        self._reports: list[StepReport] = []
        self._events: list[ClusterEvent] = []
        self._truths: dict[tuple[Plan, int, Speeds], StepEstimate] = {}  # with ``_links``
        self._links = cluster.links

    @property
    def capabilities(self) -> Capabilities:
        """What the cost model can time."""
        return Capabilities(
            max_team=self._options.max_team, schedules=tuple(SCHEDULES), overlap=True
        )

    def observe(self) -> Observation:
        """Let a slot pass on the virtual clock and return what it brought."""
        end_s = self._now_s if self._plan is None else self._now_s + self._options.slot_s
        goes_on = not self._happen()
        while goes_on and self._now_s < end_s and not self._at_rest():
            goes_on = self._advance(min(end_s, self._world.next_event_s()))
        return self._observation()

    def apply(self, decision: Decision) -> None:
        """Take a decision over; another plan starts after the step under way and the pause."""
        self._run_until_s = inf if decision.run_until_s is None else decision.run_until_s
        plan = decision.plan
        if self._plan is not None and plan.generation == self._plan.generation:
            return
        boundary_s = max(self._now_s, self._running.ends_s if self._running else 0.0)
        self._ready_s = max(boundary_s, self._now_s + decision.migration.pause_s)
        self._plan = plan
        if self._redo and not plan.is_idle:
            self._ready_s += self._redo * self._truth(plan).step_s
        release_s = boundary_s if plan.is_idle else self._ready_s  # until then they hand over
        self._held = {d: min(known_s, release_s) for d, known_s in self._held.items()}
        self._held |= dict.fromkeys(plan.device_ids, inf)

    def checkpoint(self) -> CheckpointManifest | None:
        """Finish the step under way, release everything; layers hold nothing here."""
        if self._plan is None:
            return None
        if self._running:
            self._pass_to(self._running.ends_s)
            self._finish_step()
        generation, self._plan = self._plan.generation, None
        self._held = dict.fromkeys(self._held, self._now_s)
        return CheckpointManifest(
            step=self._next_step,
            generation=generation,
            files=(),
            num_layers=self._model.num_layers,
            samples_committed=self._range(self._next_step)[0],
            seed=self._options.seed,
            optimizer=self._training.optimizer.name,
        )

    def close(self) -> None:
        """Nothing to release."""

    # One stretch of virtual time -----------------------------------------------------

    def _advance(self, until_s: float) -> bool:
        """Go on to the next end of a step or to ``until_s``; False when the slot ends there."""
        if self._running is None and self._work_left():
            self._start_step(until_s)
        running = self._running
        if running is not None and running.ends_s <= until_s:
            self._pass_to(running.ends_s)
            self._finish_step()
        else:
            self._pass_to(until_s)
        return not self._happen()

    def _at_rest(self) -> bool:
        """Whether waiting brings nothing: the work is done, or the cap forbids another step."""
        assert self._plan is not None, "time passes only under a plan"
        if self._running or self._plan.is_idle:
            return False
        if not self._work_left():
            return True
        starts_s = max(self._now_s, self._ready_s)
        return starts_s + self._truth(self._plan).step_s > self._run_until_s

    def _work_left(self) -> bool:
        return (
            self._plan is not None
            and not self._plan.is_idle
            and self._range(self._next_step)[0] < self._options.num_samples
        )

    def _start_step(self, until_s: float) -> None:
        assert self._plan is not None, "a step needs a plan"
        starts_s = max(self._now_s, self._ready_s)
        if starts_s < until_s:
            self.num_redone, self._redo = self.num_redone + self._redo, 0
            truth = self._truth(self._plan)
            self._running = _Step(self._plan, self._next_step, starts_s, truth, self._world.cluster)

    def _finish_step(self) -> None:
        running, self._running = self._running, None
        assert running is not None, "no step is under way"
        self._reports += self._reports_of(running)
        self._next_step += 1

    def _happen(self) -> bool:
        """Let due events happen; True when one of them ends the slot."""
        events, repriced = self._world.advance(self._now_s, self._next_step)
        self._events += events
        lost = {event.device_id for event in events if isinstance(event, DeviceLost)}
        plans = {self._plan} if self._plan else set[Plan]()
        if self._running and lost & set(self._running.plan.device_ids):
            plans.add(self._running.plan)  # whose layers were still to be handed over
            self._running = None
        if any(_takes_layers(plan, lost, self._model.num_layers) for plan in plans):
            every = self._training.checkpoint_every_steps
            self._redo = self._next_step - self._next_step // every * every
            if self._plan and not self._plan.is_idle and not lost & set(self._plan.device_ids):
                self._ready_s = self._now_s + self._redo * self._truth(self._plan).step_s
        for device_id in lost:
            self._held.pop(device_id, None)
        return bool(events) or repriced

    def _pass_to(self, now_s: float) -> None:
        for device_id, release_s in tuple(self._held.items()):
            to_s = min(now_s, release_s)
            if to_s > self._now_s:
                self._usage.append(Usage(device_id, self._now_s, to_s))
            if release_s <= now_s:
                del self._held[device_id]
        self._now_s = now_s

    # What comes of it ----------------------------------------------------------------

    def _observation(self) -> Observation:
        observation = Observation(
            now_s=self._now_s,
            usage=_joined(self._usage),
            reports=tuple(self._reports),
            events=tuple(self._events),
            offers=self._world.cluster.offers,
            next_step=self._next_step,
            devices=tuple(
                replace(d, slowdown=1.0, input_s_per_sample=0.0)
                for d in self._world.cluster.devices
            ),
            leaving=self._world.leaving,
        )
        self._usage, self._reports, self._events = [], [], []
        return observation

    def _range(self, step: int) -> tuple[int, int]:
        return step_range(step, self._training.global_batch, self._options.num_samples)

    def _truth(self, plan: Plan) -> StepEstimate:
        """What the next step really takes, with the speeds of this moment."""
        first, end = self._range(self._next_step)
        devices = [self._world.cluster.device(d) for d in plan.device_ids]
        if self._world.cluster.links is not self._links:  # congested, or recovered
            self._links = self._world.cluster.links
            self._truths.clear()
        speeds = tuple((d.device_id, d.slowdown, d.input_s_per_sample) for d in devices)
        key = (plan, end - first, speeds)
        if key not in self._truths:
            shares = step_shares(plan.groups, end - first)
            groups = [
                Group(group.stages, share)
                for group, share in zip(plan.groups, shares, strict=True)
                if share
            ]
            part = Plan(plan.generation, plan.schedule, tuple(groups))
            problem = first_problem(
                self._world.cluster, self._model, self._training, max_team=self._options.max_team
            )
            self._truths[key] = run_step(CostModel(problem), part)
        return self._truths[key]

    def _reports_of(self, running: _Step) -> list[StepReport]:
        truth, plan = running.truth, running.plan
        busy_s, peaks = dict(truth.compute_s), dict(truth.peak_memory_bytes)
        first, end = self._range(running.step)
        shares = step_shares(plan.groups, end - first)
        in_pipeline_s = truth.step_s - truth.sync_s - truth.update_s
        reports = []
        for group_index, group in enumerate(plan.groups):
            num_samples = sum(shares[group_index])
            for stage in group.stages:
                draws = stage in (group.stages[0], group.stages[-1])
                transfers = self._sent(running, group.stages, stage, shares[group_index])
                for device_id in stage.team.device_ids:
                    device = running.cluster.device(device_id)
                    data_s = draws * num_samples * device.input_s_per_sample
                    reports.append(
                        StepReport(
                            generation=plan.generation,
                            step=running.step,
                            device_id=device_id,
                            group_index=group_index,
                            num_samples=num_samples,
                            started_s=running.started_s,
                            ended_s=running.ends_s,
                            step_s=truth.step_s,
                            compute_s=max(0.0, busy_s.get(device_id, 0.0) - data_s),
                            receive_s=max(0.0, in_pipeline_s - busy_s.get(device_id, 0.0)),
                            data_s=data_s,
                            reduce_s=truth.sync_s,
                            update_s=truth.update_s,
                            wall_step_s=truth.step_s,
                            peak_memory_bytes=peaks.get(device_id, 0),
                            transfers=transfers,
                        )
                    )
        return reports

    def _sent(
        self, running: _Step, stages: tuple[Stage, ...], stage: Stage, share: tuple[int, ...]
    ) -> tuple[Transfer, ...]:
        """What a stage sends to its neighbours, each message on its own."""
        cluster, index = running.cluster, stages.index(stage)
        per_sample = self._model.sizes[0].boundary_bytes_per_sample
        source, found = stage.team.device_ids[0], []
        for target_index, border in ((index + 1, stage.end_layer), (index - 1, stage.first_layer)):
            if not (0 <= target_index < len(stages) and share):
                continue
            target = stages[target_index].team.device_ids[0]
            link = cluster.link(cluster.device(source), cluster.device(target))
            sizes = [round(per_sample[border - 1] * m) for m in share]
            busy_s = sum(map(link.occupied_s, sizes))
            found.append(Transfer(source, target, len(sizes), sum(sizes), busy_s))
        return tuple(found)


def _takes_layers(plan: Plan, lost: set[str], num_layers: int) -> bool:
    """Whether some layer of a running plan is on no team that is whole."""
    if plan.is_idle or not lost & set(plan.device_ids):
        return False
    whole = [s for g in plan.groups for s in g.stages if not lost & set(s.team.device_ids)]
    return len({layer for stage in whole for layer in stage.layers}) < num_layers


def _joined(usage: Iterable[Usage]) -> tuple[Usage, ...]:
    """Stretches of one device that touch, as one."""
    found: dict[str, list[Usage]] = {}
    for stretch in usage:
        mine = found.setdefault(stretch.device_id, [])
        if mine and mine[-1].to_s == stretch.from_s:
            mine[-1] = replace(mine[-1], to_s=stretch.to_s)
        else:
            mine.append(stretch)
    return tuple(stretch for device_id in sorted(found) for stretch in found[device_id])
