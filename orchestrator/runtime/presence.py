"""Which devices are there now, where their workers start, and which are about to be taken away."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import ray

from orchestrator.control.backend import ClusterOptions
from orchestrator.control.pools import build_rentable
from orchestrator.core.cluster import ClusterState, Device, Offer, pool_of
from orchestrator.errors import LostWorkerError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.inventory import FoundDevice, Numbering, found_nodes, number_nodes
from orchestrator.runtime.notices import NoticeBoard
from orchestrator.runtime.products import Products
from orchestrator.runtime.truth import EmulatedTruth

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often a Ray cluster is asked for its nodes."""


@dataclass(frozen=True, slots=True)
class Present:
    """A device that is there, and where its worker starts."""

    device: Device
    place: Place


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look at the cluster shows."""

    present: Mapping[str, Present]
    """Devices that are there, by id."""

    leaving_s: Mapping[str, float]
    """Of these, the ones that will be taken away, and when on the run's clock."""


class Presence(Protocol):
    """A cluster to be looked at again and again."""

    def look(self, next_step: int, now_s: float) -> Sight:
        """What is there, once ``next_step`` is the next one to run."""

    def offers(self) -> tuple[Offer, ...]:
        """Prices in force at the last look."""

    def is_preemption(self, device_id: str) -> bool:
        """Whether a device that is gone was taken away rather than broke."""


class EmulatedPresence:
    """What the events of the file leave of an emulated cluster, as far as the run has come.

    What has happened stays so, even if the run goes back to a checkpoint before it.
    """

    def __init__(self, truth: EmulatedTruth, here: str, board: NoticeBoard) -> None:
        """Take the cluster as it is before the first step.

        Args:
            truth: With every device that is ever there.
            here: The Ray node on which all workers run.
            board: Notices from outside.
        """
        self._truth, self._here, self._board = truth, here, board
        self._step = 0
        self._reached_s: dict[int, float] = {}
        self._taken: set[str] = set()

    def look(self, next_step: int, now_s: float) -> Sight:
        """What is there.

        Raises:
            LostWorkerError: If nothing is: no step would ever come at which a device joins.
        """
        truth = self._truth
        self._step = max(self._step, next_step)
        for event in truth.events:
            if event.at_step <= self._step:
                self._reached_s.setdefault(event.at_step, now_s)
        leaving_s = {**truth.leaving(self._reached_s), **self._board.read(now_s)}
        ids = set(truth.present_at(self._step))
        self._taken |= {d for d in ids if leaving_s.get(d, now_s + 1.0) <= now_s}
        present = {
            device.device_id: Present(device, Place(device.device_id, self._here))
            for device in truth.cluster.devices
            if device.device_id in ids - self._taken
        }
        if not present:
            raise LostWorkerError(
                f"no device is left at step {self._step}, and without one no later step comes at "
                "which emulation.events or faults let another join; spare a device, or let one "
                "join by then"
            )
        return Sight(present, {d: at_s for d, at_s in leaving_s.items() if d in present})

    def offers(self) -> tuple[Offer, ...]:
        """Prices in force."""
        return self._truth.offers_at(self._step, self._reached_s)

    def is_preemption(self, device_id: str) -> bool:
        """A spot device that an event, or a notice, took away; not one whose process died."""
        if device_id in self._taken:
            return True
        gone = device_id not in self._truth.present_at(self._step)
        pool = self._truth.cluster.device(device_id).pool
        return gone and self._truth.cluster.offer(pool).spot


class RayPresence:
    """The nodes of a Ray cluster, with the names that their devices got when they first came."""

    def __init__(
        self,
        options: ClusterOptions,
        cluster: ClusterState,
        numbering: Numbering,
        board: NoticeBoard,
        nodes: Callable[[], Iterable[Mapping[str, object]]],
        products: Products,
    ) -> None:
        """Go on from what was found at the start.

        Args:
            options: The offers that price devices.
            cluster: What was found, as priced.
            numbering: The names of its nodes.
            board: Notices from outside.
            nodes: Asks Ray for its nodes.
            products: Asks new nodes for their GPUs; they are there once they have answered.
        """
        self._options, self._cluster, self._numbering = options, cluster, numbering
        self._board, self._nodes, self._products = board, nodes, products
        by_memory = sorted(cluster.devices, key=lambda device: device.memory_bytes)
        self._like = {d.pool: d for d in (*build_rentable(options), *by_memory)}
        # Of some less is free than their pool offers.
        self._memory_bytes = {device.device_id: device.memory_bytes for device in by_memory}
        self._sight = Sight({}, {})
        self._looked_s, self._now_s = float("-inf"), 0.0
        self._refused: set[str] = set()
        self._taken: frozenset[str] = frozenset()  # gone, after notice
        self._found: tuple[FoundDevice, ...] = ()  # at the last look, those given back among them
        self._given_back: dict[str, float] = {}  # Ray nodes, and when they are no longer used

    def give_back(
        self, released: Collection[str], counts: Mapping[str, int], grace_s: float
    ) -> None:
        """Use these devices no longer, and use others that were given back where they are wanted.

        Args:
            released: Devices, all of a node; they are under notice for ``grace_s``.
            counts: How many devices of each pool are wanted.
            grace_s: Time for the plan to do without them.
        """
        nodes = {one.ray_node_id for one in self._found if one.device_id in released}
        self._given_back |= dict.fromkeys(nodes, self._now_s + grace_s)
        for pool, count in counts.items():
            mine = [one.ray_node_id for one in self._found if one.pool == pool]
            kept = [node for node in mine if node not in self._given_back]
            back = [node for node in dict.fromkeys(mine) if node in self._given_back]
            while len(kept) < count and back:
                node = back.pop()
                del self._given_back[node]
                kept += [node] * mine.count(node)
        self._looked_s = float("-inf")

    def look(self, next_step: int, now_s: float) -> Sight:
        """What is there; asked of Ray once in ``POLL_S`` at most."""
        self._now_s = now_s
        if time.monotonic() > self._looked_s + POLL_S:
            self._sight = self._look(now_s)
            self._looked_s = time.monotonic()
        return self._sight

    def _look(self, now_s: float) -> Sight:
        nodes = tuple(self._nodes())
        seen = found_nodes(nodes, self._refuse, self._products.ask(nodes))
        found = number_nodes(seen, self._options, self._numbering, self._refuse)
        leaving_nodes_s = {**_draining(now_s), **self._given_back}
        self._found = found
        present, leaving_s = {}, dict(self._board.read(now_s))
        for one in found:
            if self._given_back.get(one.ray_node_id, now_s + 1.0) <= now_s:
                continue
            if one.pool not in self._like:
                self._refuse(
                    f"pool {one.pool!r} had no device when the run started, and has no max_count "
                    "under cluster.autoscaler; restart the run to use it"
                )
                continue
            like = self._like[one.pool]
            memory_bytes = self._memory_bytes.get(one.device_id, like.memory_bytes)
            device = replace(
                like, device_id=one.device_id, node_id=one.node_id, memory_bytes=memory_bytes
            )
            present[one.device_id] = Present(device, place_of(one))
            if one.ray_node_id in leaving_nodes_s:
                leaving_s[one.device_id] = leaving_nodes_s[one.ray_node_id]
        self._taken = (self._taken | self._sight.leaving_s.keys()) - present.keys()
        return Sight(present, {d: s for d, s in leaving_s.items() if d in present})

    def offers(self) -> tuple[Offer, ...]:
        """Prices in force."""
        return self._cluster.offers

    def is_preemption(self, device_id: str) -> bool:
        """A spot device whose node went with it, or one that had been under notice."""
        if device_id in self._sight.leaving_s or device_id in self._taken:
            return True
        if not self._cluster.offer(pool_of(device_id)).spot:
            return False
        self._looked_s = float("-inf")  # a node that died takes its devices with it
        return device_id not in self.look(0, self._now_s).present

    def _refuse(self, reason: str) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("a node is left alone: %s", reason)


def place_of(found: FoundDevice) -> Place:
    """Where the worker of a device starts."""
    return Place(
        found.device_id,
        found.ray_node_id,
        found.num_gpus,
        found.num_threads,
        found.node_id,
        found.resource,
    )


def _draining(now_s: float) -> dict[str, float]:
    """Ray nodes that are being drained, and when they may be taken away, on the run's clock."""
    ask = getattr(ray._private.state.state, "get_draining_nodes", None)
    if ask is None:  # not in this version of Ray: it is no public part of it
        return {}
    wall_s = time.time()
    return {
        node_id: now_s + (deadline_ms / 1000.0 - wall_s if deadline_ms else 0.0)
        for node_id, deadline_ms in ask().items()
    }
