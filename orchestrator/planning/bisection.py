"""Where something begins to hold: the one search by halves that shares, levels and times need."""

from collections.abc import Callable


def bracket(
    holds: Callable[[float], bool], low: float, high: float, *, tolerance: float
) -> tuple[float, float]:
    """The last argument known not to hold and the first known to, closer than ``tolerance``.

    Args:
        holds: False up to some argument, then true.
        low: Does not hold, or is below all that matters.
        high: Holds; positive.
        tolerance: Relative to the upper end.
    """
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break  # neighbours among floats
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
