"""Markov environments: independent chains whose levels slow, price, remove or congest things.

Shape letters: T slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import ClusterState, Device, Link, Offer

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

EVERYWHERE = "all"
"""``links`` of a level that touches every link; else the two zones it touches."""

_LEVEL_KEYS = (
    "next", "pools", "links", "speed_ratio", "price_ratio", "bandwidth_ratio", "present",
)  # fmt: skip


def touches_link(links: tuple[str, ...], link: Link) -> bool:
    """Whether ``links`` of a level or event means this link."""
    return links == (EVERYWHERE,) or (bool(links) and {link.source, link.target} == set(links))


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a chain: what it does to whom, and where it may go within a slot."""

    name: str
    next: tuple[tuple[str, float], ...]  # another level -> probability within a slot
    pools: tuple[str, ...] = ()  # whose devices and offers it touches
    links: tuple[str, ...] = ()  # ("all",) or the two zones between which links are touched
    speed_ratio: float = 1.0  # of the devices' own normal speed
    price_ratio: float = 1.0
    bandwidth_ratio: float = 1.0
    present: bool = True

    def __post_init__(self) -> None:
        for name in ("speed_ratio", "price_ratio", "bandwidth_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"level {self.name!r}: {name} is {getattr(self, name)}; it must be positive"
                )
        leaving = sum(chance for _, chance in self.next)
        if any(not chance >= 0 for _, chance in self.next) or leaving > 1:
            raise ValueError(
                f"level {self.name!r}: next is {dict(self.next)}; probabilities of a slot are not "
                "negative and sum to 1 at most"
            )
        touches_pools = self.speed_ratio != 1 or self.price_ratio != 1 or not self.present
        if touches_pools and not self.pools:
            raise ValueError(f"level {self.name!r} says nothing of pools; write pools: [...]")
        if self.bandwidth_ratio != 1 and not self.links:
            raise ValueError(
                f"level {self.name!r} says nothing of links; write links: all, or two zones"
            )

    def of_device(self, device: Device) -> Device:
        """The device at this level."""
        if device.pool not in self.pools or self.speed_ratio == 1:
            return device
        return replace(device, slowdown=device.slowdown / self.speed_ratio)

    def of_offer(self, offer: Offer) -> Offer:
        """The offer at this level."""
        if offer.pool not in self.pools or self.price_ratio == 1:
            return offer
        return replace(offer, price_usd_per_s=offer.price_usd_per_s * self.price_ratio)

    def of_link(self, link: Link) -> Link:
        """The link at this level; latency stays."""
        return link.scaled(self.bandwidth_ratio) if touches_link(self.links, link) else link


@dataclass(frozen=True, slots=True)
class MarkovChain:
    """A few levels and the chances of moving between them; the first level is the start."""

    name: str
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"chain {self.name!r} has levels {names}; give distinct ones")
        for level in self.levels:
            for target, _ in level.next:
                if target not in names or target == level.name:
                    raise ValueError(
                        f"chain {self.name!r}: level {level.name!r} goes to {target!r}; write "
                        f"another of {', '.join(names)}"
                    )

    @property
    def transitions(self) -> FloatArray:
        """Probability of going from level (row) to level within a slot."""
        names = [level.name for level in self.levels]
        matrix = np.zeros((len(names), len(names)))
        for s, level in enumerate(self.levels):
            for target, chance in level.next:
                matrix[s, names.index(target)] = chance
            matrix[s, s] = 1.0 - matrix[s].sum()
        return matrix

    def walk(self, num_slots: int, rng: np.random.Generator, *, stationary: bool) -> IntArray:
        """Level of every slot; starts at the first level, or as the long run has it."""
        matrix = self.transitions
        state = int(rng.choice(len(matrix), p=_stationary(matrix))) if stationary else 0
        found = np.empty(num_slots, dtype=np.int64)
        at = 0
        while at < num_slots:
            if matrix[state, state] >= 1:
                found[at:] = state
                break
            stay, onward = dwell(matrix, state, rng)
            found[at : at + stay] = state
            at, state = at + stay, onward
        return found


def dwell(transitions: FloatArray, state: int, rng: np.random.Generator) -> tuple[int, int]:
    """Slots that a chain stays in a state which it can leave, and the state that follows."""
    stay = int(rng.geometric(1.0 - transitions[state, state]))
    onward = np.where(np.arange(len(transitions)) == state, 0.0, transitions[state])
    return stay, int(rng.choice(len(transitions), p=onward / onward.sum()))


@dataclass(frozen=True, slots=True)
class Environment:
    """Independent chains that move once a slot; a state is one level of each."""

    slot_s: float
    chains: tuple[MarkovChain, ...]
    _levels: tuple[tuple[Level, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.slot_s > 0:
            raise ValueError(f"slot_s of the environment is {self.slot_s}; it must be positive")
        levels = tuple(product(*(chain.levels for chain in self.chains)))
        object.__setattr__(self, "_levels", levels)

    @property
    def num_states(self) -> int:
        """Product of the chains' levels."""
        return len(self._levels)

    def levels(self, state: int) -> tuple[Level, ...]:
        """The level of every chain in a state."""
        return self._levels[state]

    @property
    def transitions(self) -> FloatArray:
        """Probability of going from state (row) to state within a slot."""
        return _product([chain.transitions for chain in self.chains], np.ones((1, 1)))

    @property
    def shares(self) -> FloatArray:
        """Share of the time in every state, in the long run."""
        return _product([_stationary(chain.transitions) for chain in self.chains], np.ones(1))

    @property
    def relaxation_slots(self) -> float:
        """Slots after which the slowest chain has forgotten its start to 1/e: 1/(1 - |e_2|)."""
        slowest = 0.0
        for chain in self.chains:
            sizes = sorted(np.abs(np.linalg.eigvals(chain.transitions)))
            if len(sizes) > 1:
                slowest = max(slowest, 1.0 / max(1e-12, 1.0 - float(sizes[-2])))
        return slowest

    def walk(
        self, num_slots: int, rng: np.random.Generator, *, stationary: bool = True
    ) -> IntArray:
        """State of every slot of a sample path."""
        state_T = np.zeros(num_slots, dtype=np.int64)
        for chain in self.chains:
            level_T = chain.walk(num_slots, rng, stationary=stationary)
            state_T = state_T * len(chain.levels) + level_T
        return state_T

    def apply(self, cluster: ClusterState, state: int) -> ClusterState:
        """The cluster, given as it is with every chain at rest, in a state."""
        for level in self.levels(state):
            devices = cluster.devices
            if not level.present:
                devices = tuple(d for d in devices if d.pool not in level.pools)
            cluster = replace(
                cluster,
                devices=tuple(map(level.of_device, devices)),
                offers=tuple(map(level.of_offer, cluster.offers)),
                links=tuple(map(level.of_link, cluster.links)),
            )
        return cluster


def _product(arrays: Sequence[FloatArray], start: FloatArray) -> FloatArray:
    """Kronecker product, the first array's index slowest."""
    found: FloatArray = start
    for array in arrays:
        found = np.asarray(np.kron(found, array), dtype=np.float64)
    return found


def _stationary(matrix: FloatArray) -> FloatArray:
    size = len(matrix)
    system = np.vstack([matrix.T - np.eye(size), np.ones(size)])
    found, *_ = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)
    shares: FloatArray = np.clip(found, 0.0, None)
    shares /= shares.sum()
    return shares


def environment_from(data: Mapping[str, Any]) -> Environment:
    """An environment as a scenario file holds it.

    Raises:
        ValueError: On an unknown key or an impossible value; names the chain and the level.
    """
    _only(data, ("slot_s", "chains"), "environment")
    chains = []
    for chain in data.get("chains", ()):
        _only(chain, ("name", "levels"), "environment.chains")
        name = str(chain.get("name", ""))
        levels = []
        for level_name, level in (chain.get("levels") or {}).items():
            _only(level, _LEVEL_KEYS, f"environment, chain {name!r}, level {level_name!r}")
            links = level.get("links", ())
            levels.append(
                Level(
                    name=str(level_name),
                    next=tuple((str(k), float(v)) for k, v in (level.get("next") or {}).items()),
                    pools=tuple(map(str, level.get("pools", ()))),
                    links=(links,) if isinstance(links, str) else tuple(map(str, links)),
                    speed_ratio=float(level.get("speed_ratio", 1.0)),
                    price_ratio=float(level.get("price_ratio", 1.0)),
                    bandwidth_ratio=float(level.get("bandwidth_ratio", 1.0)),
                    present=bool(level.get("present", True)),
                )
            )
        chains.append(MarkovChain(name, tuple(levels)))
    return Environment(float(data.get("slot_s", 60.0)), tuple(chains))


def _only(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            raise ValueError(f"{where} has the key {key!r}; write one of {', '.join(known)}")
