"""Bytes that leave a zone for money: of a step of a plan, and of a change of plan."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Move, Plan
from orchestrator.planning.sums import list_sums, ring_hops
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
    sent = [*_border_traffic(plan, model), *_ring_traffic(plan.groups, cluster, model)]
    return _charged(sent, cluster)


def move_traffic(moves: Iterable[Move], cluster: ClusterState) -> tuple[Traffic, ...]:
    """What a change of plan sends, as far as both ends are still present."""
    sent = [
        (move.source, move.target, float(move.size_bytes))
        for move in moves
        if cluster.has(move.source) and cluster.has(move.target)
    ]
    return _charged(sent, cluster)


def _border_traffic(plan: Plan, model: ModelProfile) -> list[tuple[str, str, float]]:
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
    for owners, size_bytes in list_sums(groups, LayerTables(model)):
        devices = [cluster.device(groups[g].stages[s].team.device_ids[0]) for g, s in owners]
        hop_bytes = 2 * (len(devices) - 1) / len(devices) * size_bytes
        sent += [(a.device_id, b.device_id, hop_bytes) for a, b in ring_hops(devices)]
    return sent


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
