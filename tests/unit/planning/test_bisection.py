from math import sqrt

import pytest

from orchestrator.planning.bisection import bracket


def test_bracket_closes_on_where_it_begins_to_hold() -> None:
    low, high = bracket(lambda x: x * x >= 2.0, 0.0, 10.0, tolerance=1e-9)
    assert low < sqrt(2.0) <= high
    assert high - low <= 1e-9 * high


@pytest.mark.parametrize("tolerance", [0.0, 1e-18])
def test_bracket_ends_at_neighbouring_floats(tolerance: float) -> None:
    low, high = bracket(lambda x: x >= 0.1, 0.0, 1.0, tolerance=tolerance)
    assert (low < high, high) == (True, 0.1)


def test_what_never_holds_in_between_leaves_the_upper_end() -> None:
    assert bracket(lambda x: x >= 3.0, 1.0, 3.0, tolerance=1e-6)[1] == 3.0
