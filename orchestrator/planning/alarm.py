"""The alarm that a budget and what is asked beside it cannot both be had."""

from dataclasses import dataclass, replace

from orchestrator.core.durable import AlarmMark

MAX_WINDOW_SLOTS = 2000
"""Slots of the window, unless a day is shorter."""

MAX_WINDOW_HOURS = 24.0

CHECKS_PER_WINDOW = 4

RISE_SHARE = 0.01
"""Of the window's budget: a backlog that rose by more has not settled."""

MEMORY_WINDOWS = 16
"""A rise only counts above the highest level of so many windows. What the budget buys swings with
prices and devices from one window to the next, by several percent; a queue that swings with it
comes back to where it was, one that cannot settle does not."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a window asked for and what it reached."""

    window_s: float
    cost_usd_per_s: float  # c reached
    samples_per_s: float  # r reached
    backlog_rise_usd: float
    progress_rise_usd: float

    def message(self, budget_usd_per_s: float, floor_samples_per_s: float, hour_s: float) -> str:
        """Which constraint cannot be kept, by how much, and what to change.

        Args:
            budget_usd_per_s: b.
            floor_samples_per_s: r_min; 0: none.
            hour_s: Seconds of the run's clock that are billed as an hour.
        """
        text = (
            f"over {self.window_s / hour_s:.3g} h the run cost {self.cost_usd_per_s * hour_s:.4g} "
            f"$/h, {_off(self.cost_usd_per_s, budget_usd_per_s)} the budget.average_per_hour_usd "
            f"of {budget_usd_per_s * hour_s:.4g}"
        )
        if not floor_samples_per_s:
            return f"{text}, and the backlog still grows; raise it, or write allow_idle: true"
        return (
            f"{text}, and made {self.samples_per_s:.4g} samples/s, "
            f"{_off(self.samples_per_s, floor_samples_per_s)} the budget.min_samples_per_s of "
            f"{floor_samples_per_s:.4g}; both backlogs still grow: no plan keeps both; raise the "
            "one or lower the other"
        )


def _off(value: float, asked: float) -> str:
    ratio = value / asked - 1
    return f"{100 * abs(ratio):.2g} % {'above' if ratio > 0 else 'below'}"


@dataclass(frozen=True, slots=True)
class InfeasibilityAlarm:
    """Watches whether the queues that must settle go on growing.

    Over a window, every watched queue rose by more than 1 % of the window's budget, to a level
    it did not have before; looked at every quarter of a window. With a progress floor the budget
    and the floor both must rise: one of them alone still trades against the other. Without a
    floor only a run that may not idle can be short of money, and the backlog alone decides.

    Source: docs/model.md, section 4.6.
    """

    window_s: float
    budget_usd_per_s: float
    floor_samples_per_s: float = 0.0
    allow_idle: bool = True
    marks: tuple[AlarmMark, ...] = ()  # a quarter of a window apart, oldest first

    def look(self, now: AlarmMark) -> tuple["InfeasibilityAlarm", Shortage | None]:
        """The alarm after a slot, and what it found when a check was due and failed."""
        if self.allow_idle and not self.floor_samples_per_s:
            return self, None  # idling keeps any budget
        due_s = self.window_s / CHECKS_PER_WINDOW
        if self.marks and now.time_s - self.marks[-1].time_s < due_s:
            return self, None
        marks = (*self.marks, now)[-(MEMORY_WINDOWS * CHECKS_PER_WINDOW + 1) :]
        watching = replace(self, marks=marks)
        if len(marks) <= CHECKS_PER_WINDOW:
            return watching, None
        return watching, self._shortage(marks[:-CHECKS_PER_WINDOW], now)

    def _shortage(self, before: tuple[AlarmMark, ...], now: AlarmMark) -> Shortage | None:
        """What is short in the window that began with the last of ``before``."""
        then = before[-1]
        seconds = now.time_s - then.time_s
        scales = [now.penalty_weight / mark.penalty_weight for mark in before]
        backlogs = [k * mark.backlog_usd for k, mark in zip(scales, before, strict=True)]
        progress = [k * mark.progress_usd for k, mark in zip(scales, before, strict=True)]
        found = Shortage(
            window_s=seconds,
            cost_usd_per_s=(now.spent_usd - then.spent_usd) / seconds,
            samples_per_s=(now.samples - then.samples) / seconds,
            backlog_rise_usd=now.backlog_usd - max(backlogs),
            progress_rise_usd=now.progress_usd - max(progress),
        )
        rises = [found.backlog_rise_usd]
        if self.floor_samples_per_s:
            rises.append(found.progress_rise_usd)
        least_usd = RISE_SHARE * self.budget_usd_per_s * seconds
        return found if min(rises) > least_usd else None


def alarm_window_s(slot_s: float, hour_s: float) -> float:
    """Length of the window in seconds of the run's clock: 2000 slots or a day, what is shorter."""
    return min(MAX_WINDOW_SLOTS * slot_s, MAX_WINDOW_HOURS * hour_s)
