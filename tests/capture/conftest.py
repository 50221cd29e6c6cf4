"""Every test of captures makes its own."""

import pytest


@pytest.fixture(autouse=True)
def captures(own_captures: None) -> None:
    """Share no capture with the tests before."""
