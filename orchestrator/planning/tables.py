"""Times and bytes of layer ranges: prefix sums over the layers of a profile, looked up in O(1)."""

from dataclasses import dataclass, replace
from itertools import accumulate

from orchestrator.core.model import LayerTimes, ModelProfile


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Prefix sums over layers of one kind, team size and microbatch size; L + 1 entries each."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    interpolated: bool


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Prefix sums of bytes of one team size, and the boundary behind each layer."""

    param_bytes: tuple[float, ...]
    stash_bytes_per_sample: tuple[float, ...]
    boundary_bytes_per_sample: tuple[float, ...]  # not summed: entry l leaves layer l


class LayerTables:
    """Answers for ranges of layers of one profile; every table is built once."""

    def __init__(self, model: ModelProfile) -> None:
        self.model = model
        self._times: dict[tuple[str, int, int], TimeTable] = {}
        self._sizes: dict[int, SizeTable] = {}
        self._team_sizes: dict[str, tuple[int, ...]] = {}
        self.ties = tuple(
            (tuple(sorted(set(layers))), self._tie_bytes(index))
            for index, layers in enumerate(model.ties)
        )

    def _tie_bytes(self, index: int) -> float:
        if self.model.tie_bytes:
            return self.model.tie_bytes[index]
        param_bytes = self.model.sizes[0].param_bytes
        return min(param_bytes[layer] for layer in self.model.ties[index])

    def times(self, kind: str, team_size: int, microbatch: int) -> TimeTable:
        """Times of one microbatch, interpolated linearly between the measured sizes.

        Outside the measured sizes the line through the two nearest goes on, kept from
        falling or crossing zero; a table that was not measured says ``interpolated``.

        Raises:
            ValueError: If the profile has no times of this kind and team size.
        """
        key = (kind, team_size, microbatch)
        if key not in self._times:
            self._times[key] = self._build_times(kind, team_size, microbatch)
        return self._times[key]

    def _build_times(self, kind: str, team_size: int, microbatch: int) -> TimeTable:
        rows = sorted(
            (t for t in self.model.times if t.kind == kind and t.team_size == team_size),
            key=lambda t: t.microbatch,
        )
        if not rows:
            raise ValueError(
                f"profile {self.model.model!r} has no times for kind {kind!r} and teams of "
                f"{team_size}; measure it, or give forward_flop_per_sample so that it can be priced"
            )
        exact = next((t for t in rows if t.microbatch == microbatch), None)
        row = exact or _between(rows, microbatch)
        return TimeTable(
            forward_s=tuple(accumulate(row.forward_s, initial=0.0)),
            backward_s=tuple(accumulate(row.backward_s, initial=0.0)),
            update_s=tuple(accumulate(row.update_s, initial=0.0)),
            interpolated=row.estimated,
        )

    def team_sizes(self, kind: str) -> tuple[int, ...]:
        """Team sizes with both times (of this kind) and layer sizes, ascending; perhaps ()."""
        if kind not in self._team_sizes:
            timed = {t.team_size for t in self.model.times if t.kind == kind}
            sized = {s.team_size for s in self.model.sizes}
            self._team_sizes[kind] = tuple(sorted(timed & sized))
        return self._team_sizes[kind]

    def sizes(self, team_size: int) -> SizeTable:
        """Bytes of the fullest member of a team. Raises ValueError when not profiled."""
        if team_size not in self._sizes:
            sizes = self.model.sizes_of(team_size)
            self._sizes[team_size] = SizeTable(
                tuple(accumulate(sizes.param_bytes, initial=0.0)),
                tuple(accumulate(sizes.stash_bytes_per_sample, initial=0.0)),
                sizes.boundary_bytes_per_sample,
            )
        return self._sizes[team_size]

    def boundary_bytes(self, border_layer: int, microbatch: int) -> int:
        """Bytes that leave ``border_layer`` for the next layer; as many come back."""
        sizes = self.sizes(self.model.sizes[0].team_size)
        return round(sizes.boundary_bytes_per_sample[border_layer] * microbatch)

    def param_bytes(self, team_size: int, first_layer: int, end_layer: int) -> float:
        """Parameters a member holds for a range of layers; a tied one counts once."""
        prefix = self.sizes(team_size).param_bytes
        total = prefix[end_layer] - prefix[first_layer]
        for layers, size_bytes in self.ties:
            held = sum(first_layer <= layer < end_layer for layer in layers)
            total -= max(0, held - 1) * size_bytes
        return total


def _between(rows: list[LayerTimes], microbatch: int) -> LayerTimes:
    if len(rows) == 1:
        ratio = microbatch / rows[0].microbatch
        return replace(
            rows[0].scaled(ratio),
            microbatch=microbatch,
            update_s=rows[0].update_s,  # does not depend on the samples
            estimated=True,
        )
    upper = next((i for i, t in enumerate(rows) if t.microbatch > microbatch), len(rows) - 1)
    low, high = rows[max(0, upper - 1)], rows[max(1, upper)]
    return replace(
        high,
        microbatch=microbatch,
        forward_s=_line(low, high, microbatch, "forward_s"),
        backward_s=_line(low, high, microbatch, "backward_s"),
        estimated=True,
    )


def _line(low: LayerTimes, high: LayerTimes, microbatch: int, name: str) -> tuple[float, ...]:
    low_L, high_L = getattr(low, name), getattr(high, name)
    weight = (microbatch - low.microbatch) / (high.microbatch - low.microbatch)
    found = tuple(a + weight * (b - a) for a, b in zip(low_L, high_L, strict=True))
    if weight < 0:  # below the smallest measured size: never less than in proportion
        share = microbatch / low.microbatch
        return tuple(max(t, share * a) for t, a in zip(found, low_L, strict=True))
    if weight > 1:  # above the largest: noise must not let more work take less time
        return tuple(max(t, b) for t, b in zip(found, high_L, strict=True))
    return found
