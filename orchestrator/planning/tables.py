"""Times and bytes of layer ranges: prefix sums over the layers of a profile, looked up in O(1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.model import (
    MORE_SIZES,
    SIZE_COLUMNS,
    LayerSizes,
    LayerTimes,
    ModelProfile,
)


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Prefix sums over layers of one kind, team size and microbatch size; L + 1 entries each."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    interpolated: bool  # not measured: interpolated, continued, or priced from FLOP
    gap: str = ""  # which sizes it was interpolated between, or continued beyond
    beyond: bool = False  # the sizes measured


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Bytes of one team size: parameters summed over the layers before each border, and all."""

    param_bytes: tuple[float, ...]
    frozen_bytes: tuple[float, ...]
    layers: LayerSizes

    def stash_bytes(self, layer: int, microbatch: int) -> float:
        """What autograd keeps of one microbatch."""
        per_sample, fixed = (
            self.layers.stash_bytes_per_sample,
            self.layers.stash_bytes_per_microbatch,
        )
        return per_sample[layer] * microbatch + fixed[layer]

    def work_bytes(self, layer: int, microbatch: int) -> float:
        """What is made while one microbatch runs, forward and backward."""
        per_sample, fixed = self.layers.work_bytes_per_sample, self.layers.work_bytes_per_microbatch
        return per_sample[layer] * microbatch + fixed[layer]


@dataclass(frozen=True, slots=True)
class _Row:
    """Times of the layers, not yet summed, and where they come from."""

    columns: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    interpolated: bool
    gap: str = ""
    beyond: bool = False


class LayerTables:
    """Answers for ranges of layers of one profile; every table is built once."""

    def __init__(self, model: ModelProfile) -> None:
        self.model = model
        self._times: dict[tuple[str, int, int], TimeTable] = {}
        self._sizes: dict[int, SizeTable] = {}
        self._team_sizes: dict[str, tuple[int, ...]] = {}
        self._smallest = model.sizes[0]
        self.smallest_team = self._smallest.team_size
        inner = range(model.num_layers - 1)
        self.least_boundary_bytes = min((self.boundary_bytes(k, 1) for k in inner), default=0)
        """Of one sample, where fewest bytes leave a layer."""
        self.ties = tuple(
            (tuple(sorted(set(layers))), self._tie_bytes(index))
            for index, layers in enumerate(model.ties)
        )

    def _tie_bytes(self, index: int) -> float:
        if self.model.tie_bytes:
            return self.model.tie_bytes[index]
        return min(self._smallest.param_bytes[layer] for layer in self.model.ties[index])

    def times(self, kind: str, team_size: int, microbatch: int) -> TimeTable:
        """Times of one microbatch, as measured or from the measured sizes around it.

        Between measured microbatches: linear. Below the smallest the line goes on, but never
        below the smallest's time in proportion; above the largest likewise, so that a size
        nobody measured promises no gain over the largest. Between measured team sizes: linear
        in one over the size, as work that is shared evenly. Beyond them there is no answer.
        A table that was not measured says ``interpolated``, and ``gap`` says from what.

        Raises:
            ValueError: If the profile has no times of this kind and team size, nor of smaller
                and larger teams.

        Source: docs/model.md, section 3.4.
        """
        key = (kind, team_size, microbatch)
        found = self._times.get(key)
        if found is None:
            row = self._row(kind, team_size, microbatch)
            forward_s, backward_s, update_s = (
                tuple(accumulate(column, initial=0.0)) for column in row.columns
            )
            found = self._times[key] = TimeTable(
                forward_s, backward_s, update_s, row.interpolated, row.gap, row.beyond
            )
        return found

    def _row(self, kind: str, team_size: int, microbatch: int) -> _Row:
        rows = [t for t in self.model.times if t.kind == kind]
        measured = {t.team_size for t in rows}
        if team_size in measured:
            own = sorted((t for t in rows if t.team_size == team_size), key=lambda t: t.microbatch)
            return _at_microbatch(own, microbatch)
        smaller = max((q for q in measured if q < team_size), default=None)
        larger = min((q for q in measured if q > team_size), default=None)
        if smaller is None or larger is None:
            raise ValueError(
                f"profile {self.model.model!r} has no times for kind {kind!r} and teams of "
                f"{team_size}; measure it, or give forward_flop_per_sample so that it can be priced"
            )
        low, high = self._row(kind, smaller, microbatch), self._row(kind, larger, microbatch)
        weight = _team_weight(smaller, team_size, larger)
        forward_s, backward_s, update_s = (
            _line(a, b, weight) for a, b in zip(low.columns, high.columns, strict=True)
        )
        return _Row(
            (forward_s, backward_s, update_s),
            interpolated=True,
            gap=f"{_name(kind, team_size)} (teams of {smaller} and {larger})",
            beyond=low.beyond or high.beyond,
        )

    def again(self, end_layer: int) -> int:
        """Where what runs again ends, where a stage recomputes that ends at ``end_layer``.

        The layer before the loss runs once: its backward comes next anyway.
        """
        return min(end_layer, self.model.num_layers - 1)

    def team_sizes(self, kind: str) -> tuple[int, ...]:
        """Team sizes with both times (of this kind) and layer sizes, ascending; perhaps ()."""
        if kind not in self._team_sizes:
            timed = {t.team_size for t in self.model.times if t.kind == kind}
            sized = {s.team_size for s in self.model.sizes}
            self._team_sizes[kind] = tuple(sorted(timed & sized))
        return self._team_sizes[kind]

    def sizes(self, team_size: int) -> SizeTable:
        """Bytes of the fullest member of a team, interpolated as times are.

        Raises:
            ValueError: If neither this team size nor a smaller and a larger one is profiled.
        """
        found = self._sizes.get(team_size)
        if found is None:
            sizes = self._sizes_of(team_size)
            found = self._sizes[team_size] = SizeTable(
                tuple(accumulate(sizes.param_bytes, initial=0.0)),
                tuple(accumulate(sizes.frozen_bytes, initial=0.0)),
                sizes,
            )
        return found

    def _sizes_of(self, team_size: int) -> LayerSizes:
        measured = {s.team_size: s for s in self.model.sizes}
        smaller = max((q for q in measured if q < team_size), default=None)
        larger = min((q for q in measured if q > team_size), default=None)
        if team_size in measured or smaller is None or larger is None:
            return self.model.sizes_of(team_size)
        low, high = measured[smaller], measured[larger]
        weight = _team_weight(smaller, team_size, larger)
        columns: list[tuple[float, ...]] = [
            _line(getattr(low, name), getattr(high, name), weight)
            for name in (*SIZE_COLUMNS, *MORE_SIZES)
        ]
        (inputs,) = _line((low.input_bytes_per_sample,), (high.input_bytes_per_sample,), weight)
        return LayerSizes(team_size, *columns, input_bytes_per_sample=inputs)

    def boundary_bytes(self, border_layer: int, microbatch: int) -> int:
        """Bytes that leave ``border_layer`` for the next layer; as many come back.

        Members of a team all hold the whole boundary, so that the smallest team's is meant.
        """
        return round(self._smallest.boundary_bytes_per_sample[border_layer] * microbatch)

    def param_bytes(self, team_size: int, first_layer: int, end_layer: int) -> float:
        """Parameters a member holds for a range of layers; a tied one counts once."""
        prefix = self.sizes(team_size).param_bytes
        total = prefix[end_layer] - prefix[first_layer]
        for layers, size_bytes in self.ties:
            held = sum(first_layer <= layer < end_layer for layer in layers)
            if held > 1:
                total -= (held - 1) * size_bytes * self._share_of_member(team_size, layers[0])
        return total

    def frozen_bytes(self, team_size: int, first_layer: int, end_layer: int) -> float:
        """Of ``param_bytes``: what is not trained, so that it has no gradient and no state."""
        prefix = self.sizes(team_size).frozen_bytes
        return prefix[end_layer] - prefix[first_layer]

    def frozen_matrix(self, team_size: int) -> NDArray[np.float64]:
        """``frozen_bytes`` of all ranges, as ``param_matrix``."""
        prefix_I = np.array(self.sizes(team_size).frozen_bytes)
        total_IJ: NDArray[np.float64] = prefix_I - prefix_I[:, None]
        return total_IJ

    def param_matrix(self, team_size: int) -> NDArray[np.float64]:
        """``param_bytes`` of all ranges: entry i, j is that of layers i to j."""
        prefix_I = np.array(self.sizes(team_size).param_bytes)
        borders = np.arange(len(prefix_I))
        total_IJ: NDArray[np.float64] = prefix_I - prefix_I[:, None]
        for layers, size_bytes in self.ties:
            held_IJ = sum(((borders[:, None] <= k) & (k < borders)).astype(int) for k in layers)
            share = self._share_of_member(team_size, layers[0])
            total_IJ -= np.maximum(held_IJ - 1, 0) * size_bytes * share
        return total_IJ

    def tied_bytes(self, team_size: int, first_layer: int, end_layer: int) -> float:
        """Parameters that several layers of a range share.

        What one of them adds to such a gradient waits for what the others add.
        """
        return sum(
            size_bytes * self._share_of_member(team_size, layers[0])
            for layers, size_bytes in self.ties
            if sum(first_layer <= layer < end_layer for layer in layers) > 1
        )

    def tied_matrix(self, team_size: int) -> NDArray[np.float64]:
        """``tied_bytes`` of all ranges: entry i, j is that of layers i to j."""
        borders = np.arange(self.model.num_layers + 1)
        total_IJ = np.zeros((len(borders), len(borders)))
        for layers, size_bytes in self.ties:
            held_IJ = sum(((borders[:, None] <= k) & (k < borders)).astype(int) for k in layers)
            share = self._share_of_member(team_size, layers[0])
            total_IJ += np.where(held_IJ > 1, size_bytes * share, 0.0)
        return total_IJ

    def _share_of_member(self, team_size: int, layer: int) -> float:
        """Of a layer's parameters: what one member of a team holds."""
        whole = self._smallest.param_bytes[layer]
        prefix = self.sizes(team_size).param_bytes
        return (prefix[layer + 1] - prefix[layer]) / whole if whole else 1.0


def _at_microbatch(rows: Sequence[LayerTimes], microbatch: int) -> _Row:
    """The times of one kind and team size, ascending in microbatch, at a size of one's own."""
    exact = next((t for t in rows if t.microbatch == microbatch), None)
    if exact is not None:
        return _Row((exact.forward_s, exact.backward_s, exact.update_s), exact.estimated)
    smallest, largest = rows[0], rows[-1]
    name = f"{_name(rows[0].kind, rows[0].team_size)} at {microbatch} samples"
    upper = next((i for i, t in enumerate(rows) if t.microbatch > microbatch), len(rows) - 1)
    low, high = rows[max(0, upper - 1)], rows[min(len(rows) - 1, max(1, upper))]
    beyond = not smallest.microbatch < microbatch < largest.microbatch
    measured = f"{low.microbatch} and {high.microbatch}" if low is not high else low.microbatch
    bound = largest if microbatch > largest.microbatch else smallest
    return _Row(
        (
            _time_line(low, high, bound if beyond else None, microbatch, "forward_s"),
            _time_line(low, high, bound if beyond else None, microbatch, "backward_s"),
            high.update_s,  # does not depend on the samples
        ),
        interpolated=True,
        gap=f"{name} ({measured} measured)",
        beyond=beyond,
    )


def _time_line(
    low: LayerTimes, high: LayerTimes, bound: LayerTimes | None, microbatch: int, name: str
) -> tuple[float, ...]:
    """On the line through two rows, and never below ``bound`` in proportion to the samples."""
    low_L, high_L = getattr(low, name), getattr(high, name)
    found: tuple[float, ...] = low_L
    if low is not high:
        span = high.microbatch - low.microbatch
        found = _line(low_L, high_L, (microbatch - low.microbatch) / span)
    if bound is None:
        return found
    share = microbatch / bound.microbatch
    proportional = [share * t for t in getattr(bound, name)]
    if low is high:
        return tuple(proportional)
    return tuple(map(max, found, proportional))


def _line(low_L: Sequence[float], high_L: Sequence[float], weight: float) -> tuple[float, ...]:
    return tuple(a + weight * (b - a) for a, b in zip(low_L, high_L, strict=True))


def _team_weight(smaller: int, team_size: int, larger: int) -> float:
    """Where a team lies between two others, by one over the size."""
    return (1 / smaller - 1 / team_size) / (1 / smaller - 1 / larger)


def _name(kind: str, team_size: int) -> str:
    return kind if team_size == 1 else f"{kind} x{team_size}"
