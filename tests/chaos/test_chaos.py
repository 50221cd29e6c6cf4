"""Every way to disturb a run, as often as it has to be recovered from: minutes to an hour each."""

import os

import pytest

from tests.chaos.__main__ import at
from tests.chaos.parts import measure
from tests.chaos.sizes import PARTS

SCALE = float(os.environ.get("PIPER_CHAOS", "1"))  # of the number of events


def test_quantiles() -> None:
    assert [at([3.0, 1.0, 2.0, 4.0], part) for part in (0.5, 0.95, 1)] == ["2.00", "4.00", "4.00"]
    assert at([], 0.5) == "-"


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PARTS)
def test_a_disturbed_run_is_the_undisturbed_one(name: str) -> None:
    part = PARTS[name]
    events = max(1, round(SCALE * part.events))
    seen = measure(part.act, events=events, minutes=100, seed=17)
    assert seen.sound() and seen.events >= events, seen
    assert float(at(seen.seconds, 0.95)) <= part.p95 and max(seen.seconds) <= part.most, seen
