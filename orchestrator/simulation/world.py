"""The true cluster: what the simulation knows and the control loop has to find out."""

import math
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import replace

import numpy as np
import simpy

from orchestrator.core.cluster import ClusterState, Device, Link
from orchestrator.core.slot import ClusterEvent, DeviceJoined, DeviceLost, PreemptionNotice
from orchestrator.simulation.environments import touches_link
from orchestrator.simulation.streams import Replay, Stream
from orchestrator.simulation.traces import TraceEvent


class World:
    """Holds the truth, and lets streams of events change it as virtual time passes.

    Args:
        cluster: At second 0.
        events: Timed ones, and ones due before a step.
        streams: Run as processes on a clock of their own, each with its own random numbers.
        seed: Of those; the same seed brings the same events, whatever the loop decides.
    """

    def __init__(
        self,
        cluster: ClusterState,
        events: Iterable[TraceEvent] = (),
        streams: Sequence[Stream] = (),
        *,
        seed: int = 0,
    ) -> None:
        self.cluster = cluster
        self._first = cluster
        self._template = {device.pool: device for device in reversed(cluster.devices)}
        self._num_of_pool: dict[str, int] = {}
        for device in cluster.devices:
            self._num_of_pool[device.pool] = self._num_of_pool.get(device.pool, 0) + 1
        self._speed: dict[str, dict[str, float]] = {}  # device -> cause -> ratio
        self._pool_speed: dict[str, dict[str, float]] = {}  # that later joiners share
        self._bandwidth: dict[tuple[str, tuple[str, ...]], float] = {}
        self._links = cluster.links  # uncongested
        self._leaving: set[str] = set()
        self._seen: list[ClusterEvent] = []
        self._repriced = False
        every = tuple(events)
        self._steps_left = [event for event in every if event.at_step is not None]
        self._env = simpy.Environment()
        timed = Replay(tuple(event for event in every if event.at_s is not None))
        for index, stream in enumerate((timed, *streams)):
            rng = np.random.default_rng((seed, index))
            self._env.process(stream.run(self._env, rng, self))
        self._pass_to(0.0)

    def next_event_s(self) -> float:
        """When something may happen next, infinite when nothing will."""
        return float(self._env.peek())

    def advance(self, now_s: float, next_step: int) -> tuple[tuple[ClusterEvent, ...], bool]:
        """Let everything happen that is due, in order of time.

        Returns:
            The events that a backend would see, and whether a price changed. A slow-down is
            neither: nobody announces it.
        """
        self.cluster = replace(self.cluster, now_s=now_s)
        due = [event for event in self._steps_left if event.is_due(now_s, next_step)]
        self._steps_left = [event for event in self._steps_left if event not in due]
        for event in due:
            self.happen(event)
        self._pass_to(now_s)
        seen, repriced = tuple(self._seen), self._repriced
        self._seen, self._repriced = [], False
        return seen, repriced

    def _pass_to(self, now_s: float) -> None:
        while self._env.peek() <= now_s:
            self._env.step()

    def happen(self, event: TraceEvent) -> None:
        """One event, now."""
        if event.speed_ratio is not None:
            self._change_speed(event, event.speed_ratio)
        if event.input_s_per_sample is not None:
            self._change_input(event, event.input_s_per_sample)
        if event.bandwidth_ratio is not None:
            self._bandwidth[event.cause, event.links] = event.bandwidth_ratio
            self._congest()
        if event.price_usd_per_s is not None or event.price_ratio is not None:
            self._reprice(event)
        if event.lost:
            self.lose([d.device_id for d in self.cluster.devices if event.touches(d)])
        if event.notice_s is not None:
            announced = [d.device_id for d in self.cluster.devices if event.touches(d)]
            self.announce(announced, self.cluster.now_s + event.notice_s)
        for _ in range(event.joined if event.pool else 0):
            assert event.pool is not None, "only a pool can be joined"
            self.join(event.pool)

    def present(self, pool: str) -> list[Device]:
        """Devices of a pool that are there, the longest there first."""
        return [device for device in self.cluster.devices if device.pool == pool]

    def num_first(self, pool: str) -> int:
        """Devices of a pool at second 0."""
        return sum(device.pool == pool for device in self._first.devices)

    @property
    def leaving(self) -> frozenset[str]:
        """Devices that are there and announced to leave."""
        return frozenset(d.device_id for d in self.cluster.devices if d.device_id in self._leaving)

    def announce(self, device_ids: Iterable[str], deadline_s: float) -> None:
        """Devices will leave, all at once; those announced before keep their deadline."""
        new = [d for d in device_ids if d not in self._leaving]
        self._leaving.update(new)
        self._seen += [PreemptionNotice(device_id, deadline_s) for device_id in new]
        self._env.process(self._take(new, deadline_s))

    def _take(
        self, device_ids: Sequence[str], deadline_s: float
    ) -> Generator[simpy.Event, object, None]:
        yield self._env.timeout(max(0.0, deadline_s - self._env.now))
        self.lose(device_ids)

    def lose(self, device_ids: Collection[str]) -> None:
        """Devices leave, all at once; spot devices and announced ones are taken, not broken."""
        gone = set(device_ids)
        self._seen += [
            DeviceLost(
                d.device_id,
                "it left the simulated cluster",
                preempted=d.device_id in self._leaving or self.cluster.offer(d.pool).spot,
            )
            for d in self.cluster.devices
            if d.device_id in gone
        ]
        left = tuple(d for d in self.cluster.devices if d.device_id not in gone)
        self.cluster = replace(self.cluster, devices=left)

    def join(self, pool: str) -> Device:
        """A new device of a pool, on a node of its own; what slows the pool slows it, too."""
        index, template = self._num_of_pool[pool], self._template[pool]
        self._num_of_pool[pool] += 1
        node, device_id = f"{pool}-joined{index}", f"{pool}-{index}"
        causes = self._speed[device_id] = dict(self._pool_speed.get(pool, {}))
        device = replace(
            template,
            device_id=device_id,
            node_id=node,
            slowdown=1.0 / math.prod(causes.values()),
        )
        self._links += tuple(_links_like(self._links, template.node_id, node))
        self.cluster = replace(self.cluster, devices=(*self.cluster.devices, device))
        self._congest()
        self._seen.append(DeviceJoined(device))
        return device

    def _change_speed(self, event: TraceEvent, ratio: float) -> None:
        if event.pool and event.cause:
            self._pool_speed.setdefault(event.pool, {})[event.cause] = ratio
        devices = []
        for device in self.cluster.devices:
            if event.touches(device):
                causes = self._speed.setdefault(device.device_id, {})
                causes[event.cause] = ratio
                device = replace(device, slowdown=1.0 / math.prod(causes.values()))  # noqa: PLW2901
            devices.append(device)
        self.cluster = replace(self.cluster, devices=tuple(devices))

    def _change_input(self, event: TraceEvent, input_s_per_sample: float) -> None:
        devices = (
            replace(d, input_s_per_sample=input_s_per_sample) if event.touches(d) else d
            for d in self.cluster.devices
        )
        self.cluster = replace(self.cluster, devices=tuple(devices))

    def _congest(self) -> None:
        """Links as wide as everything that narrows them leaves them."""
        links = self._links
        for (_, touched), ratio in self._bandwidth.items():
            links = tuple(k.scaled(ratio) if touches_link(touched, k) else k for k in links)
        self.cluster = replace(self.cluster, links=links)

    def _reprice(self, event: TraceEvent) -> None:
        """A price changes; a row of a feed that repeats it is a reading all the same."""
        old, offers = self.cluster.offers, []
        for offer in old:
            if offer.pool != event.pool:
                offers.append(offer)
                continue
            if event.price_usd_per_s is None:
                assert event.price_ratio is not None, "an event with a price or a ratio"
                price = self._first.offer(offer.pool).price_usd_per_s * event.price_ratio
                now = replace(offer, price_usd_per_s=price, valid_from_s=self.cluster.now_s)
            else:
                now = offer.listed_at(event.price_usd_per_s, self.cluster.now_s)
            if offer.price_usd_per_s != now.price_usd_per_s:
                offer, self._repriced = now, True  # noqa: PLW2901
            if event.read:
                offer = replace(offer, read_s=self.cluster.now_s)  # noqa: PLW2901
            offers.append(offer)
        self.cluster = replace(self.cluster, offers=tuple(offers))


def _links_like(links: Iterable[Link], node: str, new: str) -> Iterable[Link]:
    """The links that name a node, for another one like it."""
    for link in links:
        if node in (link.source, link.target):
            ends = [new if end == node else end for end in (link.source, link.target)]
            yield replace(link, source=ends[0], target=ends[1])
