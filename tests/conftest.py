"""What holds for every test: none knows what an earlier one has measured."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LYRAY_PROFILE_CACHE", "off")
        yield
