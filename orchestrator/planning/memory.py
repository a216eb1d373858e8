"""Bytes a stage needs on its device, and how many microbatches in flight fit there.

Shape letters: I and J layer borders (0 to L).
"""

from collections.abc import Sequence
from copy import copy
from math import inf

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.tables import LayerTables

FloatArray = NDArray[np.float64]


class MemoryModel:
    """Peak bytes of stages against usable bytes of devices. Everything is kept once computed.

    Source: docs/model.md, section 3.5.
    """

    def __init__(self, problem: PlanningProblem, tables: LayerTables) -> None:
        self._problem, self._tables = problem, tables
        self._usable: dict[tuple[str, ...], float] = {}
        self._matrices: dict[tuple[int, int], tuple[FloatArray, FloatArray, FloatArray]] = {}
        self._parts: dict[tuple[int, int, int, int], tuple[float, float, float]] = {}

    def following(self, problem: PlanningProblem) -> "MemoryModel":
        """The model of a problem with other devices; what layers need is kept."""
        other = copy(self)
        other._problem, other._usable = problem, {}
        return other

    def usable_bytes(self, team: Team) -> float:
        """Memory of its smallest member less the safety margin."""
        found = self._usable.get(team.device_ids)
        if found is None:
            smallest = min(self._problem.cluster.device(d).memory_bytes for d in team.device_ids)
            found = (1.0 - self._problem.memory_margin_ratio) * smallest
            self._usable[team.device_ids] = found
        return found

    def parts(
        self, team_size: int, first_layer: int, end_layer: int, microbatch: int
    ) -> tuple[float, float, float]:
        """Bytes held always, bytes per microbatch in flight, bytes of gradient buckets.

        Always: weights, gradients, optimizer state, the casts of autocast, two outgoing
        buffers. In flight: what autograd keeps, and the stage's input.
        """
        first, end = first_layer, end_layer
        key = (team_size, first, end, microbatch)
        found = self._parts.get(key)
        if found is None:
            model, tables = self._problem.model, self._tables
            params = tables.param_bytes(team_size, first, end)
            trained = params - tables.frozen_bytes(team_size, first, end)
            stash = tables.sizes(team_size).stash_bytes_per_sample
            inbound = tables.boundary_bytes(first - 1, microbatch) if first else 0
            outbound = tables.boundary_bytes(end - 1, microbatch) if end < model.num_layers else 0
            casts = 0.0 if model.dtype == "fp32" else 0.5 * params
            found = (
                params + trained * model.optimizer_bytes_per_param_byte + casts + 2.0 * outbound,
                (stash[end] - stash[first]) * microbatch + inbound,
                trained,
            )
            self._parts[key] = found
        return found

    def matrices(
        self, team_size: int, microbatch: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """``parts`` of all ranges: entry i, j is that of layers i to j, infinite where j <= i."""
        key = (team_size, microbatch)
        found = self._matrices.get(key)
        if found is None:
            model, tables = self._problem.model, self._tables
            borders = np.arange(model.num_layers + 1)
            empty_IJ = borders[:, None] >= borders
            params_IJ = tables.param_matrix(team_size)
            trained_IJ = params_IJ - tables.frozen_matrix(team_size)
            stash_I = np.array(tables.sizes(team_size).stash_bytes_per_sample)
            inner = range(model.num_layers - 1)
            bytes_I = [0, *(tables.boundary_bytes(i, microbatch) for i in inner), 0]
            boundary_I = np.array(bytes_I, dtype=np.float64)
            casts_IJ = 0.0 if model.dtype == "fp32" else 0.5 * params_IJ
            kept_IJ = params_IJ + trained_IJ * model.optimizer_bytes_per_param_byte
            fixed_IJ = kept_IJ + casts_IJ + 2.0 * boundary_I
            per_IJ = (stash_I - stash_I[:, None]) * microbatch + boundary_I[:, None]
            found = self._matrices[key] = (
                np.where(empty_IJ, inf, fixed_IJ),
                np.where(empty_IJ, inf, per_IJ),
                np.where(empty_IJ, inf, trained_IJ),
            )
        return found

    def _parts_of(self, stage: Stage, microbatch: int) -> tuple[float, float, float]:
        return self.parts(stage.team.size, stage.first_layer, stage.end_layer, microbatch)

    def max_held(self, stage: Stage, microbatch: int, *, replicated: bool = True) -> int:
        """Most microbatches in flight that fit the stage's memory; 0: not even one.

        ``replicated`` as for ``peaks_bytes``.
        """
        fixed, per_microbatch, bucket = self._parts_of(stage, microbatch)
        room = self.usable_bytes(stage.team) - fixed - (bucket if replicated else 0.0)
        if room < 0 or room < per_microbatch:
            return 0
        most = self._problem.batch_samples
        return min(most, int(room / per_microbatch)) if per_microbatch else most

    def peaks_bytes(
        self, group: Group, schedule: str
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Peak bytes of a member of each stage: alone, and replicated.

        Replicated: other groups hold the layers too, so gradients are packed for their sum.
        """
        count, largest = len(group.microbatches), max(group.microbatches)
        alone, packed = [], []
        for stage in group.stages:
            fixed, per_microbatch, bucket = self._parts_of(stage, largest)
            held = count if schedule == "gpipe" else min(count, stage.inflight)
            alone.append(fixed + held * per_microbatch)
            packed.append(alone[-1] + bucket)
        return tuple(alone), tuple(packed)

    def error(self, groups: Sequence[Group], schedule: str, *, replicated: bool) -> str | None:
        """Which device lacks most memory, and how much; None when all fit."""
        margin_ratio = self._problem.memory_margin_ratio
        worst, message = 0.0, None
        for group in groups:
            peaks = self.peaks_bytes(group, schedule)[replicated]
            for stage, peak in zip(group.stages, peaks, strict=True):
                usable = self.usable_bytes(stage.team)
                if peak - usable > worst:
                    worst = peak - usable
                    message = (
                        f"layers {stage.first_layer} to {stage.end_layer - 1} need "
                        f"{peak / 2**30:.5g} GiB on {stage.team.team_id!r}, where "
                        f"{usable / 2**30:.5g} are usable "
                        f"({margin_ratio:.0%} of its memory are kept free)"
                    )
        return message
