"""The links of a cluster on a virtual clock: messages queue for a path, latency delays them."""

from collections.abc import Generator

import simpy

from orchestrator.core.cluster import ClusterState, Device


class Network:
    """Carries messages over the paths of one cluster; whoever asks first goes first.

    A path between two nodes is shared by their devices, the path between two zones by every
    pair of nodes that has no link of its own; both directions are separate.
    """

    def __init__(self, env: simpy.Environment, cluster: ClusterState) -> None:
        self._env = env
        self._cluster = cluster
        self._paths: dict[tuple[str, str], simpy.Resource] = {}

    def carry(
        self, source: Device, target: Device, size_bytes: float
    ) -> Generator[simpy.Event, object, None]:
        """Process that ends when the last byte has arrived."""
        link = self._cluster.link(source, target)
        with self._path(source, target).request() as turn:
            yield turn
            yield self._env.timeout(link.occupied_s(size_bytes))
        yield self._env.timeout(link.latency_s)

    def _path(self, source: Device, target: Device) -> simpy.Resource:
        link = self._cluster.link(source, target)
        between_zones = source.zone != target.zone and link.source == source.zone
        ends = (link.source, link.target) if between_zones else (source.node_id, target.node_id)
        if source.node_id == target.node_id:
            ends = (source.device_id, target.device_id)
        if ends not in self._paths:
            self._paths[ends] = simpy.Resource(self._env)
        return self._paths[ends]
