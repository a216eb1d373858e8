"""When the head looks for garbage: rarely, as it makes hardly any cycles and holds a lot."""

import gc

YOUNG_OBJECTS = 20_000
"""Made and not freed before the young ones are looked through: as many as a slot of some hundred
devices leaves; Python's own 700 would walk each record of a slot several times."""


def collect_rarely() -> None:
    """Set aside what the process holds by now, and look through what comes later less often.

    Else every collection of a search would walk all that torch, Ray and CVXPY hold.
    """
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, old)
