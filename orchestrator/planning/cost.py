"""The one model of step time, memory and money: search, decision and simulation all ask it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import fsum
from typing import NamedTuple

from orchestrator.core.cluster import Device, Link, Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.schedule import list_schedule
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.memory import MemoryModel
from orchestrator.planning.pipeline import (
    Chain,
    exposed_s,
    make_chain,
    period_s,
    pipeline_s,
)
from orchestrator.planning.sums import GradientSum, GradientSums
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
        self.standing_usd_per_s = fsum(
            problem.cluster.price_usd_per_s(d.device_id)
            for d in problem.cluster.devices
            if problem.cluster.offer(d.pool).billed == "while_present"
        )
        self.cuts: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}  # of partition
        self._slowdowns: dict[tuple[str, ...], float] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._seconds: dict[tuple[tuple[str, ...], int, int, int], tuple[float, float]] = {}
        self._chains: dict[tuple[object, ...], Chain] = {}
        self._figures: dict[tuple[Group, str], _GroupFigures] = {}
        self._sums = GradientSums(self.tables, self.link, self.device)

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

    def boundary_s(self, source: Team, target: Team, border_layer: int, microbatch: int) -> float:
        """Seconds to carry one boundary from a stage to its neighbour over the idle link."""
        return self.link(source, target).transfer_s(
            self.tables.boundary_bytes(border_layer, microbatch)
        )

    def memory_error(self, groups: Sequence[Group], schedule: str = "1f1b") -> str | None:
        """Which device lacks most memory, and how much; None when all fit."""
        return self.memory.error(groups, schedule)

    # Time of a group (3.2, 3.3) ------------------------------------------------------

    def _chain(self, stages: tuple[Stage, ...], microbatch: int) -> Chain:
        key = (
            tuple((s.team.device_ids, s.first_layer) for s in stages),
            stages[-1].end_layer,
            microbatch,
        )
        found = self._chains.get(key)
        if found is None:
            found = self._chains[key] = self._build_chain(stages, microbatch)
        return found

    def _build_chain(self, stages: tuple[Stage, ...], microbatch: int) -> Chain:
        seconds = [
            self.stage_seconds(s.team, s.first_layer, s.end_layer, microbatch) for s in stages
        ]
        borders_s, occupied_s = [], 0.0
        for upper, lower in pairwise(stages):
            size = self.tables.boundary_bytes(upper.end_layer - 1, microbatch)
            down, up = self.link(upper.team, lower.team), self.link(lower.team, upper.team)
            borders_s.append((down.transfer_s(size), up.transfer_s(size)))
            occupied_s = max(occupied_s, down.occupied_s(size), up.occupied_s(size))
        return make_chain(seconds, borders_s, occupied_s)

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
        count = len(stages)
        if schedule == "gpipe":
            return tuple(replace(s, inflight=num_microbatches) for s in stages)
        chain = self._chain(stages, microbatch)
        slow = max((*chain.down_s, *chain.up_s), default=0.0) > SLOW_LINK_RATIO * max(chain.work_s)
        found, limit = [], num_microbatches + 2 * count
        for s, stage in enumerate(stages):
            inflight = count - s
            if slow:
                room = self.memory.max_held(stage, microbatch, replicated=replicated)
                wanted = 2 * inflight - 1
                if min(wanted, num_microbatches) > room:
                    wanted = max(inflight, room)
                inflight = limit = min(wanted, limit)
            found.append(stage if stage.inflight == inflight else replace(stage, inflight=inflight))
        return tuple(found)

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
        chain = self._chain(stages, microbatch)
        return GroupCurve(
            chain.round_trip_s[0], period_s(chain, [s.inflight for s in stages], schedule), most
        )

    def _figure(self, group: Group, schedule: str) -> _GroupFigures:
        key = (group, schedule)
        found = self._figures.get(key)
        if found is None:
            found = self._figures[key] = self._build_figures(group, schedule)
        return found

    def _build_figures(self, group: Group, schedule: str) -> _GroupFigures:
        stages, sizes = group.stages, Counter(group.microbatches)
        inflight_S = [stage.inflight for stage in stages]
        chains = {m: self._chain(stages, m) for m in sizes}
        group_s = pipeline_s(chains, group.microbatches, inflight_S, schedule)
        compute_S = [
            sum(n * chains[m].work_s[s] for m, n in sizes.items()) for s in range(len(stages))
        ]
        links_s = exposed_s(chains, group.microbatches, inflight_S, schedule)
        last = chains[group.microbatches[-1]]
        ends, end_s = [], group_s
        for s in range(len(stages)):
            ends.append(end_s)
            if s < len(last.up_s):
                end_s -= last.backward_s[s] + last.up_s[s]
        tables = [self.tables.times(s.team.kind, s.team.size, m) for s in stages for m in sizes]
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
            egress_usd=sum(n * self.egress_usd(stages, m) for m, n in sizes.items()),
            interpolated=any(t.interpolated for t in tables),
        )

    def _update_s(self, stage: Stage) -> float:
        size = self.problem.microbatch_samples
        table = self.tables.times(stage.team.kind, stage.team.size, size).update_s
        return self.slowdown(stage.team) * (table[stage.end_layer] - table[stage.first_layer])

    def egress_usd(self, stages: tuple[Stage, ...], microbatch: int) -> float:
        """What one microbatch pays for its boundaries there and back."""
        total = 0.0
        for upper, lower in pairwise(stages):
            per_byte = (
                self.link(upper.team, lower.team).egress_usd_per_byte
                + self.link(lower.team, upper.team).egress_usd_per_byte
            )
            total += per_byte * self.tables.boundary_bytes(upper.end_layer - 1, microbatch)
        return total

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
        sums = self._sums.of(groups)
        sync_s = self._sync_s(sums, groups, ends_s, slowest_s)
        update_s = max(f.update_s for f in figures) + self.problem.model.step_overhead_s
        step_s = slowest_s + sync_s + update_s
        egress_usd = sum(f.egress_usd for f in figures) + sum(s.egress_usd for s in sums)
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

    def _sync_s(
        self,
        sums: Sequence[GradientSum],
        groups: Sequence[Group],
        ends_s: Sequence[Sequence[float]],
        slowest_s: float,
    ) -> float:
        if not sums:
            return 0.0
        first_of = list(accumulate((len(g.stages) for g in groups), initial=0))
        release_s = [
            max(ends_s[g][s] for g, s in z.owners) if self.problem.overlap else slowest_s
            for z in sums
        ]
        finish_s = list_schedule(
            release_s,
            [z.duration_s for z in sums],
            [[first_of[g] + s for g, s in z.owners] for z in sums],
        )
        return max(0.0, max(finish_s) - slowest_s)

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
