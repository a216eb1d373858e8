"""How slow links really are: what messages took, against what their links were said to take."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import exp, inf, log
from statistics import median

import numpy as np

from orchestrator.core.cluster import ClusterState, Device, Link
from orchestrator.core.durable import Trend
from orchestrator.core.slot import StepReport, Transfer
from orchestrator.core.view import ZonePath
from orchestrator.telemetry.trends import Trends

BIN = 0.05
"""Of the logarithm of a link's slow-down: a finer change is no news."""

LEAST_STEP_SHARE = 0.01
"""Of a step, by which messages must be later than predicted: a tiny one's time says nothing."""

Ends = tuple[str, str]
"""Nodes of a directed path."""


_Like = tuple[str, str, int, int]
"""Messages that take as long as each other: devices, number and bytes."""


class Links:
    """Bandwidths between nodes as measured where they are slow; latencies stay as described.

    A message is timed by one clock, from its first byte to its last, so that neither latency nor
    waiting is in it. One that lay in a buffer is read faster than its link is: a link counts as
    slower than described, never as faster. Only boundaries between stages are measured: a ring of
    gradient sums has no single link to blame. A path that nobody measured takes the median of its
    class, of those for which the same description holds; all is given up with age.

    Args:
        cluster: With its links as described.
        memory: What an earlier life of the run measured.
        ratio: From which on a link counts as slow.

    Source: docs/model.md, section 6.
    """

    def __init__(
        self, cluster: ClusterState, memory: Iterable[tuple[Ends, Trend]], ratio: float
    ) -> None:
        self._described, self.links = cluster, cluster.links
        self._least = log(ratio)
        self._said: dict[_Like, tuple[Ends, float]] = {}  # of the last slot's messages
        self.trends = Trends(memory)
        """What is known, to be kept over a restart."""
        self._keep(cluster.devices)

    def update(self, reports: Iterable[StepReport], devices: tuple[Device, ...]) -> None:
        """Take in a slot's messages; ``devices`` are those present."""
        samples, late = self._samples(reports, {d.device_id: d for d in devices})
        trends = self.trends.keep({*self.trends.names, *samples})
        rows = trends.rows(samples)
        trends = trends.measured(rows, list(samples.values()))
        slow = trends.column("level")[rows] >= self._least
        for index in np.flatnonzero(slow).tolist():
            slow[index] = median(late[trends.names[rows[index]]]) >= LEAST_STEP_SHARE
        unused = trends.others(rows)
        self.trends = trends.judged(rows, slow).unseen(unused, np.zeros(len(unused)))
        self._keep(devices)

    def _keep(self, devices: tuple[Device, ...]) -> None:
        """Forget paths that are gone, or healthy and not used for long; renew ``links``."""
        on_node = {device.node_id: device for device in reversed(devices)}
        trends = self.trends
        known = (trends.column("num_steps") > 0) | trends.column("on_trial")
        self.trends = trends = trends.keep(
            ends
            for ends, is_known in zip(trends.names, known.tolist(), strict=True)
            if is_known and on_node.keys() >= set(ends)
        )
        if (links := self._as_measured(on_node)) != self.links:
            self.links = links

    def _samples(
        self, reports: Iterable[StepReport], present: Mapping[str, Device]
    ) -> tuple[dict[Ends, list[float]], dict[Ends, list[float]]]:
        """Of every pair of nodes: log(measured / described), and lateness as a share of a step."""
        ratios: dict[Ends, list[float]] = {}
        late: dict[Ends, list[float]] = {}
        known, self._said = self._said, {}
        for report in sorted(reports, key=lambda report: (report.device_id, report.step)):
            for sent in report.transfers:
                if sent.source not in present or sent.target not in present:
                    continue
                like = sent.source, sent.target, sent.num_messages, sent.size_bytes
                said = known.get(like) or self._describe(
                    sent, present[sent.source], present[sent.target]
                )
                self._said[like] = ends, said_s = said
                if said_s > 0 and sent.busy_s > 0:
                    ratios.setdefault(ends, []).append(log(sent.busy_s / said_s))
                    late.setdefault(ends, []).append((sent.busy_s - said_s) / report.step_s)
        return ratios, late

    def _describe(self, sent: Transfer, source: Device, target: Device) -> tuple[Ends, float]:
        """Between which nodes such messages go, and how long they should take, in seconds."""
        path = self._described.link(source, target)
        each_bytes = sent.size_bytes / sent.num_messages
        return (source.node_id, target.node_id), sent.num_messages * path.occupied_s(each_bytes)

    def _as_measured(self, on_node: Mapping[str, Device]) -> tuple[Link, ...]:
        """The described links at the median of their class, and odd pairs by themselves."""
        if not self.trends.column("slots_slow").any():
            return self._described.links
        counted = {
            ends: level
            for ends, level, num_steps in zip(
                self.trends.names,
                _counted(self.trends),
                self.trends.column("num_steps").tolist(),
                strict=True,
            )
            if num_steps
        }
        class_of = {
            (source, target): self._described.link(on_node[source], on_node[target])
            for source, target in counted
        }
        levels: dict[Ends, list[float]] = {}
        for ends, level in counted.items():
            levels.setdefault(_ends(class_of[ends]), []).append(level)
        usual = {ends: median(found) for ends, found in levels.items()}
        links = {
            _ends(link): link.scaled(exp(-usual.get(_ends(link), 0.0)))
            for link in self._described.links
        }
        for (source, target), level in counted.items():
            link = class_of[source, target]
            if abs(level - usual[_ends(link)]) >= self._least:
                odd = link.scaled(exp(-level))
                links[source, target] = replace(odd, source=source, target=target)
        return tuple(links.values())


def zone_paths(cluster: ClusterState) -> tuple[ZonePath, ...]:
    """The slowest paths between and inside the zones of present devices, by zone.

    Those between two devices of each pair of pools, and all that join two nodes by name, as
    measured ones do. The bandwidth is that of large messages; bandwidth and latency may be of
    different paths.
    """
    of_pool: dict[str, tuple[Device, Device]] = {}  # on two nodes, where it has as many
    zone_of = {device.node_id: device.zone for device in cluster.devices}
    for device in cluster.devices:
        one, other = of_pool.get(device.pool, (device, device))
        of_pool[device.pool] = one, device if one.node_id == other.node_id else other
    found: dict[Ends, list[Link]] = {}
    for (source, _), (_, target) in product(of_pool.values(), repeat=2):
        if source is not target:
            with suppress(ValueError):  # nobody described it: planning says so where it needs it
                link = cluster.link(source, target)
                found.setdefault((source.zone, target.zone), []).append(link)
    for link in cluster.links:
        if link.source != link.target and zone_of.keys() >= {link.source, link.target}:
            found.setdefault((zone_of[link.source], zone_of[link.target]), []).append(link)
    return tuple(
        ZonePath(
            *zones,
            bandwidth_bytes_per_s=min(link.rate_bytes_per_s(inf) for link in links),
            latency_s=max(link.latency_s for link in links),
        )
        for zones, links in sorted(found.items())
    )


def _counted(trends: Trends[Ends]) -> list[float]:
    """The levels to plan with; nothing of a link that is no bottleneck."""
    levels = np.round(trends.column("level") / BIN) * BIN
    found: list[float] = np.where(trends.column("slots_slow") > 0, levels, 0.0).tolist()
    return found


def _ends(link: Link) -> Ends:
    return link.source, link.target
