"""Analytic model profiles: from layers, width, length and vocabulary, or from a list of layers.

They stand in where no measurement is at hand. A layer takes ``overhead_ms`` plus its FLOP over
what the kind achieves; backward is twice forward; a team of t shares the FLOP and sums its
results over the node's inner link. Nothing here was measured by us.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, microbatch_sizes

STASH_BYTES_PER_VALUE = 17.0
"""Kept per position, unit of width and byte of precision: 34 s h at 2 bytes, attention redone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What one kind of device achieves on one model."""

    name: str
    flop_per_s: float
    memory_bytes_per_s: float
    team_bytes_per_s: float  # of an all-reduce inside its node


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's figures for one sample."""

    name: str
    forward_flop: float
    param_bytes: float
    boundary_bytes: float
    stash_bytes: float
    sums: int = 2  # all-reduces of a team in a forward pass, of ``boundary_bytes`` each


def layers_of(data: Mapping[str, Any]) -> list[Layer]:
    """The layers of the file's ``decoder`` or ``layers``."""
    if "decoder" in data:
        return _decoder(data["decoder"])
    return [
        Layer(
            f"{row['name']}{i}",
            float(row["forward_gflop"]) * 1e9,
            float(row["param_mb"]) * 1e6,
            float(row["boundary_mb"]) * 1e6,
            float(row["stash_mb"]) * 1e6,
        )
        for row in data["layers"]
        for i in range(int(row.get("count", 1)))
    ]


def _decoder(data: Mapping[str, Any]) -> list[Layer]:
    """Embedding, equal blocks, and a head of its own; 12 h^2 weights and 4 s^2 h FLOP a block.

    ``experts``: the feed-forward weights (8 h^2) stand so many times, each position uses one.
    """
    h, s, vocabulary = (float(data[k]) for k in ("width", "length", "vocabulary"))
    size, experts = float(data.get("bytes", 4)), float(data.get("experts", 1))
    edge, stash = s * h * size, STASH_BYTES_PER_VALUE * s * h * size
    block_flop = 2 * 12 * h * h * s + 4 * s * s * h
    table = vocabulary * h * 4
    blocks = [
        Layer(f"block{i}", block_flop, (4 + 8 * experts) * h * h * 4, edge, stash)
        for i in range(int(data["layers"]))
    ]
    first = Layer("embedding", 2 * s * h, table, edge, edge, 1)
    last = Layer("head", 2 * s * h * vocabulary, table, 4 * s, s * vocabulary * size, 1)
    return [first, *blocks, last]


def analytic_profile(
    name: str, data: Mapping[str, Any], kinds: Iterable[Kind], microbatch: int
) -> ModelProfile:
    """The profile of a model of a scenario file.

    Args:
        name: Of the model.
        data: ``decoder`` or ``layers``; ``teams``, ``overhead_ms`` and
            ``optimizer_bytes_per_param_byte`` are optional.
        kinds: What each kind achieves.
        microbatch: The largest size; its halves are priced, too.
    """
    layers, teams = layers_of(data), tuple(data.get("teams", (1,)))
    optimizer = float(data.get("optimizer_bytes_per_param_byte", 3.0))
    return ModelProfile(
        model=name,
        dtype=str(data.get("precision", "fp32")),
        layers=tuple(layer.name for layer in layers),
        sizes=tuple(_sizes(layers, team) for team in teams),
        times=tuple(
            _times(layers, kind, team, size, data)
            for kind in kinds
            for team in teams
            for size in microbatch_sizes(microbatch)
        ),
        forward_flop_per_sample=tuple(layer.forward_flop for layer in layers),
        optimizer_bytes_per_param_byte=optimizer,
    )


def _sizes(layers: Sequence[Layer], team: int) -> LayerSizes:
    return LayerSizes(
        team,
        tuple(layer.param_bytes / team for layer in layers),
        tuple(layer.boundary_bytes for layer in layers),
        tuple(layer.stash_bytes / team for layer in layers),
    )


def _times(
    layers: Sequence[Layer], kind: Kind, team: int, size: int, data: Mapping[str, Any]
) -> LayerTimes:
    overhead_s = 1e-3 * float(data.get("overhead_ms", 0.1))
    state = 1.0 + 2.0 * float(data.get("optimizer_bytes_per_param_byte", 3.0))
    forward_s, backward_s = [], []
    for layer in layers:
        work_s = size * layer.forward_flop / team / kind.flop_per_s
        sum_s = 2.0 * (team - 1) / team * size * layer.boundary_bytes / kind.team_bytes_per_s
        forward_s.append(overhead_s + work_s + layer.sums * sum_s)
        backward_s.append(overhead_s + 2.0 * work_s + layer.sums * sum_s)
    return LayerTimes(
        kind=kind.name,
        team_size=team,
        microbatch=size,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        update_s=tuple(state * x.param_bytes / team / kind.memory_bytes_per_s for x in layers),
        estimated=True,
    )
