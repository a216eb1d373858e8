"""Bytes a stage needs on its device, and how many microbatches in flight fit there.

Shape letters: I and J layer borders (0 to L).
"""

from collections.abc import Sequence
from copy import copy
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.tables import LayerTables

FloatArray = NDArray[np.float64]


SCALARS_BYTES = 4096
"""Of all that is small: votes, counts of steps, descriptions of messages."""


class Parts(NamedTuple):
    """Bytes of a range of layers; as matrices, of all ranges."""

    always: Any  # weights, gradients, optimizer state, casts
    inbound: Any  # what comes from the stage before, or goes back, a microbatch
    outbound: Any  # likewise to and from the next stage: of all but one in flight it may wait
    kept: Any  # per microbatch in flight
    running: Any  # beyond what is kept, while a layer runs; gradients of ties, half summed
    bucket: Any  # gradients packed for their sum
    update: Any  # what the optimizer makes and frees

    def peak(self, held: int, *, ahead: int = 1, replicated: bool) -> Any:
        """With so many microbatches in flight, and so many more at the stage before."""
        messages = self.inbound * (1 + ahead) + self.outbound * (held - 1)
        busy = self.always + messages + self.running + held * self.kept
        return _larger(busy, self.end(replicated=replicated))

    def most_held(self, usable_bytes: float, *, replicated: bool) -> float:
        """How many microbatches in flight fit, one less than at the stage before."""
        if self.peak(1, replicated=replicated) > usable_bytes:
            return 0
        more = self.kept + self.outbound
        room = usable_bytes - self.always - 2 * self.inbound - self.running + self.outbound
        return float(room / more) if more else inf

    def end(self, *, replicated: bool) -> Any:
        """At the end of a step, when no microbatch is in flight."""
        more = _larger(self.bucket, self.update) if replicated else self.update
        return self.always + more


def _larger(a: Any, b: Any) -> Any:
    # NumPy takes ten times as long for two numbers.
    return np.maximum(a, b) if isinstance(a, np.ndarray) else max(a, b)


class _Layers(NamedTuple):
    """Bytes of one microbatch, layer by layer; what is kept as sums over the layers before."""

    border_bytes: list[float]  # what crosses a border
    stash: list[float]
    extra: list[float]  # alive at most while a layer runs, beside what earlier ones keep
    entry: list[float]  # of the stash: counted before the border, kept behind it as well
    inputs: list[float]  # of layers that are recomputed: their inputs
    again: list[float]  # ``extra_L`` of those

    def of(self, *, recompute: bool) -> tuple[list[float], list[float], list[float]]:
        """What is kept before each border, what runs beside it, what a first layer keeps more."""
        if recompute:
            return self.inputs, self.again, [0.0] * len(self.inputs)
        return self.stash, self.extra, self.entry


def _layer_bytes(tables: LayerTables, team_size: int, microbatch: int) -> _Layers:
    sizes, last = tables.sizes(team_size), tables.model.num_layers - 1
    boundary_I = [0.0, *(float(tables.boundary_bytes(i, microbatch)) for i in range(last)), 0.0]
    input_I, stash_I, extra_L, again_L, kept_I = boundary_I.copy(), [0.0], [], [], [0.0]
    input_I[0] = sizes.layers.input_bytes_per_sample * microbatch
    shared_I = [0.0, *(s * microbatch for s in sizes.layers.shared_bytes_per_sample)]
    for layer in range(last + 1):
        stash = sizes.stash_bytes(layer, microbatch)
        work = sizes.work_bytes(layer, microbatch)
        stash_I.append(stash_I[-1] + stash - shared_I[layer])
        extra_L.append(input_I[layer] - shared_I[layer] + work)
        # The layer before the loss runs backward at once: it is not run again. How much enters
        # the first layer is not in every profile.
        again = layer < last and input_I[layer] > 0.0
        kept_I.append(kept_I[-1] + (input_I[layer] if again else stash))
        again_L.append(input_I[layer] + (work or stash + boundary_I[layer + 1]))
    return _Layers(boundary_I, stash_I, extra_L, [*shared_I[:-1], 0.0], kept_I, again_L)


class MemoryModel:
    """Peak bytes of stages against usable bytes of devices. Everything is kept once computed.

    Source: docs/model.md, section 3.5.
    """

    def __init__(self, problem: PlanningProblem, tables: LayerTables) -> None:
        self._problem, self._tables = problem, tables
        self._usable: dict[tuple[str, ...], float] = {}
        self._matrices: dict[tuple[int, int, bool], Parts] = {}
        self._parts: dict[tuple[int, int, int, int, bool], Parts] = {}
        self._layer_bytes: dict[tuple[int, int], _Layers] = {}

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
        self,
        team_size: int,
        first_layer: int,
        end_layer: int,
        microbatch: int,
        *,
        recompute: bool = False,
    ) -> Parts:
        """What a range of layers needs; see ``Parts``."""
        first, end = first_layer, end_layer
        key = (team_size, first, end, microbatch, recompute)
        found = self._parts.get(key)
        if found is None:
            model = self._problem.model
            sizes = self._tables.sizes(team_size)
            params = self._tables.param_bytes(team_size, first, end)
            trained = params - self._tables.frozen_bytes(team_size, first, end)
            layers = self._layers(team_size, microbatch)
            kept_I, extra_L, entry_I = layers.of(recompute=recompute)
            kept = kept_I[end] - kept_I[first] + entry_I[first]
            out = layers.border_bytes[end]  # its gradient stays until the first layer is through
            running = out
            if recompute or sizes.layers.has_work:
                running = (
                    entry_I[first]
                    - kept
                    + max(
                        kept_I[k] - kept_I[first] + extra_L[k] + (out if k + 1 < end else 0.0)
                        for k in range(first, end)
                    )
                )
            updates = sizes.layers.update_bytes[first:end]
            found = self._parts[key] = Parts(
                self._always(params, trained, team_size),
                layers.border_bytes[first],
                out,
                kept,
                max(0.0, running) + self._tables.tied_bytes(team_size, first, end),
                trained,
                sum(updates) if model.updates_together else max(updates),
            )
        return found

    def matrices(self, team_size: int, microbatch: int, *, recompute: bool = False) -> Parts:
        """``parts`` of all ranges: entry i, j is that of layers i to j; infinite where j <= i."""
        key = (team_size, microbatch, recompute)
        found = self._matrices.get(key)
        if found is None:
            model, sizes = self._problem.model, self._tables.sizes(team_size)
            borders = np.arange(model.num_layers + 1)
            full_IJ = borders[:, None] < borders
            params_IJ = self._tables.param_matrix(team_size)
            trained_IJ = params_IJ - self._tables.frozen_matrix(team_size)
            layers = self._layers(team_size, microbatch)
            kept_I, extra_L, entry_I = (np.array(x) for x in layers.of(recompute=recompute))
            boundary_I = np.array(layers.border_bytes)
            kept_IJ = (kept_I - kept_I[:, None]) + entry_I[:, None]
            out_IJ = np.broadcast_to(boundary_I, kept_IJ.shape)
            running_IJ = out_IJ
            if recompute or sizes.layers.has_work:
                last_IJ = np.full(kept_IJ.shape, -inf)  # the last layer runs
                last_IJ[:, 1:] = (kept_I[:-1] - kept_I[:, None]) + extra_L
                last_IJ[~full_IJ] = -inf
                any_IJ = np.maximum.accumulate(last_IJ, axis=1)
                running_IJ = last_IJ.copy()
                running_IJ[:, 1:] = np.maximum(last_IJ[:, 1:], any_IJ[:, :-1] + boundary_I[1:])
                running_IJ = np.where(full_IJ, entry_I[:, None] - kept_IJ + running_IJ, 0.0)
            update_L = np.array(sizes.layers.update_bytes)
            updates_IJ = np.zeros(kept_IJ.shape)
            updates_IJ[:, 1:] = np.where(full_IJ[:, 1:], update_L, 0.0)
            combine = np.add if model.updates_together else np.maximum
            every = (
                self._always(params_IJ, trained_IJ, team_size),
                np.broadcast_to(boundary_I[:, None], kept_IJ.shape),
                out_IJ,
                kept_IJ,
                np.maximum(0.0, running_IJ) + self._tables.tied_matrix(team_size),
                trained_IJ,
                combine.accumulate(updates_IJ, axis=1),
            )
            always_IJ, *more = (np.where(full_IJ, x_IJ, 0.0) for x_IJ in every)
            found = Parts(np.where(full_IJ, always_IJ, inf), *more)
            self._matrices[key] = found
        return found

    def _always(self, params: Any, trained: Any, team_size: int) -> Any:
        """Of parameters: with their gradients and optimizer state, and autocast's copies."""
        model, measured = self._problem.model, self._tables.sizes(team_size).layers.has_work
        found = params + trained * model.optimizer_bytes_per_param_byte
        if measured:
            return found + SCALARS_BYTES  # copies are in the stash, as they were found
        return found if model.dtype == "fp32" else found + 0.5 * params

    def _layers(self, team_size: int, microbatch: int) -> "_Layers":
        key = (team_size, microbatch)
        found = self._layer_bytes.get(key)
        if found is None:
            found = self._layer_bytes[key] = _layer_bytes(self._tables, team_size, microbatch)
        return found

    def _parts_of(self, stage: Stage, microbatch: int) -> Parts:
        size, first, end = stage.team.size, stage.first_layer, stage.end_layer
        return self.parts(size, first, end, microbatch, recompute=stage.recompute)

    def max_held(self, stage: Stage, microbatch: int, *, replicated: bool = True) -> int:
        """Most microbatches in flight that fit the stage's memory; 0: not even one.

        ``replicated`` as for ``peaks_bytes``.
        """
        held = self._parts_of(stage, microbatch).most_held(
            self.usable_bytes(stage.team), replicated=replicated
        )
        return int(min(held, self._problem.batch_samples))

    def peaks_bytes(
        self, group: Group, schedule: str
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Peak bytes of a member of each stage: alone, and replicated.

        Replicated: other groups hold the layers too, so gradients are packed for their sum.
        """
        stages, count = group.stages, len(group.microbatches)
        return self._peaks_bytes(stages, max(group.microbatches), count, schedule)

    def holds(
        self, stages: Sequence[Stage], microbatch: int, count: int, *, replicated: bool
    ) -> bool:
        """Whether all stages of a 1F1B pipeline fit with their K_s."""
        peaks = self._peaks_bytes(stages, microbatch, count, "1f1b")[replicated]
        usable = [self.usable_bytes(stage.team) for stage in stages]
        return all(peak <= most for peak, most in zip(peaks, usable, strict=True))

    def _peaks_bytes(
        self, stages: Sequence[Stage], microbatch: int, count: int, schedule: str
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        alone, packed = [], []
        before = 0  # what the stage before may be ahead with
        for stage in stages:
            held = count if schedule == "gpipe" else min(count, stage.inflight)
            parts, ahead = self._parts_of(stage, microbatch), max(0, before - held)
            alone.append(float(parts.peak(held, ahead=ahead, replicated=False)))
            packed.append(float(parts.peak(held, ahead=ahead, replicated=True)))
            before = held
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
                    how = ", run again in backward," if stage.recompute else ""
                    message = (
                        f"layers {stage.first_layer} to {stage.end_layer - 1}{how} need "
                        f"{peak / 2**30:.5g} GiB on {stage.team.team_id!r}, where "
                        f"{usable / 2**30:.5g} are usable "
                        f"({margin_ratio:.0%} of its memory are kept free)"
                    )
        return message
