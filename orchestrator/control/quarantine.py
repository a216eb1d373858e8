"""When a device that was lost may be used again: at once the first time, then later each time."""

from dataclasses import dataclass, field

MOST_DOUBLINGS = 6
FORGIVEN = 16.0
"""A device that worked for so many times its longest wait is as good as a new one."""


@dataclass(slots=True)
class _Record:
    num_losses: int = 0
    until_s: float = 0.0


@dataclass(slots=True)
class Quarantine:
    """Remembers losses by device; all times are seconds of the run's clock.

    The first loss costs no wait: processes die for many reasons. The n-th one after that
    costs ``base_s`` times 2^(n-1), up to 2^6: a device that dies whenever it is used takes
    the run ever less time.
    """

    base_s: float
    _records: dict[str, _Record] = field(default_factory=dict)

    def lost(self, device_id: str, now_s: float) -> float:
        """Take note of a loss; return when the device may come back."""
        record = self._records.setdefault(device_id, _Record())
        if now_s - record.until_s > FORGIVEN * self._wait_s(max(1, record.num_losses)):
            record.num_losses = 0
        record.num_losses += 1
        record.until_s = now_s + self._wait_s(record.num_losses - 1)
        return record.until_s

    def holds(self, device_id: str, now_s: float) -> bool:
        """Whether a device must still wait."""
        record = self._records.get(device_id)
        return record is not None and now_s < record.until_s

    def _wait_s(self, num_repeats: int) -> float:
        if num_repeats == 0:
            return 0.0
        return self.base_s * 2.0 ** min(num_repeats - 1, MOST_DOUBLINGS)
