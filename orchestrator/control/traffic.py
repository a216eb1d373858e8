"""Bytes that leave a zone for money: of a step of a plan, and of a change of plan."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Move, Plan, segments
from orchestrator.planning.tables import LayerTables


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent over links that cost egress, charged to the device that sent them."""

    device_id: str
    pool: str
    size_bytes: float
    usd: float

    def times(self, count: float) -> "Traffic":
        """The same, that many times."""
        return replace(self, size_bytes=count * self.size_bytes, usd=count * self.usd)


def step_traffic(plan: Plan, cluster: ClusterState, model: ModelProfile) -> tuple[Traffic, ...]:
    """What one full step sends: boundaries and their gradients, and the rings of gradient sums.

    Source: docs/model.md, sections 3.6 and 3.7 (E).
    """
    sent = [*_border_traffic(plan, cluster, model), *_ring_traffic(plan.groups, cluster, model)]
    return _charged(sent, cluster)


def move_traffic(moves: Iterable[Move], cluster: ClusterState) -> tuple[Traffic, ...]:
    """What a change of plan sends, as far as both ends are still present."""
    sent = [
        (move.source, move.target, float(move.size_bytes))
        for move in moves
        if cluster.has(move.source) and cluster.has(move.target)
    ]
    return _charged(sent, cluster)


def _border_traffic(
    plan: Plan, cluster: ClusterState, model: ModelProfile
) -> list[tuple[str, str, float]]:
    per_sample = model.sizes[0].boundary_bytes_per_sample
    sent = []
    for group in plan.groups:
        for upper, lower in pairwise(group.stages):
            size = sum(round(per_sample[upper.end_layer - 1] * m) for m in group.microbatches)
            ends = upper.team.device_ids[0], lower.team.device_ids[0]
            sent += [(*ends, float(size)), (*ends[::-1], float(size))]
    return sent


def _ring_traffic(
    groups: tuple[Group, ...], cluster: ClusterState, model: ModelProfile
) -> list[tuple[str, str, float]]:
    sent = []
    for size_bytes, owners in _sums(groups, model):
        ring = sorted(owners, key=lambda d: (cluster.device(d).zone, cluster.device(d).node_id, d))
        hop_bytes = 2 * (len(ring) - 1) / len(ring) * size_bytes
        sent += [
            (source, target, hop_bytes)
            for source, target in zip(ring, ring[1:] + ring[:1], strict=True)
        ]
    return sent


def _sums(groups: tuple[Group, ...], model: ModelProfile) -> list[tuple[float, list[str]]]:
    """Bytes and owners of every gradient sum: segments without their ties, then the ties."""
    ties = LayerTables(model).ties
    sums = []
    for segment in segments(groups) if len(groups) > 1 else ():
        layers = range(segment.first_layer, segment.end_layer)
        tied = sum(size * sum(layer in layers for layer in tie) for tie, size in ties)
        owned = [group.stages[s].team for group, s in zip(groups, segment.owners, strict=True)]
        size_bytes = max(
            sum(model.sizes_of(team.size).param_bytes[layer] for layer in layers) for team in owned
        )
        sums.append((size_bytes - tied, [team.device_ids[0] for team in owned]))
    for tie, size_bytes in ties:
        holders = [
            stage.team.device_ids[0]
            for group in groups
            for stage in group.stages
            if any(layer in stage.layers for layer in tie)
        ]
        sums.append((size_bytes, holders))
    return [(size_bytes, owners) for size_bytes, owners in sums if len(owners) > 1]


def _charged(sent: Iterable[tuple[str, str, float]], cluster: ClusterState) -> tuple[Traffic, ...]:
    """The bytes that cost something, by sender."""
    total: dict[str, tuple[float, float]] = {}
    for source, target, size_bytes in sent:
        link = cluster.link(cluster.device(source), cluster.device(target))
        if link.egress_usd_per_byte:
            known_bytes, known_usd = total.get(source, (0.0, 0.0))
            usd = size_bytes * link.egress_usd_per_byte
            total[source] = known_bytes + size_bytes, known_usd + usd
    return tuple(
        Traffic(device_id, cluster.device(device_id).pool, *total[device_id])
        for device_id in sorted(total)
    )
