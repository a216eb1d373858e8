"""When a run's money is used up, if it goes on as of late."""

from collections import deque

from orchestrator.core.slot import SlotRecord

WINDOW_S = 3600.0
"""Billed seconds over which the rate is taken: long enough for the turns of work and idling by
which the budget is kept, short enough to follow a change of prices."""


class Spending:
    """Follows what a run has spent, slot by slot."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()  # billed seconds, dollars spent by then

    def lasts_s(self, record: SlotRecord) -> float | None:
        """Take in a slot; return for how many billed seconds the rest of the money lasts.

        The rest of the hard cap, else of what the average allows over its horizon, at the rate
        of the last ``WINDOW_S``, or of the slots there are of it, two at least. Negative: it has
        been used up for about as long. None: nothing is being spent.
        """
        marks = self._marks
        marks.append((record.time_s, record.spent_usd))
        while len(marks) > 2 and marks[1][0] <= record.time_s - WINDOW_S:
            marks.popleft()
        passed_s, usd = record.time_s - marks[0][0], record.spent_usd - marks[0][1]
        if record.budget is None or passed_s <= 0 or usd <= 0:
            return None
        return (record.budget.whole_usd - record.spent_usd) * passed_s / usd
