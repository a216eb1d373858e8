"""One group by itself: the times of its stages, links and pipeline, and what it may hold."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.identity import ByIdentity
from orchestrator.planning.inflight import MOST_INFLIGHT_RATIO, holding
from orchestrator.planning.likeness import Likeness
from orchestrator.planning.pipeline import (
    Chain,
    count_sizes,
    make_chain,
    period_s,
    pipeline_s,
    steady,
)

if TYPE_CHECKING:
    from orchestrator.planning.fading import Fading

MAX_FOLLOWED = 50_000
"""Chains up to which a later problem goes on with what is known: some 5 KiB each, in all."""


@dataclass(frozen=True, slots=True)
class GroupCurve:
    """Pipeline time over n microbatches, ``fill_drain_s + (n - 1) * period_s``; sums come after."""

    fill_drain_s: float
    period_s: float
    max_microbatches: int  # as far as memory goes


class _ChainFigures(NamedTuple):
    """What one microbatch of a size costs on a group's stages."""

    chain: Chain
    egress_usd: float
    interpolated: bool


class GroupFigures(NamedTuple):
    """What a group costs by itself, whatever the others do."""

    group_s: float
    stage_ends_s: tuple[float, ...]
    exposed_s: float  # part of group_s that links add
    update_s: float
    compute_s: tuple[float, ...]  # per device, in stage order
    busy_s: float  # their sum
    egress_usd: float
    interpolated: bool
    peaks_bytes: tuple[tuple[float, ...], tuple[float, ...]]  # per stage: alone, replicated
    fits: tuple[bool, bool]  # memory: alone, replicated


class GroupModel(Likeness):
    """Times of groups in one PlanningProblem. What is computed once serves all that are alike.

    Source: docs/model.md, sections 3.2 to 3.5.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        super().__init__(problem)
        new = self.memories.new
        self._seconds: Fading[tuple[int, int, int, int], tuple[float, float]] = new()
        self._updates: Fading[tuple[int, int, int], float] = new()
        self._chains: Fading[tuple[object, ...], _ChainFigures] = new()
        self._inflight: Fading[tuple[object, ...], tuple[tuple[int, bool], ...]] = new()
        self._figures: Fading[tuple[object, ...], GroupFigures] = new()
        self._seen: dict[str, ByIdentity[Group, GroupFigures]] = {}  # by schedule

    def following(self, problem: PlanningProblem) -> Self | None:
        """The model of a later problem, with all that is still true of teams and links there.

        None when model, batch, microbatch or memory margin differ, or when too much has piled up.
        """
        mine = self.problem
        if (
            max(self._chains.num_known, len(self._numbers)) > MAX_FOLLOWED
            or problem.model != mine.model
            or problem.batch_samples != mine.batch_samples
            or problem.microbatch_samples != mine.microbatch_samples
            or problem.overlap != mine.overlap
            or problem.memory_margin_ratio != mine.memory_margin_ratio
            or problem.activation_checkpointing != mine.activation_checkpointing
        ):
            return None
        self.memories.follow()
        other = copy(self)
        other._look_anew(problem, self.memory.following(problem))
        other._seen = {}
        return other

    def stage_seconds(
        self,
        team: Team,
        first_layer: int,
        end_layer: int,
        microbatch: int,
        *,
        recompute: bool = False,
    ) -> tuple[float, float]:
        """Forward and backward seconds of one microbatch: slow as the team is, with its input.

        ``recompute``: backward begins with another forward, see ``LayerTables.again``.

        Raises:
            ValueError: If the profile has no times for the team's kind and size.
        """
        key = (self.alike(team), ~first_layer if recompute else first_layer, end_layer, microbatch)
        found = self._seconds[key]
        if found is None:
            times, slowdown = (
                self.tables.times(team.kind, team.size, microbatch),
                self.slowdown(team),
            )
            draws = first_layer == 0 or end_layer == self.problem.model.num_layers
            backward_s = slowdown * (times.backward_s[end_layer] - times.backward_s[first_layer])
            if recompute:
                again = self.tables.again(end_layer)
                backward_s += slowdown * (times.forward_s[again] - times.forward_s[first_layer])
            found = (
                slowdown * (times.forward_s[end_layer] - times.forward_s[first_layer])
                + (microbatch * self.input_s(team) if draws else 0.0),
                backward_s,
            )
            self._seconds[key] = found
        return found

    def seconds_of(self, stage: Stage, microbatch: int) -> tuple[float, float]:
        """``stage_seconds`` of a stage as the plan has it."""
        first, end = stage.first_layer, stage.end_layer
        return self.stage_seconds(stage.team, first, end, microbatch, recompute=stage.recompute)

    def _chain(self, stages: tuple[Stage, ...], microbatch: int) -> _ChainFigures:
        key = (self.key(stages), microbatch)
        found = self._chains[key]
        if found is None:
            found = self._chains[key] = self._build_chain(stages, microbatch)
        return found

    def _build_chain(self, stages: tuple[Stage, ...], microbatch: int) -> _ChainFigures:
        seconds = [self.seconds_of(stage, microbatch) for stage in stages]
        borders_s, occupied_s, egress_usd = [], [], 0.0
        for upper, lower in pairwise(stages):
            size = self.tables.boundary_bytes(upper.end_layer - 1, microbatch)
            down, up = self.link(upper.team, lower.team), self.link(lower.team, upper.team)
            busy_s = down.occupied_s(size), up.occupied_s(size)
            occupied_s.append(busy_s)
            borders_s.append((down.latency_s + busy_s[0], up.latency_s + busy_s[1]))
            egress_usd += (down.egress_usd_per_byte + up.egress_usd_per_byte) * size
        return _ChainFigures(
            chain=make_chain(seconds, borders_s, occupied_s),
            egress_usd=egress_usd,
            interpolated=any(
                self.tables.times(s.team.kind, s.team.size, microbatch).interpolated for s in stages
            ),
        )

    def chain(self, stages: tuple[Stage, ...], microbatch: int) -> Chain:
        """Times of one microbatch on the stages and the links between them."""
        return self._chain(stages, microbatch).chain

    def most_microbatches(
        self,
        stages: tuple[Stage, ...],
        microbatch: int,
        end_s: float,
        shift: tuple[int, int] | None = None,
    ) -> float:
        """How many pass the stages by a time at most, in closed form, whatever is in flight.

        A stage waits until the first one reaches it, and has to be done with the last one early
        enough.

        Args:
            stages: Of the group.
            microbatch: Samples of each.
            end_s: The time.
            shift: A stage, and where it ends instead: only it and the next one are looked at.
        """
        chain = self._chain(stages, microbatch).chain
        if shift is None:
            return min(
                (end_s - fill_s - drain_s) / work_s
                for fill_s, drain_s, work_s in zip(
                    chain.fill_s, chain.drain_s, chain.work_s, strict=True
                )
            )
        s, border = shift
        upper, lower = stages[s], stages[s + 1]
        size = self.tables.boundary_bytes(border - 1, microbatch)
        down, up = self.link(upper.team, lower.team), self.link(lower.team, upper.team)
        upper_s = sum(self.stage_seconds(upper.team, upper.first_layer, border, microbatch))
        lower_s = sum(self.stage_seconds(lower.team, border, lower.end_layer, microbatch))
        further_s = end_s - chain.fill_s[s] - chain.drain_s[s]
        trip_s = (
            upper_s + down.latency_s + down.occupied_s(size) + up.latency_s + up.occupied_s(size)
        )
        return min(further_s / upper_s, (further_s - trip_s) / lower_s)

    def with_inflight(
        self,
        stages: tuple[Stage, ...],
        microbatch: int,
        num_microbatches: int,
        schedule: str,
        *,
        replicated: bool = True,
    ) -> tuple[Stage, ...]:
        """The same stages with K_s set, and told which of them recompute.

        1F1B: what the shortest period needs (``best_inflight``), and where memory and that period
        allow at least S - s, or 2 (S - s) - 1 behind links that take more than a tenth of the
        longest stage. GPipe: all microbatches. A stage recomputes where memory has too little
        room for that otherwise, unless the pipeline is then slower than one with less in flight.
        """
        longest = MOST_INFLIGHT_RATIO * len(stages)  # no stage holds more, whatever the share
        count = num_microbatches if schedule == "gpipe" else min(num_microbatches, longest)
        chain_key = self.key(stages)
        key = (chain_key, microbatch, count, schedule, replicated)
        found = self._inflight[key]
        if found is None:
            held = holding(self, stages, microbatch, count, schedule, replicated=replicated)
            found = tuple([(s.inflight, s.recompute) for s in held])
            self._inflight[key] = found
        held = tuple(
            [
                s
                if (s.inflight, s.recompute) == how
                else Stage(s.team, s.first_layer, s.end_layer, how[0], s.splits, how[1])
                for s, how in zip(stages, found, strict=True)
            ]
        )
        if all(a.recompute == b.recompute for a, b in zip(stages, held, strict=True)):
            self.same_key(held, chain_key)
        return held

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

    def steady(
        self, stages: tuple[Stage, ...], microbatch: int, schedule: str
    ) -> tuple[float, int]:
        """The steady period, and after how many microbatches it comes round; see ``steady``."""
        chain = self._chain(stages, microbatch).chain
        return steady(chain, [stage.inflight for stage in stages], schedule)

    def figures(self, group: Group, schedule: str) -> GroupFigures:
        """What a group costs by itself."""
        seen = self._seen.get(schedule)
        if seen is None:
            seen = self._seen[schedule] = ByIdentity()
        return seen.of(group, lambda group: self._figures_of(group, schedule))

    def _figures_of(self, group: Group, schedule: str) -> GroupFigures:
        key = (
            self.key(group.stages),
            tuple([s.inflight for s in group.stages]),
            group.microbatches,
            schedule,
        )
        found = self._figures[key]
        if found is None:
            found = self._figures[key] = self._build_figures(group, schedule)
        return found

    def _build_figures(self, group: Group, schedule: str) -> GroupFigures:
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
        busiest_s = max(compute_S)
        group_s, links_s = pipeline_s(chains, microbatches, inflight_S, schedule)
        group_s = max(group_s, busiest_s)  # sums differ in their last digits
        peaks = self.memory.peaks_bytes(group, schedule)
        usable = [self.memory.usable_bytes(stage.team) for stage in stages]
        last = chains[microbatches[-1]]
        ends = [group_s]
        for backward_s, up_s in zip(last.backward_s, last.up_s, strict=False):
            ends.append(ends[-1] - backward_s - up_s)
        return GroupFigures(
            group_s=group_s,
            stage_ends_s=tuple(ends),
            exposed_s=min(links_s, group_s - busiest_s),
            update_s=max(self._update_s(s) for s in stages),
            compute_s=tuple(
                seconds
                for seconds, stage in zip(compute_S, stages, strict=True)
                for _ in stage.team.device_ids
            ),
            busy_s=sum(
                seconds * stage.team.size for seconds, stage in zip(compute_S, stages, strict=True)
            ),
            egress_usd=sum(n * figures[m].egress_usd for m, n in sizes.items()),
            interpolated=any(f.interpolated for f in figures.values()),
            peaks_bytes=peaks,
            fits=(_all_below(peaks[0], usable), _all_below(peaks[1], usable)),
        )

    def _update_s(self, stage: Stage) -> float:
        key = (self.alike(stage.team), stage.first_layer, stage.end_layer)
        found = self._updates[key]
        if found is None:
            team, size = stage.team, self.problem.microbatch_samples
            table = self.tables.times(team.kind, team.size, size).update_s
            found = self.slowdown(team) * (table[stage.end_layer] - table[stage.first_layer])
            self._updates[key] = found
        return found

    def egress_usd(self, stages: tuple[Stage, ...], microbatch: int) -> float:
        """What one microbatch pays for its boundaries there and back."""
        return self._chain(stages, microbatch).egress_usd


def _all_below(peaks: Sequence[float], usable: Sequence[float]) -> bool:
    return all(peak <= most for peak, most in zip(peaks, usable, strict=True))
