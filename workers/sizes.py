"""From what layers take at the largest and at the smallest microbatch to sizes for any."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.describing import LayerFacts

_Line = tuple[tuple[float, ...], tuple[float, ...]]  # bytes a sample, and however few samples


def kept_sizes(facts: Mapping[int, "Sequence[LayerFacts]"]) -> dict[str, Any]:
    """Stash, and what neighbours share of it, as fields of ``LayerSizes``.

    Args:
        facts: Of every layer, at the largest and the smallest number of samples.
    """
    layers = range(len(next(iter(facts.values()))))

    def shared(size: int, index: int) -> int:
        after = facts[size][index + 1 : index + 2]
        return sum(
            input_bytes
            for kept, (keeps, input_bytes) in zip(
                facts[size][index].keeps_outputs, after[0].inputs if after else (), strict=False
            )
            if kept and keeps
        )

    stash = _line(layers, facts, lambda size, index: facts[size][index].stash_bytes)
    return {
        "stash_bytes_per_sample": stash[0],
        "stash_bytes_per_microbatch": stash[1],
        "shared_bytes_per_sample": _line(layers, facts, shared)[0],
    }


def work_sizes(work: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """What layers need while they run, as fields of ``LayerSizes``.

    Args:
        work: ``work_bytes`` of every layer, at the largest and the smallest number of samples.
    """
    layers = range(len(next(iter(work.values()))))
    working = _line(layers, work, lambda size, index: work[size][index])
    return {"work_bytes_per_sample": working[0], "work_bytes_per_microbatch": working[1]}


def _line(layers: range, sizes: Iterable[int], bytes_at: Callable[[int, int], int]) -> _Line:
    """The line through what a layer needs at both sizes, and nowhere below either."""
    every = sorted(sizes)
    most, least = every[-1], every[0]
    per_sample, fixed = [], []
    for index in layers:
        large, small = bytes_at(most, index), bytes_at(least, index)
        slope = large / most
        if most > least:
            slope = min(slope, max(0.0, (large - small) / (most - least)))
        per_sample.append(slope)
        fixed.append(max(0.0, large - slope * most, small - slope * least))
    return tuple(per_sample), tuple(fixed)
