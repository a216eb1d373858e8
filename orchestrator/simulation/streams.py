"""Streams of events on a SimPy clock: replayed traces, Markov chains, losses, slow-downs.

Each stream is a process that waits and then changes the World. Times are seconds of the run.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import simpy

from orchestrator.simulation.environments import Level, MarkovChain, dwell
from orchestrator.simulation.preemptions import Instant, NodeTrace
from orchestrator.simulation.traces import TraceEvent

if TYPE_CHECKING:
    from orchestrator.simulation.world import World

Process = Generator[simpy.Event, object, None]


class Stream(Protocol):
    """Something that goes on beside the run and touches its cluster."""

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """The process: wait on ``env``, draw from ``rng`` only, change ``world``."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Events that are known beforehand."""

    events: tuple[TraceEvent, ...]

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """See ``Stream``. Events of one instant happen in the order given."""
        timed = [(event.at_s, event) for event in self.events if event.at_s is not None]
        for at_s, event in sorted(timed, key=lambda pair: pair[0]):
            if at_s > env.now:
                yield env.timeout(at_s - env.now)
            world.happen(event)


@dataclass(frozen=True, slots=True)
class Chain:
    """A Markov chain of an environment, from its first level on."""

    chain: MarkovChain
    slot_s: float

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """See ``Stream``. How long a level lasts is drawn at its start, in whole slots."""
        matrix = self.chain.transitions
        state = 0
        while matrix[state, state] < 1:
            old, (num_slots, state) = state, dwell(matrix, state, rng)
            yield env.timeout(self.slot_s * num_slots)
            for event in self._events(self.chain.levels[old], self.chain.levels[state], env, world):
                world.happen(event)

    def _events(
        self, old: Level, new: Level, env: simpy.Environment, world: "World"
    ) -> Generator[TraceEvent, None, None]:
        at_s, cause = float(env.now), self.chain.name
        for pool in dict.fromkeys((*old.pools, *new.pools)):
            was = old if pool in old.pools else Level("", ())
            now = new if pool in new.pools else Level("", ())
            if now.speed_ratio != was.speed_ratio:
                yield TraceEvent(at_s=at_s, pool=pool, speed_ratio=now.speed_ratio, cause=cause)
            if now.price_ratio != was.price_ratio:
                yield TraceEvent(at_s=at_s, pool=pool, price_ratio=now.price_ratio)
            if was.present and not now.present:
                yield TraceEvent(at_s=at_s, pool=pool, lost=True)
            if now.present and not was.present:
                yield TraceEvent(at_s=at_s, pool=pool, joined=world.num_first(pool))
        for links in dict.fromkeys((old.links, new.links)):
            if links:
                ratio = new.bandwidth_ratio if links == new.links else 1.0
                yield TraceEvent(at_s=at_s, links=links, bandwidth_ratio=ratio, cause=cause)


@dataclass(frozen=True, slots=True)
class Preemptions:
    """A recorded trace of nodes that come and go; each node of it is one device of a pool."""

    pool: str
    trace: NodeTrace
    start_s: float = 0.0
    """Where in the trace the run begins."""

    time_ratio: float = 1.0
    """Seconds of the run per second of the trace."""

    notice_s: float = 0.0
    """How long before it goes a node is announced to go, in seconds of the run."""

    repeat: bool = True
    """Whether the trace begins anew after its last event, with as many nodes as at first."""

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """See ``Stream``. What carries one instant happens at once."""
        device_of: dict[str, str] = {}
        begin_s, start_s = float(env.now), self.start_s
        while True:
            self._set(device_of, self.trace.nodes_at(start_s), world)
            for at_s, announces, instant in self._due(begin_s, start_s):
                yield env.timeout(max(0.0, at_s - env.now))
                going = [node for node in instant.removed if node in device_of]
                if announces:
                    world.announce([device_of[node] for node in going], at_s + self.notice_s)
                    continue
                world.lose([device_of.pop(node) for node in going])
                for node in instant.added:
                    device_of[node] = world.join(self.pool).device_id
            if not self.repeat or self.trace.end_s <= start_s:
                return
            begin_s, start_s = float(env.now), 0.0

    def _due(self, begin_s: float, start_s: float) -> list[tuple[float, bool, Instant]]:
        """When on the run's clock each instant of the trace is announced, and when it comes."""
        found = []
        for instant in self.trace.instants:
            if instant.at_s > start_s:
                at_s = begin_s + (instant.at_s - start_s) * self.time_ratio
                if self.notice_s and instant.removed:
                    found.append((at_s - self.notice_s, True, instant))
                found.append((at_s, False, instant))
        return sorted(found, key=lambda due: due[0])

    def _set(self, device_of: dict[str, str], nodes: tuple[str, ...], world: "World") -> None:
        """Give every node present a device of the pool: one that is there, else a new one."""
        there = [device.device_id for device in world.present(self.pool)]
        kept, gone = there[: len(nodes)], there[len(nodes) :]
        world.lose(gone)
        kept += [world.join(self.pool).device_id for _ in range(len(nodes) - len(kept))]
        device_of.clear()
        device_of.update(zip(nodes, kept, strict=True))


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses that take several devices of a pool at once, and come back together.

    No law of the model stands behind them: rates and sizes are those of the scenario.
    """

    pool: str
    per_s: float
    devices: tuple[int, int]  # least and most that one loss takes
    return_after_s: float  # on average, exponential

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """See ``Stream``."""
        while True:
            yield env.timeout(float(rng.exponential(1.0 / self.per_s)))
            there = [device.device_id for device in world.present(self.pool)]
            low, high = self.devices
            count = min(len(there), int(rng.integers(low, high + 1)))
            taken = rng.permutation(len(there))[:count].tolist()
            if count:
                world.lose([there[i] for i in taken])
                env.process(
                    self._return(env, float(rng.exponential(self.return_after_s)), count, world)
                )

    def _return(self, env: simpy.Environment, wait_s: float, count: int, world: "World") -> Process:
        yield env.timeout(wait_s)
        for _ in range(count):
            world.join(self.pool)


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Devices or links that are slow for a while and recover by themselves (fail-slow)."""

    name: str
    per_s: float
    mean_s: float  # of the duration, exponential between the two bounds
    least_s: float
    most_s: float
    ratio: tuple[float, float]  # of the normal speed or bandwidth, drawn evenly between them
    pools: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # ("all",) or two zones; else devices of the pools are slow
    whole_share: float = 0.0
    """Of the events: all devices of the pools are slow, not one."""

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: "World") -> Process:
        """See ``Stream``. Events may overlap; each has a cause of its own."""
        number = 0
        while True:
            yield env.timeout(float(rng.exponential(1.0 / self.per_s)))
            number += 1
            lasts_s = float(np.clip(rng.exponential(self.mean_s), self.least_s, self.most_s))
            ratio = float(rng.uniform(*self.ratio))
            whole, pick = float(rng.random()) < self.whole_share, float(rng.random())
            env.process(self._one(env, (lasts_s, ratio), (whole, pick), number, world))

    def _one(
        self,
        env: simpy.Environment,
        how: tuple[float, float],
        whom: tuple[bool, float],
        number: int,
        world: "World",
    ) -> Process:
        (lasts_s, ratio), (whole, pick) = how, whom
        cause = f"{self.name}-{number}"
        devices = [d.device_id for pool in self.pools for d in world.present(pool)]
        if not whole and devices:
            devices = [devices[int(pick * len(devices))]]
        for changed in (ratio, 1.0):
            at_s = float(env.now)
            if self.links:
                world.happen(
                    TraceEvent(at_s=at_s, links=self.links, bandwidth_ratio=changed, cause=cause)
                )
            for device in devices:
                world.happen(TraceEvent(at_s=at_s, device=device, speed_ratio=changed, cause=cause))
            if changed != 1.0:
                yield env.timeout(lasts_s)
