"""A search from a given strategy, and long steps from two shorter ones."""

from dataclasses import replace

import pytest
import torch

import piper
from piper import strategies
from piper.capture.recordings import Recordings
from piper.errors import ConfigError
from piper.tuning.choice import Divide, Recompute, divided_as
from piper.tuning.space import Space
from piper.tuning.tune import tune
from tests.tuning.models import JOB, search_of

LONG = replace(JOB, data=lambda: [{"x": torch.zeros(32, 8, 64)}])
PIPELINE = strategies.pipeline(layers=4, pp=2, schedule="1f1b", microbatches=32)
# Without recomputation the last rank alone is as long as this space's best; the given strategy is shorter.
WORSE = Space(ranks=(2,), rows=(1,), schedules=("1f1b",), recompute=(Recompute(across=True),))


@pytest.fixture(scope="module")
def captured() -> Recordings:
    return search_of(WORSE, 2, "h100").model.capturing.recordings


def test_what_is_found_is_not_slower_than_what_was_given(captured: Recordings) -> None:
    asked = {"space": WORSE, "trials": 2, "front": False, "captured": captured}
    without = tune(LONG, "h100", 2, **asked)  # type: ignore[arg-type]
    found = tune(LONG, "h100", 2, start=strategies.ddp(2), **asked)  # type: ignore[arg-type]
    given = found.evaluated[0]
    assert given.choice.label == "the given strategy"
    assert given.step < without.best.step
    assert found.best is given
    assert found.strategy == strategies.ddp(2)


def test_a_given_strategy_that_does_not_fit_is_not_chosen(captured: Recordings) -> None:
    asked = {"space": WORSE, "trials": 2, "front": False, "captured": captured}
    given = tune(LONG, "h100", 2, start=strategies.ddp(2), **asked).evaluated[0]  # type: ignore[arg-type]
    found = tune(LONG, "h100", 2, start=strategies.ddp(2), memory=given.peak - 1, **asked)  # type: ignore[arg-type]
    assert found.evaluated[0].needs == given.peak
    assert found.best.choice.ranks == 2


def test_layers_are_divided_as_the_given_strategy_does() -> None:
    known = Divide(weights=(("*.up", 0),), fields=(("x", 1),))
    assert divided_as([], known) == known
    found = divided_as(
        [
            piper.shard(piper.at(), [0, 1], ways=2, axis="TP", weights={"*.down": 1}),
            piper.shard(piper.at(), [0, 1], ways=2, axis="CP", batch={"tokens": 1}, balance="zigzag"),
        ],
        known,
    )
    assert found == Divide(weights=(("*.down", 1),), fields=(("tokens", 1),), balance="zigzag")


def test_a_strategy_for_more_devices_is_refused(captured: Recordings) -> None:
    with pytest.raises(ConfigError, match="the strategy to start from does not fit the devices"):
        tune(LONG, "h100", 2, start=strategies.ddp(4), space=WORSE, captured=captured)
