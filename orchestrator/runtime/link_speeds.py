"""Links as measured: which pairs of devices are timed, and the rules that say what they gave."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from orchestrator.control.links import GB
from orchestrator.control.recovery import Timeouts
from orchestrator.core.cluster import Device
from orchestrator.runtime.fleet import Fleet

PAIRS = 3
"""So many pairs of devices are timed for one rule."""

TOLERANCE = 0.2
"""Up to this relative error one bandwidth says what messages of all sizes take."""

Timings = tuple[tuple[int, float], ...]  # message bytes, seconds one way


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What messages take inside the nodes of a pool, between them, or between two pools."""

    place: str  # as a rule of cluster.links says it
    latency_s: float
    bandwidth_bytes_per_s: float  # of the largest message
    points: tuple[tuple[int, float], ...] = ()  # (message bytes, bytes/s) where one is not enough

    @property
    def rule(self) -> str:
        """The line for ``cluster.links``."""
        rate = f"bandwidth_gbytes_per_s: {_plain(self.bandwidth_bytes_per_s / GB)}"
        if self.points:
            points = ", ".join(f"[{size}, {_plain(rate)}]" for size, rate in self.points)
            rate = f"points: [{points}]"
        return f"- {{{self.place}, latency_s: {_plain(self.latency_s)}, {rate}}}"


def _plain(value: float) -> str:
    """Three digits without an exponent: YAML takes 1e-05 for text."""
    return f"{float(f'{value:.3g}'):.12f}".rstrip("0").rstrip(".")


def places_of(devices: Sequence[Device]) -> dict[str, list[tuple[str, str]]]:
    """The rules that the paths between some devices need, each with pairs that may be timed."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one, other in combinations(sorted(devices, key=lambda d: d.device_id), 2):
        if one.node_id == other.node_id:
            place = f"within: node, pool: {one.pool}"
        elif one.pool == other.pool:
            place = f"within: zone, pool: {one.pool}"
        else:
            place = f"between: [{', '.join(sorted((one.pool, other.pool)))}]"
        found.setdefault(place, []).append((one.device_id, other.device_id))
    return {place: _spread(pairs) for place, pairs in found.items()}


def _spread(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Some of the pairs, from all over the pools."""
    step = max(1, len(pairs) // PAIRS)
    return list(pairs[::step][:PAIRS])


def fitted(place: str, timings: Iterable[Timings]) -> MeasuredLink:
    """Latency, and one bandwidth or one for each size, from what pairs of one place gave.

    The median over the pairs counts; sizes that only some of them reached do not.
    """
    by_size: dict[int, list[float]] = {}
    every = list(timings)
    for found in every:
        for size, seconds in found:
            by_size.setdefault(size, []).append(seconds)
    taken = {s: median(found) for s, found in by_size.items() if len(found) == len(every)}
    smallest, *larger = sorted(taken)
    latency_s = taken[smallest]
    points = tuple(
        (size, size / (taken[size] - latency_s)) for size in larger if taken[size] > latency_s
    )
    if not points:
        return MeasuredLink(place, latency_s, smallest / latency_s)
    rate = points[-1][1]
    errors = [abs((latency_s + size / rate) / taken[size] - 1.0) for size in larger]
    return MeasuredLink(place, latency_s, rate, points if max(errors) > TOLERANCE else ())


def time_pairs(
    fleet: Fleet, pairs: Iterable[tuple[str, str]], host: str, timeouts: Timeouts
) -> dict[tuple[str, str], Timings]:
    """Have workers send each other messages, one pair after another: they share the network.

    Args:
        fleet: Workers that are up, and run no step.
        pairs: Devices that send, and those that answer.
        host: Where this process can be reached by all of them.
        timeouts: How long a message may take.
    """
    pairs, secret = list(pairs), secrets.token_bytes(32)
    answering = sorted({other for _, other in pairs})
    if not answering:
        return {}
    addresses, _ = fleet.ask(
        "listen", str, host, secret, timeouts.receive_s,
        timeout_s=timeouts.hold_s, patience_s=timeouts.hold_s, device_ids=answering,
    )  # fmt: skip
    found: dict[tuple[str, str], Timings] = {}
    for one, other in pairs:
        if other in addresses and one in fleet.device_ids:
            answers, _ = fleet.ask(
                "time_messages", tuple, secret, timeouts.receive_s, addresses[other],
                timeout_s=timeouts.start_s, patience_s=timeouts.start_s, device_ids=(one,),
            )  # fmt: skip
            for answer in answers.values():
                found[one, other] = answer
    fleet.tell("stop_listening", device_ids=addresses)
    return found


def as_rules(
    devices: Sequence[Device], timings: Mapping[tuple[str, str], Timings]
) -> tuple[MeasuredLink, ...]:
    """A rule for each place that was measured."""
    found = []
    for place, pairs in places_of(devices).items():
        if told := [timings[pair] for pair in pairs if pair in timings]:
            found.append(fitted(place, told))
    return tuple(found)
