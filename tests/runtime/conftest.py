"""The forked workers of a module's tests; see ``harness``."""

from collections.abc import Iterator

import pytest

from benchmarks.fleet import Fleet


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Workers a, b and c, or those that the module names in ``DEVICES``."""
    with Fleet(getattr(request.module, "DEVICES", ("a", "b", "c"))) as fleet:
        yield fleet
