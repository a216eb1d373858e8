"""Who was slow in a run: each device's computing, waiting and input, over all its slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.reports import figures
from orchestrator.reports.rows import PHASES, SlotRow, Times


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """One device over a run; each phase as the least, the median of slots, and the most, in s."""

    device: str
    pool: str
    num_slots: int  # in which it ran steps
    slow_slots: tuple[int, ...]  # in which it was named a straggler
    worst_slot: int  # with the longest computing and input
    phases: Mapping[str, Times]

    @property
    def worst_ratio(self) -> float:
        """Its longest computing and input over what they usually are."""
        own = [self.phases["compute_s"], self.phases["input_s"]]
        usual_s = sum(times[1] for times in own)
        return sum(times[2] for times in own) / usual_s if usual_s else 1.0


def device_times(slots: Sequence[SlotRow]) -> tuple[DeviceTimes, ...]:
    """Every device that ran steps: those that were slow most often first, then the least even."""
    by_device: dict[str, list[SlotRow]] = {}
    pools: dict[str, str] = {}
    for slot in slots:
        pools |= slot.pool_of
        for device in slot.times_of:
            by_device.setdefault(device, []).append(slot)
    found = [_device(name, pools.get(name, ""), its) for name, its in by_device.items()]
    return tuple(sorted(found, key=lambda d: (-len(d.slow_slots), -d.worst_ratio, d.device)))


def _device(name: str, pool: str, slots: Sequence[SlotRow]) -> DeviceTimes:
    own_s = {s.slot: sum(s.times_of[name][p][2] for p in ("compute_s", "input_s")) for s in slots}
    phases = {}
    for phase in PHASES:
        least_s, median_s, most_s = zip(*(s.times_of[name][phase] for s in slots), strict=True)
        phases[phase] = min(least_s), median(median_s), max(most_s)
    return DeviceTimes(
        device=name,
        pool=pool,
        num_slots=len(slots),
        slow_slots=tuple(s.slot for s in slots if name in s.stragglers),
        worst_slot=max(own_s, key=lambda slot: own_s[slot]),
        phases=phases,
    )


DEVICE_HEAD = ("device", "pool", "slow in", "computing", "waiting", "input", "longest / median")


def device_cells(device: DeviceTimes) -> tuple[str, ...]:
    """One row of the table of devices: each time as the least, the median and the most."""
    slow = f"{len(device.slow_slots)} of {device.num_slots} slots" if device.slow_slots else "-"
    if len(device.slow_slots) == 1:
        slow += f" (slot {device.slow_slots[0]})"
    return (
        device.device,
        device.pool,
        slow,
        *(_three(device.phases[phase]) for phase in PHASES),
        f"{figures.number(device.worst_ratio)}x (slot {device.worst_slot})",
    )


def _three(times: Times) -> str:
    """Least, median and most, with one unit where all have the same."""
    told = [figures.seconds(time_s) for time_s in times]
    units = {text.partition(" ")[2] for text in told}
    if len(units) == 1:
        told[:-1] = [text.partition(" ")[0] for text in told[:-1]]
    return " / ".join(told)
