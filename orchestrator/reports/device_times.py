"""Who was slow in a run: each device's computing, waiting and input, over all its slots."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.reports import figures
from orchestrator.reports.rows import PHASES, Times


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
