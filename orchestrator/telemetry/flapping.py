"""What flaps, or is odd slot after slot: planned with as it is on average."""

from collections.abc import Sequence
from statistics import fmean, pstdev

THRESHOLD_FLOOR = 0.10
"""Of a logarithm of a ratio: what is nearer is the same."""

DIGITS = 4
"""Of a logarithm that is kept."""

MIN_SLOTS = 4
"""Before what they have in common is trusted."""

FLAPPING_LEGS = 3
PATIENCE_SLOTS_PER_LEG = 3
"""Up, down and up again within the window is flapping: what flaps is planned with as it is on
average, until it has been steady for so many slots for each time it went up or down."""

ODD_SHARE = 0.25
"""Of slots: the slowest are oddities that do not count in an average."""


def average(
    averaged: bool, on_trial: bool, level: float, means: Sequence[float], nows: Sequence[float]
) -> float | None:
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
    if averaged:
        legs = max(legs, FLAPPING_LEGS)
    flaps = legs >= FLAPPING_LEGS and len(settled) < PATIENCE_SLOTS_PER_LEG * legs
    if settled and not flaps and max(max(settled) - now, now - min(settled)) <= THRESHOLD_FLOOR:
        return None  # no slot is off, nor is their average
    recent = sorted(means if flaps else settled)
    if not flaps and len(recent) < (1 if on_trial else MIN_SLOTS):
        return None
    usual = fmean(recent[: len(recent) - int(ODD_SHARE * len(recent))])
    if not flaps and abs(usual - now) <= THRESHOLD_FLOOR:
        return None
    # An average that moved by less than half of what slots differ by has not moved.
    moved = abs(usual - level) > max(THRESHOLD_FLOOR, pstdev(recent) / 2)
    return round(usual, DIGITS) if moved else level


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
