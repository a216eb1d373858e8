"""A scenario file: what happens to the cluster of a simulated run, beyond what its config says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.document import read_document
from orchestrator.errors import ConfigError
from orchestrator.inputs import read_text
from orchestrator.simulation.environments import environment_from
from orchestrator.simulation.preemptions import read_node_trace
from orchestrator.simulation.streams import (
    Chain,
    Losses,
    Preemptions,
    Replay,
    Slowdowns,
    Stream,
)
from orchestrator.simulation.traces import TraceEvent

HOUR_S, MINUTE_S = 3600.0, 60.0

SLOW_PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One node of 4: 1.5 % of jobs of 80 minutes, for 10 minutes; a hot device x 0.8, or
    # contention for the node's processor x 0.784.
    "node": {
        "per_hour": 0.01125, "mean_minutes": 10.0, "minutes": [1.0, 60.0],
        "ratio": [0.78, 0.8], "whole_share": 0.5,
    },
    # 4 nodes of 8: 40 % of jobs of 5 hours, nearly all on the network, for 24 minutes.
    "cluster": {
        "per_hour": 0.08, "mean_minutes": 24.0, "minutes": [1.0, 100.0], "ratio": [0.54, 0.72],
        "links": "all",
    },
    # 512 devices and more: 59 % of jobs, taken as a day long, for 72 minutes up to 10 hours.
    "fleet": {
        "per_hour": 0.0246, "mean_minutes": 72.0, "minutes": [18.0, 600.0], "ratio": [0.2, 0.65],
        "links": "all",
    },
}  # fmt: skip
"""Published frequencies, durations and severities of fail-slow events (docs/scenarios.md)."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Streams of events, in seconds of the run, and the seed of their random numbers."""

    streams: tuple[Stream, ...] = ()
    seed: int = 0


def load_scenario(path: str, *, pools: Sequence[str], billing_speedup: float = 1.0) -> Scenario:
    """Read a scenario file; its times are billed ones.

    Args:
        path: Of the YAML file. Files that it names are relative to the working directory.
        pools: Those that are on offer.
        billing_speedup: Billed seconds per second of the run.

    Raises:
        ConfigError: If a file cannot be read or says something impossible; names the place.
    """
    data = read_document(read_text(path, path, "give a scenario file"), path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds no keys; write environment, preemptions, losses, ...")
    reader = _Reader(path, tuple(pools), billing_speedup)
    streams: list[Stream] = []
    for key, value in data.items():
        if key == "seed":
            continue
        if key not in _SECTIONS:
            raise ConfigError(
                f"{path}: {key!r} is no section; write one of seed, {', '.join(_SECTIONS)}"
            )
        try:
            streams += _SECTIONS[key](reader, value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: {key}: {what}") from None
    return Scenario(tuple(streams), int(data.get("seed", 0)))


@dataclass(frozen=True, slots=True)
class _Reader:
    path: str
    pools: tuple[str, ...]
    speedup: float

    def seconds(self, billed_s: object) -> float:
        return float(str(billed_s)) / self.speedup

    def pool(self, name: object) -> str:
        if name not in self.pools:
            raise ValueError(f"pool {name!r} is not on offer; write one of {', '.join(self.pools)}")
        return str(name)

    def environment(self, data: Mapping[str, Any]) -> list[Stream]:
        found = environment_from(data)
        for chain in found.chains:
            for level in chain.levels:
                for pool in level.pools:
                    self.pool(pool)
        return [Chain(chain, found.slot_s / self.speedup) for chain in found.chains]

    def preemptions(self, rows: Sequence[Mapping[str, Any]]) -> list[Stream]:
        return [self._preemption(row) for row in rows]

    def _preemption(self, row: Mapping[str, Any]) -> Stream:
        _only(row, ("pool", "path", "start_hour", "notice_s", "repeat"))
        name = f"path {row['path']!r}"
        where = f"{self.path}: preemptions: {name}"
        lines = read_text(str(row["path"]), where, "give a trace of nodes").splitlines()
        try:
            trace = read_node_trace(lines)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return Preemptions(
            pool=self.pool(row["pool"]),
            trace=trace,
            start_s=float(row.get("start_hour", 0.0)) * HOUR_S,
            time_ratio=1.0 / self.speedup,
            notice_s=self.notice(row) or 0.0,
            repeat=bool(row.get("repeat", True)),
        )

    def notice(self, row: Mapping[str, Any]) -> float | None:
        """Seconds of the run from the announcement of a loss to the loss; None: no such key."""
        if "notice_s" not in row:
            return None
        notice_s = float(row["notice_s"])
        if not 0 <= notice_s < float("inf"):
            raise ValueError(f"notice_s is {row['notice_s']!r}; write the seconds, 0 or more")
        return self.seconds(notice_s)

    def losses(self, rows: Sequence[Mapping[str, Any]]) -> list[Stream]:
        found: list[Stream] = []
        for row in rows:
            _only(row, ("pool", "per_hour", "devices", "return_after_hours"))
            low, high = _pair(row, "devices")
            found.append(
                Losses(
                    pool=self.pool(row["pool"]),
                    per_s=_positive(row, "per_hour") / HOUR_S * self.speedup,
                    devices=(round(low), round(high)),
                    return_after_s=self.seconds(_positive(row, "return_after_hours") * HOUR_S),
                )
            )
        return found

    def slowdowns(self, rows: Sequence[Mapping[str, Any]]) -> list[Stream]:
        return [self._slowdown(number, row) for number, row in enumerate(rows)]

    def _slowdown(self, number: int, row: Mapping[str, Any]) -> Stream:
        _only(
            row,
            ("preset", "per_hour", "mean_minutes", "minutes", "ratio", "pools", "links",
             "whole_share"),
        )  # fmt: skip
        preset = row.get("preset")
        if preset is not None and preset not in SLOW_PRESETS:
            raise ValueError(f"preset {preset!r}; write one of {', '.join(SLOW_PRESETS)}")
        whole = {**(SLOW_PRESETS[preset] if preset else {}), **row}
        links = whole.get("links", ())
        pools = tuple(self.pool(pool) for pool in whole.get("pools", ()))
        if not links and not pools:
            raise ValueError(
                "a slow-down touches devices or links; write pools: [...] or links: all"
            )
        least, most = _pair(whole, "minutes")
        return Slowdowns(
            name=f"slow{number}",
            per_s=_positive(whole, "per_hour") / HOUR_S * self.speedup,
            mean_s=self.seconds(_positive(whole, "mean_minutes") * MINUTE_S),
            least_s=self.seconds(least * MINUTE_S),
            most_s=self.seconds(most * MINUTE_S),
            ratio=_pair(whole, "ratio"),
            pools=pools,
            links=(links,) if isinstance(links, str) else tuple(map(str, links)),
            whole_share=float(whole.get("whole_share", 0.0)),
        )

    def events(self, rows: Sequence[Mapping[str, Any]]) -> list[Stream]:
        found = []
        for row in rows:
            _only(
                row,
                (
                    "at_hour",
                    "device",
                    "pool",
                    "speed_ratio",
                    "price_per_hour",
                    "lost",
                    "joined",
                    "notice_s",
                ),
            )
            price = row.get("price_per_hour")
            if row.get("pool") is not None:
                self.pool(row["pool"])
            found.append(
                TraceEvent(
                    at_s=self.seconds(float(row["at_hour"]) * HOUR_S),
                    device=row.get("device"),
                    pool=row.get("pool"),
                    speed_ratio=None if "speed_ratio" not in row else _positive(row, "speed_ratio"),
                    price_usd_per_s=None
                    if price is None
                    else _positive(row, "price_per_hour") / HOUR_S * self.speedup,
                    lost=bool(row.get("lost", False)),
                    joined=int(row.get("joined", 0)),
                    notice_s=self.notice(row),
                )
            )
        return [Replay(tuple(found))]


_SECTIONS: Mapping[str, Callable[[_Reader, Any], list[Stream]]] = {
    "environment": _Reader.environment,
    "preemptions": _Reader.preemptions,
    "losses": _Reader.losses,
    "slowdowns": _Reader.slowdowns,
    "events": _Reader.events,
}


def _only(row: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in row:
        if key not in known:
            raise ValueError(f"the key {key!r} is not known; write one of {', '.join(known)}")


def _positive(row: Mapping[str, Any], name: str) -> float:
    value = float(row[name])
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {row[name]!r}; it must be positive")
    return value


def _pair(row: Mapping[str, Any], name: str) -> tuple[float, float]:
    low, high = (float(value) for value in row[name])
    if not 0 < low <= high:
        raise ValueError(f"{name} is {row[name]!r}; write [least, most], both positive")
    return low, high
