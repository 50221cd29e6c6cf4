"""Skips tests that need hosts where none can be made. Asked for only when such a test runs: the trial makes some."""

import pytest

from tests.hosts.machines import obstacle


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    if (why := obstacle()) is not None:
        pytest.skip(why)
