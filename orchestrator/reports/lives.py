"""What each device did, slot by slot: in equal stretches, and how long its steps took."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import cast

from orchestrator.reports.device_times import DeviceTimes
from orchestrator.reports.rows import PHASES, Row, map_of, number_of


@dataclass(frozen=True, slots=True)
class Place:
    """What a plan gives a device: layers ``first_layer`` to ``end_layer``, half-open."""

    group: int
    stage: int
    first_layer: int
    end_layer: int
    samples: int  # of its group, a step
    of_samples: int  # of all groups


@dataclass(frozen=True, slots=True)
class Stretch:
    """Billed seconds in which a device did the same; without a place it was there and idle."""

    from_s: float
    to_s: float
    place: Place | None
    slow: bool  # named a straggler


@dataclass(frozen=True, slots=True)
class Life:
    """One device over a run: its stretches in order, with gaps where it was not there."""

    device: str
    pool: str
    kind: str
    stretches: tuple[Stretch, ...]

    @property
    def used_s(self) -> float:
        """Billed seconds in plans."""
        return sum(s.to_s - s.from_s for s in self.stretches if s.place)

    @property
    def idle_s(self) -> float:
        """Billed seconds there, but in no plan."""
        return sum(s.to_s - s.from_s for s in self.stretches if not s.place)

    @property
    def slow_s(self) -> float:
        """Billed seconds as a straggler."""
        return sum(s.to_s - s.from_s for s in self.stretches if s.slow)


def places(plan: Row) -> dict[str, Place]:
    """What a plan, in the form of the user's files, gives each of its devices."""
    found: dict[str, Place] = {}
    groups = plan.get("groups")
    if not isinstance(groups, list):
        return found
    sizes = [sum(group["microbatches"]) for group in groups]
    for g, group in enumerate(groups):
        for s, stage in enumerate(group["stages"]):
            place = Place(g, s, stage["first_layer"], stage["end_layer"], sizes[g], sum(sizes))
            found |= dict.fromkeys(stage["devices"], place)
    return found


class Lives:
    """Takes the lines of ``slots.jsonl`` in their order, and holds no more than is told of them."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._plan: Row = {}
        self._places: dict[str, Place] = {}
        self._there: set[str] | None = None
        self._known: dict[str, tuple[str, str]] = {}  # pool and kind
        self._done: dict[str, list[Stretch]] = {}
        self._open: dict[str, _Open] = {}
        self._tallies: dict[str, _Tally] = {}

    def add(self, row: Row, slot: int) -> None:
        """The next slot."""
        from_s, self._now_s = self._now_s, number_of(row, "time_s") or 0.0
        plan, devices = map_of(row, "plan"), map_of(row, "devices")
        if plan != self._plan:
            self._plan, self._places = plan, places(plan)
        there = {d for d, v in devices.items() if isinstance(v, dict) and v.get("state") != "lost"}
        before = there if self._there is None else self._there
        self._there = there
        for device, view in devices.items():
            if not isinstance(view, dict):
                continue
            if device not in self._known:
                self._known[device] = str(view.get("pool", "")), str(view.get("kind", ""))
            slow = bool(view.get("straggler"))
            place = self._places.get(device)
            if place is not None or device in before:  # else it joined at the end of the slot
                self._extend(device, from_s, place, slow=slow)
            if isinstance(view.get("compute_s"), list):
                if device not in self._tallies:
                    self._tallies[device] = _Tally()
                self._tallies[device].add(view, slot, slow=slow)
        for device in self._places.keys() - devices.keys():
            self._known.setdefault(device, ("", ""))
            self._extend(device, from_s, self._places[device], slow=False)

    def lives(self) -> tuple[Life, ...]:
        """Every device that was ever there, by pool and number."""
        return tuple(
            Life(device, *self._known[device], (*self._done.get(device, ()), *last))
            for device in sorted(self._known, key=lambda d: (self._known[d][0], _natural(d)))
            for last in [[self._open[device].closed()] if device in self._open else []]
        )

    def times(self) -> tuple[DeviceTimes, ...]:
        """Every device that ran steps: those slow most often first, then the least even."""
        found = [
            tally.told(device, self._known[device][0]) for device, tally in self._tallies.items()
        ]
        return tuple(sorted(found, key=lambda d: (-len(d.slow_slots), -d.worst_ratio, d.device)))

    def _extend(self, device: str, from_s: float, place: Place | None, *, slow: bool) -> None:
        if self._now_s <= from_s:
            return
        last = self._open.get(device)
        if last is not None:
            same_place = last.place is place or last.place == place  # most often the very same
            if same_place and last.to_s == from_s and last.slow == slow:
                last.to_s = self._now_s
                return
            self._done.setdefault(device, []).append(last.closed())
        self._open[device] = _Open(from_s, self._now_s, place, slow)


@dataclass(slots=True)
class _Open:
    """A stretch that may go on: making a new one of every slot took most of the time."""

    from_s: float
    to_s: float
    place: Place | None
    slow: bool

    def closed(self) -> Stretch:
        return Stretch(self.from_s, self.to_s, self.place, self.slow)


class _Times:
    """One phase of the steps of a device: no more is kept than least, median and most."""

    __slots__ = ("least_s", "medians_s", "most_s")

    def __init__(self) -> None:
        self.least_s, self.most_s = float("inf"), 0.0
        self.medians_s = array("d")

    def add(self, times: list[float]) -> None:
        least_s, median_s, most_s = times
        self.medians_s.append(median_s)
        self.least_s = min(self.least_s, least_s)
        self.most_s = max(self.most_s, most_s)


class _Tally:
    """The steps of one device."""

    def __init__(self) -> None:
        self._compute, self._wait, self._input = self._phases = _Times(), _Times(), _Times()
        self._slow_slots: list[int] = []
        self._worst_slot, self._worst_s = 0, -1.0

    def add(self, view: Mapping[str, object], slot: int, *, slow: bool) -> None:
        compute, wait, loading = [cast("list[float]", view[phase]) for phase in PHASES]
        self._compute.add(compute)  # as they were written
        self._wait.add(wait)
        self._input.add(loading)
        own_s = compute[2] + loading[2]
        if own_s > self._worst_s:
            self._worst_slot, self._worst_s = slot, own_s
        if slow:
            self._slow_slots.append(slot)

    def told(self, device: str, pool: str) -> DeviceTimes:
        spreads = [(p.least_s, median(p.medians_s), p.most_s) for p in self._phases]
        return DeviceTimes(
            device=device,
            pool=pool,
            num_slots=len(self._compute.medians_s),
            slow_slots=tuple(self._slow_slots),
            worst_slot=self._worst_slot,
            phases=dict(zip(PHASES, spreads, strict=True)),
        )


def _natural(device: str) -> tuple[str, int, str]:
    """fast-2 before fast-10."""
    name, _, index = device.rpartition("-")
    return (name, int(index), "") if index.isdecimal() else (device, 0, "")
