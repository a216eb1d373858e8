"""How far something is from its own prediction: followed slowly, by jumps, and given up with age.

A quantity is the logarithm of measured over predicted time. Nothing is ever compared with what
another device does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean, pstdev

from orchestrator.core.durable import Trend

HALF_LIFE_SLOTS = 2.5
"""Slots after which an old level counts half, as long as nothing jumped."""

DRIFT_SIGMAS, DRIFT_FLOOR = 0.5, 0.025
THRESHOLD_SIGMAS, THRESHOLD_FLOOR = 8.0, 0.10
"""Of the cumulative sums, in logarithms of a ratio: about one false alarm in 19,000 steps."""

OUTLIER_SHARE = 0.8
"""Share of the threshold that one step may add: two in a row raise the alarm, never one."""

WINDOW_SLOTS = 24
WINDOW_STEPS = 32
"""What is kept of slots, and of the steps since a change may have begun."""

MIN_STEPS = 8
"""Before their spread is trusted; until then only the floors count."""

MIN_SLOTS = 4
"""Before what they have in common is."""

SIGMA_PER_MEDIAN_DEVIATION = 1.4826

DIGITS = 4
"""Of a logarithm that is kept."""

FLAPPING_LEGS = 3
PATIENCE_SLOTS_PER_LEG = 3
"""Up, down and up again within the window is flapping: what flaps is planned with as it is on
average, until it has been steady for so many slots for each time it went up or down."""

ODD_SHARE = 0.25
"""Of slots: the slowest are oddities that do not count in an average."""

RETRY_SLOTS, MOST_TRIALS = 20, 3
"""An estimate that nothing has confirmed for so many slots is given up, so that a device that
recovers while it is idle is used again; twice as many whenever it was still slow then, up to eight
times as many."""


@dataclass(slots=True)
class _Sums:
    """Two-sided cumulative sums, and the samples since each was last zero."""

    drift: float
    threshold: float
    up: float
    down: float
    since_up: tuple[float, ...]
    since_down: tuple[float, ...]

    def add(self, sample: float, level: float) -> tuple[float, ...]:
        """Advance; the samples since the change when one of the sums passes the threshold."""
        most = OUTLIER_SHARE * self.threshold
        error = max(-most, min(most, sample - level))
        self.up = max(0.0, self.up + error - self.drift)
        self.down = max(0.0, self.down - error - self.drift)
        self.since_up = (*self.since_up, sample)[-WINDOW_STEPS:] if self.up else ()
        self.since_down = (*self.since_down, sample)[-WINDOW_STEPS:] if self.down else ()
        if max(self.up, self.down) <= self.threshold:
            return ()
        found = self.since_up if self.up > self.down else self.since_down
        self.up = self.down = 0.0
        self.since_up = self.since_down = ()
        return found


def measured(trend: Trend, samples: Sequence[float]) -> Trend:
    """With one more slot's steps: follow slowly, or jump when the cumulative sums say so.

    Source: docs/model.md, section 6.
    """
    steps = [round(sample, DIGITS) for sample in samples]
    is_known = trend.num_steps >= MIN_STEPS
    sigma = SIGMA_PER_MEDIAN_DEVIATION * _median(trend.noise) if is_known else 0.0
    sums = _Sums(
        max(DRIFT_SIGMAS * sigma, DRIFT_FLOOR),
        max(THRESHOLD_SIGMAS * sigma, THRESHOLD_FLOOR),
        trend.up,
        trend.down,
        trend.since_up,
        trend.since_down,
    )
    now, deviations = trend.now, []
    changed: list[float] = []  # the steps since the last jump
    for step in steps:
        if changed:
            changed.append(step)
        deviations.append(abs(step - now))
        if since := sums.add(step, now):
            changed, now = list(since), _median(since)
    apart = _median(steps) - now
    if changed:
        now = _median(changed)
    elif abs(apart) < OUTLIER_SHARE * sums.threshold:  # else an odd slot
        now += _weight(trend.means) * apart
    now = round(now, DIGITS)
    # Of one step the logarithm of its own exponential, which is itself once it is rounded.
    mean = log(fmean(map(exp, steps))) if len(steps) > 1 else steps[0] + 0.0  # 0, never -0
    means = _kept(trend.means, mean)
    nows = _kept(trend.nows, now)
    average = _average(trend, means, nows)
    return Trend(  # once a device and slot: ``replace`` would take three times as long
        level=now if average is None else average,
        now=now,
        averaged=average is not None,
        num_steps=trend.num_steps + len(steps),
        noise=_kept(trend.noise, _median(deviations)),
        means=means,
        nows=nows,
        up=round(sums.up, DIGITS),
        down=round(sums.down, DIGITS),
        since_up=sums.since_up,
        since_down=sums.since_down,
        num_trials=trend.num_trials,
        on_trial=trend.on_trial,
        given_up=trend.given_up,
        slots_slow=trend.slots_slow,
        slots_well=trend.slots_well,
    )


def _median(values: Sequence[float]) -> float:
    """As ``statistics.median``, without its checks: it is asked for five times a device."""
    if len(values) == 1:
        return values[0]
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _kept(window: tuple[float, ...], value: float) -> tuple[float, ...]:
    return (*window, round(value, DIGITS))[-WINDOW_SLOTS:]


def _weight(means: Sequence[float]) -> float:
    """Of a new slot: the more slots differ, the less, so that noise does not move the level."""
    weight = 1 - exp(-log(2) / HALF_LIFE_SLOTS)
    if len(means) < MIN_SLOTS:
        return weight
    middle = _median(means)
    spread = SIGMA_PER_MEDIAN_DEVIATION * _median([abs(m - middle) for m in means])
    return weight * min(1.0, DRIFT_FLOOR / spread) if spread else weight


def _average(before: Trend, means: Sequence[float], nows: Sequence[float]) -> float | None:
    """What to plan with where the newest steps are no good guide; None where they are.

    They are none to what flaps, nor where odd steps, too few in a row to be a jump, come back
    slot after slot. What was averaged is so until it has been steady for as long.
    """
    now, last = nows[-1], len(nows) - 1
    change, legs = None, 0
    if max(nows) - min(nows) > THRESHOLD_FLOOR:
        apart = (i for i in range(last, -1, -1) if abs(nows[i] - now) > THRESHOLD_FLOOR)
        change, legs = next(apart, None), _legs(nows)
    # The slot of a change is neither what was nor what is.
    settled = means if change is None else means[change + 2 :]
    if before.averaged:
        legs = max(legs, FLAPPING_LEGS)
    flaps = legs >= FLAPPING_LEGS and len(settled) < PATIENCE_SLOTS_PER_LEG * legs
    if (
        settled
        and not flaps
        and max(abs(max(settled) - now), abs(min(settled) - now)) <= (THRESHOLD_FLOOR)
    ):
        return None  # no slot is off, nor is their average
    recent = sorted(means if flaps else settled)
    if not flaps and len(recent) < (1 if before.on_trial else MIN_SLOTS):
        return None
    average = fmean(recent[: len(recent) - int(ODD_SHARE * len(recent))])
    if not flaps and abs(average - now) <= THRESHOLD_FLOOR:
        return None
    # An average that moved by less than half of what slots differ by has not moved.
    moved = abs(average - before.level) > max(THRESHOLD_FLOOR, pstdev(recent) / 2)
    return round(average, DIGITS) if moved else before.level


def _legs(nows: Sequence[float]) -> int:
    """How often it went up or down, one after the other."""
    legs = direction = 0
    turned_at = nows[0]
    for now in nows:
        if direction * (now - turned_at) > 0:
            turned_at = now  # the leg goes on
        elif abs(now - turned_at) > THRESHOLD_FLOOR:
            legs, direction, turned_at = legs + 1, 1 if now > turned_at else -1, now
    return legs


def unseen(trend: Trend, usual: float) -> Trend:
    """With one more slot in which nothing was measured; given up, it takes the usual level."""
    slots_unseen = trend.slots_unseen + 1
    wait_slots = RETRY_SLOTS << (trend.num_trials + trend.averaged)  # what flaps is worse to try
    if trend.num_steps and slots_unseen < wait_slots:
        return replace(trend, slots_unseen=slots_unseen)
    return Trend(
        level=usual,
        now=usual,
        slots_unseen=slots_unseen,
        num_trials=trend.num_trials,
        on_trial=trend.on_trial or trend.slots_slow > 0,
        given_up=trend.level if trend.slots_slow > 0 else trend.given_up,
    )


def judged(trend: Trend, *, slow: bool) -> Trend:
    """With the verdict on a slot in which it was measured.

    What is slow again when it is given another try is as slow as it was: one change of plan.
    """
    if slow:
        failed = trend.on_trial
        return replace(
            trend,
            level=max(trend.level, trend.given_up) if failed else trend.level,
            averaged=trend.averaged and not failed,
            num_trials=min(trend.num_trials + failed, MOST_TRIALS),
            on_trial=False,
            slots_slow=trend.slots_slow + 1,
            slots_well=0,
        )
    if trend.slots_well == RETRY_SLOTS and not (trend.slots_slow or trend.num_trials):
        return trend  # as most are, slot after slot
    slots_well = min(trend.slots_well + 1, RETRY_SLOTS)
    proved = slots_well >= RETRY_SLOTS
    return replace(
        trend,
        num_trials=0 if proved else trend.num_trials,
        on_trial=trend.on_trial and not proved,
        slots_slow=0,
        slots_well=slots_well,
    )
