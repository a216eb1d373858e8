"""What cutting a chain needs of teams, links and memory, as arrays over the layer borders.

Shape letters: I and J layer borders (0 to L).
"""

from copy import copy
from math import inf
from typing import TYPE_CHECKING, NamedTuple
from weakref import proxy

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import Team
from orchestrator.planning.groups import GroupModel

if TYPE_CHECKING:
    from orchestrator.planning.fading import Fading

FloatArray = NDArray[np.float64]

MAX_NUMBERS = 2**24
"""In the largest arrays of one cluster that those of the next may go on with."""


class Prefix(NamedTuple):
    """What one microbatch takes a team in all layers before each border."""

    forward_s: FloatArray
    backward_s: FloatArray
    both_s: FloatArray
    computed_s: FloatArray  # forward, without input


class Border(NamedTuple):
    """What one microbatch costs between two teams, for each layer border that may join them."""

    down_busy_s: FloatArray  # for how long its output keeps the link busy
    up_busy_s: FloatArray  # and its gradient
    busy_s: FloatArray  # the longer of the two
    both_ways_s: FloatArray  # there and back
    egress_usd: FloatArray


class Cuts(NamedTuple):
    """One way to cut a chain, and bounds of its pipeline."""

    borders: tuple[int, ...]  # 0 and L included
    busiest_s: float  # the least that its period can be
    fill_drain_s: float


class CuttingTables:
    """The arrays; teams and links that are alike share them.

    Source: docs/model.md, sections 3.2 and 3.5.
    """

    def __init__(self, model: GroupModel) -> None:
        self._model: GroupModel = proxy(model)  # whose own these tables are
        self._num_layers = model.problem.model.num_layers
        new = model.memories.new
        self._prefixes: Fading[tuple[int, int], Prefix] = new()
        self._work: Fading[tuple[int, int, int, bool], FloatArray] = new()
        self._fitting: Fading[tuple[int, int, bytes, bytes], FloatArray] = new()
        self._borders: Fading[tuple[object, ...], Border] = new()

    def following(self, model: GroupModel) -> "CuttingTables":
        """The tables of a model that numbers alike teams the same (``GroupModel.following``)."""
        other = copy(self)
        other._model = proxy(model)
        if self._work.num_known * self._num_layers**2 > MAX_NUMBERS:
            self._work.forget()
            self._fitting.forget()
        return other

    def prefix(self, team: Team, microbatch: int) -> Prefix:
        """Forward, backward and their sum."""
        key = (self._model.alike(team), microbatch)
        found = self._prefixes[key]
        if found is None:
            times = self._model.tables.times(team.kind, team.size, microbatch)
            forward_I, backward_I = np.asarray(times.forward_s), np.asarray(times.backward_s)
            slowdown = self._model.slowdown(team)
            forward_s, backward_s = slowdown * forward_I, slowdown * backward_I
            both_s = slowdown * (forward_I + backward_I)
            found = Prefix(forward_s, backward_s, both_s, forward_s)
            if input_s := microbatch * self._model.input_s(team):
                input_I = np.full(len(forward_I), input_s)
                input_I[0] = 0.0  # the first stage draws its input,
                input_I[-1] += input_s  # and the last one what it compares with
                found = Prefix(
                    forward_s + input_I, backward_s, both_s + input_I, computed_s=forward_s
                )
            self._prefixes[key] = found
        return found

    def work(self, team: Team, microbatch: int, held: int, *, replicated: bool) -> FloatArray:
        """Forward plus backward of layers i to j, by j and i; infinite where they do not fit.

        ``held`` microbatches must fit, with the buckets of gradient sums where ``replicated``;
        j <= i never does: a stage is not empty. Where memory holds that many only if the layers
        are recomputed, this is in the time. Where the same ranges fit it is the same array.
        """
        key = (self._model.alike(team), microbatch, held, replicated)
        found = self._work[key]
        if found is None:
            chosen = self._model.problem.activation_checkpointing
            borders = np.arange(self._num_layers + 1)
            full_IJ = borders[:, None] < borders
            fits_IJ = np.zeros_like(full_IJ)
            if chosen != "always":
                fits_IJ = self._fits(team, microbatch, held, replicated=replicated)
            again_IJ = np.zeros_like(full_IJ)
            if chosen != "never" and not fits_IJ[full_IJ].all():
                again_IJ = self._fits(team, microbatch, held, replicated=replicated, recompute=True)
                again_IJ &= ~fits_IJ
            fitting = (
                self._model.alike(team), microbatch, fits_IJ.tobytes(),
                again_IJ.tobytes() if again_IJ.any() else b"",
            )  # fmt: skip
            found = self._fitting[fitting]
            if found is None:
                prefix = self.prefix(team, microbatch)
                both_IJ = prefix.both_s - prefix.both_s[:, None]
                work_IJ = np.where(fits_IJ, both_IJ, inf)
                if again_IJ.any():
                    again_I = prefix.computed_s[
                        [self._model.tables.again(j) for j in range(len(borders))]
                    ]
                    more_IJ = both_IJ + (again_I - prefix.computed_s[:, None])
                    work_IJ = np.where(again_IJ, more_IJ, work_IJ)
                found = self._fitting[fitting] = np.ascontiguousarray(work_IJ.T)
            self._work[key] = found
        return found

    def _fits(
        self, team: Team, microbatch: int, held: int, *, replicated: bool, recompute: bool = False
    ) -> NDArray[np.bool_]:
        memory = self._model.memory
        parts = memory.matrices(team.size, microbatch, recompute=recompute)
        peak: FloatArray = parts.peak(held, replicated=replicated)
        return peak <= memory.usable_bytes(team)

    def border(self, upper: Team, lower: Team, microbatch: int) -> Border:
        """Messages from one team to the next and back."""
        down, up = self._model.link(upper, lower), self._model.link(lower, upper)
        key = (microbatch, down.figures, up.figures)
        found = self._borders[key]
        if found is None:
            inner = range(self._num_layers - 1)
            boundary_bytes = self._model.tables.boundary_bytes
            sizes = [0, *(boundary_bytes(layer, microbatch) for layer in inner), 0]
            down_busy_I = np.array([down.occupied_s(size) for size in sizes])
            up_busy_I = np.array([up.occupied_s(size) for size in sizes])
            found = self._borders[key] = Border(
                down_busy_I,
                up_busy_I,
                np.maximum(down_busy_I, up_busy_I),
                (down.latency_s + down_busy_I) + (up.latency_s + up_busy_I),
                (down.egress_usd_per_byte + up.egress_usd_per_byte) * np.array(sizes),
            )
        return found
