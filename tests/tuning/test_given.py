"""A search from a given strategy, and long steps from two shorter ones."""

from dataclasses import replace

import pytest
import torch

import piper
from piper import strategies
from piper.capture.recordings import Recordings
from piper.directives import Directive
from piper.errors import ConfigError
from piper.schedules.grid import orders
from piper.schedules.names import grid_for
from piper.tuning.choice import Divide, Recompute
from piper.tuning.given import divided_as
from piper.tuning.shorter import shortened, shorter_lengths
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


@pytest.mark.parametrize("start", [PIPELINE, strategies.fsdp(2, zero=3, microbatches=16)])
def test_a_long_step_is_extrapolated(captured: Recordings, start: list[Directive]) -> None:
    asked = {"space": WORSE, "trials": 1, "front": False, "captured": captured, "start": start}
    whole, short = (
        tune(LONG, "h100", 2, extrapolate=extrapolate, **asked).evaluated[0]  # type: ignore[arg-type]
        for extrapolate in (False, True)
    )
    assert short.step == pytest.approx(whole.step, rel=1e-3)
    assert short.busy == pytest.approx(whole.busy, rel=1e-3)
    assert all(one <= other for one, other in zip(whole.held, short.held, strict=True))
    assert short.held == pytest.approx(whole.held, rel=1e-4)
    assert short.strategy == whole.strategy


def test_a_shorter_step_has_the_first_microbatches_in_the_same_order() -> None:
    stages = [piper.at(LAYER=0), piper.at(LAYER=1)]
    long, short = (
        [piper.split(piper.at(), parts=parts), *orders(grid_for("1f1b", 2, parts), stage=stages)]
        for parts in (16, 4)
    )
    assert shortened(long, 4) == short


def test_a_filter_of_several_microbatches_is_cut() -> None:
    groups = [piper.at(MB=[0, 1, 2], PASS="F"), piper.at(MB=range(2, 4), PASS="F"), piper.at(MB=3, PASS="B")]
    split = piper.split(piper.at(), parts=4)
    assert shortened([split, piper.order(groups), piper.order([piper.at(MB=3)])], 3) == [
        piper.split(piper.at(), parts=3),
        piper.order([piper.at(MB=[0, 1, 2], PASS="F"), piper.at(MB=2, PASS="F")]),
    ]


def lengths(strategy: list[Directive]) -> tuple[int, int, int] | None:
    found = shorter_lengths(strategy)
    return None if found is None else (found.few, found.more, found.whole)


def test_lengths_of_shorter_steps() -> None:
    def pipeline(schedule: str, pp: int, microbatches: int) -> list[Directive]:
        return strategies.pipeline(layers=16, pp=pp, schedule=schedule, microbatches=microbatches)

    assert lengths(strategies.ddp(2)) is None
    assert lengths(strategies.ddp(2, microbatches=6)) is None
    assert lengths(strategies.ddp(2, microbatches=7)) == (2, 4, 7)
    assert lengths(pipeline("1f1b", 4, 10)) is None
    assert lengths(pipeline("1f1b", 4, 32)) == (4, 6, 32)
    assert lengths(pipeline("interleaved-1f1b", 4, 32)) == (8, 12, 32)
    assert lengths(pipeline("gpipe", 4, 32)) is None  # all its microbatches are under way at once
    twice = [piper.split(piper.at(LAYER=0), parts=8), piper.split(piper.at(LAYER=1), parts=8)]
    assert lengths([piper.place(piper.at(), [0]), *twice]) is None


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
