"""The one model of step time, memory and money: search, decision and simulation all ask it."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from orchestrator.core.cluster import Device, Link, Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.memory import MemoryModel
from orchestrator.planning.pipeline import (
    Chain,
    count_sizes,
    make_chain,
    period_s,
    pipeline_s,
)
from orchestrator.planning.sums import GradientSums
from orchestrator.planning.tables import LayerTables

SLOW_LINK_RATIO = 0.10  # of the longest stage: from here on more microbatches are kept in flight


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """Pipeline time over n microbatches: ``fill_drain_s + (n - 1) * period_s``."""

    fill_drain_s: float
    period_s: float
    max_microbatches: int  # as far as memory goes

    def seconds(self, num_microbatches: int) -> float:
        """Time of a step's pipeline; its gradient sums come after."""
        return self.fill_drain_s + (num_microbatches - 1) * self.period_s


class _ChainFigures(NamedTuple):
    """What one microbatch of a size costs on a group's stages."""

    chain: Chain
    egress_usd: float
    interpolated: bool


class _GroupFigures(NamedTuple):
    """What a group costs by itself, whatever the others do."""

    group_s: float
    stage_ends_s: tuple[float, ...]
    exposed_s: float  # part of group_s that links add
    update_s: float
    compute_s: tuple[tuple[str, float], ...]  # per device
    egress_usd: float
    interpolated: bool


class CostModel:
    """Prices plans for one PlanningProblem. Everything is kept once computed.

    Source: docs/model.md, section 3.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.tables = LayerTables(problem.model)
        self.memory = MemoryModel(problem, self.tables)
        self.standing_usd_per_s = _standing_usd_per_s(problem)
        self.cuts: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}  # of partition
        self._slowdowns: dict[tuple[str, ...], float] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._seconds: dict[tuple[tuple[str, ...], int, int, int], tuple[float, float]] = {}
        self._updates: dict[tuple[tuple[str, ...], int, int], float] = {}
        self._chains: dict[tuple[object, ...], _ChainFigures] = {}
        self._inflight: dict[tuple[object, ...], tuple[Stage, ...]] = {}
        self._figures: dict[tuple[object, ...], _GroupFigures] = {}
        self._sums = GradientSums(self.tables, problem.cluster)

    def repriced(self, problem: PlanningProblem) -> "CostModel":
        """The model of a problem that differs in the offers' prices only; times are kept."""
        other = copy(self)
        other.problem, other.standing_usd_per_s = problem, _standing_usd_per_s(problem)
        return other

    # Lookups -------------------------------------------------------------------------

    def device(self, team: Team) -> Device:
        """The first member of a team: the endpoint of its links."""
        return self.problem.cluster.device(team.device_ids[0])

    def link(self, source: Team, target: Team) -> Link:
        """The path between two teams. Raises ValueError when nobody described it."""
        key = (source.device_ids[0], target.device_ids[0])
        if key not in self._links:
            self._links[key] = self.problem.cluster.link(self.device(source), self.device(target))
        return self._links[key]

    def slowdown(self, team: Team) -> float:
        """That of its slowest member."""
        found = self._slowdowns.get(team.device_ids)
        if found is None:
            found = max(self.problem.cluster.device(d).slowdown for d in team.device_ids)
            self._slowdowns[team.device_ids] = found
        return found

    def stage_seconds(
        self, team: Team, first_layer: int, end_layer: int, microbatch: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of one microbatch, slowdown included.

        Raises:
            ValueError: If the profile has no times for the team's kind and size.
        """
        key = (team.device_ids, first_layer, end_layer, microbatch)
        found = self._seconds.get(key)
        if found is None:
            times, slowdown = (
                self.tables.times(team.kind, team.size, microbatch),
                self.slowdown(team),
            )
            found = (
                slowdown * (times.forward_s[end_layer] - times.forward_s[first_layer]),
                slowdown * (times.backward_s[end_layer] - times.backward_s[first_layer]),
            )
            self._seconds[key] = found
        return found

    def memory_error(self, groups: Sequence[Group], schedule: str = "1f1b") -> str | None:
        """Which device lacks most memory, and how much; None when all fit."""
        return self.memory.error(groups, schedule)

    # Time of a group (3.2, 3.3) ------------------------------------------------------

    def _chain(self, stages: tuple[Stage, ...], microbatch: int) -> _ChainFigures:
        key = (
            tuple([(s.team.device_ids, s.first_layer) for s in stages]),
            stages[-1].end_layer,
            microbatch,
        )
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = self._build_chain(stages, microbatch)
        return found

    def _build_chain(self, stages: tuple[Stage, ...], microbatch: int) -> _ChainFigures:
        seconds = [
            self.stage_seconds(s.team, s.first_layer, s.end_layer, microbatch) for s in stages
        ]
        borders_s, occupied_s, egress_usd = [], 0.0, 0.0
        for upper, lower in pairwise(stages):
            size = self.tables.boundary_bytes(upper.end_layer - 1, microbatch)
            down, up = self.link(upper.team, lower.team), self.link(lower.team, upper.team)
            borders_s.append((down.transfer_s(size), up.transfer_s(size)))
            occupied_s = max(occupied_s, down.occupied_s(size), up.occupied_s(size))
            egress_usd += (down.egress_usd_per_byte + up.egress_usd_per_byte) * size
        return _ChainFigures(
            chain=make_chain(seconds, borders_s, occupied_s),
            egress_usd=egress_usd,
            interpolated=any(
                self.tables.times(s.team.kind, s.team.size, microbatch).interpolated for s in stages
            ),
        )

    def with_inflight(
        self,
        stages: tuple[Stage, ...],
        microbatch: int,
        num_microbatches: int,
        schedule: str,
        *,
        replicated: bool = True,
    ) -> tuple[Stage, ...]:
        """The same stages with K_s set.

        1F1B: K_s = S - s, or up to 2 (S - s) - 1 behind links that take more than a tenth of
        the longest stage, as far as memory allows; the last stage keeps 1, and K_s never
        grows along the chain, which would deadlock. GPipe: all microbatches.
        """
        longest = 2 * len(stages) - 1  # no stage holds more, whatever the share
        count = num_microbatches if schedule == "gpipe" else min(num_microbatches, longest)
        key = (
            tuple([(s.team.device_ids, s.first_layer) for s in stages]),
            stages[-1].end_layer,
            microbatch,
            count,
            schedule,
            replicated,
        )
        found = self._inflight.get(key)
        if found is None:
            if schedule == "gpipe":
                inflight_S = [count] * len(stages)
            else:
                inflight_S = self._one_f_one_b_inflight(stages, microbatch, count, replicated)
            found = tuple(
                replace(stage, inflight=inflight)
                for stage, inflight in zip(stages, inflight_S, strict=True)
            )
            self._inflight[key] = found
        return found

    def _one_f_one_b_inflight(
        self, stages: tuple[Stage, ...], microbatch: int, count: int, replicated: bool
    ) -> list[int]:
        chain = self._chain(stages, microbatch).chain
        slow_s = SLOW_LINK_RATIO * max(chain.work_s)
        plain_S = list(range(len(stages), 0, -1))
        if max((*chain.down_s, *chain.up_s), default=0.0) <= slow_s:
            return plain_S
        found: list[int] = []
        for stage, plain in zip(stages, plain_S, strict=True):
            room = self.memory.max_held(stage, microbatch, replicated=replicated)
            wanted = 2 * plain - 1
            if min(wanted, count) > room:
                wanted = max(plain, room)
            found.append(min(wanted, found[-1]) if found else wanted)
        return found

    def curve(
        self,
        stages: tuple[Stage, ...],
        microbatch: int,
        schedule: str,
        *,
        replicated: bool = True,
    ) -> GroupCurve:
        """Closed form of the group's time over its number of full microbatches.

        ``max_microbatches`` is memory's limit, 0 when not even one fits; without a limit it
        is the number of samples in the batch.
        """
        most = self.problem.batch_samples
        for stage in stages:
            held = self.memory.max_held(stage, microbatch, replicated=replicated)
            if schedule == "gpipe" or held < stage.inflight:
                most = min(most, held)
        chain = self._chain(stages, microbatch).chain
        return GroupCurve(
            chain.round_trip_s[0], period_s(chain, [s.inflight for s in stages], schedule), most
        )

    def _figure(self, group: Group, schedule: str) -> _GroupFigures:
        key = (
            tuple([(s.team.device_ids, s.first_layer, s.inflight) for s in group.stages]),
            group.microbatches,
            schedule,
        )
        found = self._figures.get(key)
        if found is None:
            found = self._figures[key] = self._build_figures(group, schedule)
        return found

    def _build_figures(self, group: Group, schedule: str) -> _GroupFigures:
        stages, microbatches = group.stages, group.microbatches
        sizes = count_sizes(microbatches)
        figures = {m: self._chain(stages, m) for m in sizes}
        chains = {m: f.chain for m, f in figures.items()}
        inflight_S = [stage.inflight for stage in stages]
        compute_S = [0.0] * len(stages)
        for m, n in sizes.items():
            compute_S = [
                total + n * work for total, work in zip(compute_S, chains[m].work_s, strict=True)
            ]
        group_s, links_s = pipeline_s(chains, microbatches, inflight_S, schedule)
        last = chains[microbatches[-1]]
        ends = [group_s]
        for backward_s, up_s in zip(last.backward_s, last.up_s, strict=False):
            ends.append(ends[-1] - backward_s - up_s)
        return _GroupFigures(
            group_s=group_s,
            stage_ends_s=tuple(ends),
            exposed_s=min(links_s, group_s - max(compute_S)),
            update_s=max(self._update_s(s) for s in stages),
            compute_s=tuple(
                (device, seconds)
                for seconds, stage in zip(compute_S, stages, strict=True)
                for device in stage.team.device_ids
            ),
            egress_usd=sum(n * figures[m].egress_usd for m, n in sizes.items()),
            interpolated=any(f.interpolated for f in figures.values()),
        )

    def _update_s(self, stage: Stage) -> float:
        key = (stage.team.device_ids, stage.first_layer, stage.end_layer)
        found = self._updates.get(key)
        if found is None:
            team, size = stage.team, self.problem.microbatch_samples
            table = self.tables.times(team.kind, team.size, size).update_s
            found = self.slowdown(team) * (table[stage.end_layer] - table[stage.first_layer])
            self._updates[key] = found
        return found

    def egress_usd(self, stages: tuple[Stage, ...], microbatch: int) -> float:
        """What one microbatch pays for its boundaries there and back."""
        return self._chain(stages, microbatch).egress_usd

    # The whole step (3.6, 3.7) -------------------------------------------------------

    def evaluate(
        self,
        groups: Sequence[Group],
        schedule: str,
        *,
        stage_ends_s: Sequence[Sequence[float]] | None = None,
    ) -> StepEstimate:
        """Time, rate, money and memory of a step; no groups: idle, which costs the standing rate.

        Args:
            groups: Need not fit memory; ``memory_error`` says so.
            schedule: Of every group's pipeline.
            stage_ends_s: Per group and stage, when its last backward ends, where known
                better than in closed form.
        """
        if not groups:
            return replace(IDLE_ESTIMATE, cost_usd_per_s=self.standing_usd_per_s)
        figures = [self._figure(group, schedule) for group in groups]
        ends_s = stage_ends_s or [f.stage_ends_s for f in figures]
        group_s = tuple(max(ends) for ends in ends_s)
        slowest_s = max(group_s)
        sync_s, sums_usd = self._sync(groups, ends_s, slowest_s)
        update_s = max(f.update_s for f in figures) + self.problem.model.step_overhead_s
        step_s = slowest_s + sync_s + update_s
        egress_usd = sum(f.egress_usd for f in figures) + sums_usd
        compute_s = tuple(pair for f in figures for pair in f.compute_s)
        devices_usd_per_s = self.devices_usd_per_s(d for d, _ in compute_s)
        return StepEstimate(
            step_s=step_s,
            samples_per_s=sum(group.num_samples for group in groups) / step_s,
            cost_usd_per_s=devices_usd_per_s + egress_usd / step_s,
            exposed_comm_s=figures[group_s.index(slowest_s)].exposed_s + sync_s,
            bubble_ratio=1.0 - sum(s for _, s in compute_s) / (len(compute_s) * step_s),
            group_s=group_s,
            sync_s=sync_s,
            update_s=update_s,
            egress_usd_per_s=egress_usd / step_s,
            peak_memory_bytes=self._peak_memory(groups, schedule),
            compute_s=compute_s,
            interpolated=any(f.interpolated for f in figures),
        )

    def devices_usd_per_s(self, device_ids: Iterable[str]) -> float:
        """Price of using these devices: their own, and whatever else is billed while present."""
        cluster, total = self.problem.cluster, self.standing_usd_per_s
        for device_id in device_ids:
            offer = cluster.offer(cluster.device(device_id).pool)
            if offer.billed == "while_used":
                total += offer.price_usd_per_s
        return total

    def _sync(
        self, groups: Sequence[Group], ends_s: Sequence[Sequence[float]], slowest_s: float
    ) -> tuple[float, float]:
        """Seconds that gradient sums last beyond the slowest group, and their egress in dollars."""
        if not self.problem.overlap:
            return self._sums.together(groups)
        sums = self._sums.of(groups)
        release_s = [max(ends_s[g][s] for g, s in z.owners) for z in sums]
        return (
            max(0.0, self._sums.last_finish_s(groups, sums, release_s) - slowest_s),
            sum(z.egress_usd for z in sums),
        )

    def _peak_memory(self, groups: Sequence[Group], schedule: str) -> tuple[tuple[str, int], ...]:
        return tuple(
            (device, round(peak))
            for group in groups
            for stage, peak in zip(
                group.stages,
                self.memory.peaks_bytes(group, schedule, replicated=len(groups) > 1),
                strict=True,
            )
            for device in stage.team.device_ids
        )

    def score(self, estimate: StepEstimate) -> float:
        """J = V' r - Q c in $^2/s; idle scores minus Q times the standing cost."""
        cost = estimate.cost_usd_per_s if estimate.step_s > 0 else self.standing_usd_per_s
        return (
            self.problem.penalty_weight * estimate.samples_per_s - self.problem.backlog_usd * cost
        )


def _standing_usd_per_s(problem: PlanningProblem) -> float:
    """Of the devices billed while present, used or not."""
    return fsum(
        problem.cluster.price_usd_per_s(d.device_id)
        for d in problem.cluster.devices
        if problem.cluster.offer(d.pool).billed == "while_present"
    )
