"""The page about 131,072 devices holds the figures of the results file, and its picture shows them."""

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from piper.recipe import import_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return importlib.import_module("scale_131072")


def test_the_page_and_its_picture_are_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    made: dict[str, str] = import_file(ROOT / "docs" / "scale.py").files()
    stale = [name for name, text in made.items() if (ROOT / "docs" / name).read_bytes() != text.encode()]
    assert not stale, "run `python docs/scale.py`, and look at what changed"


def test_goodput_without_failures_to_speak_of_is_what_pauses_leave(scale: ModuleType) -> None:
    """Ten steps of 2 s and a pause of 5 s: 20 of 25 s count."""
    assert scale.goodput(2.0, 10, 5.0, 60.0, 1e9) == pytest.approx(20 / 25, rel=1e-3)


def test_goodput_against_the_mean_of_what_a_failure_costs(scale: ModuleType) -> None:
    """A failure in 1,000 s costs the recovery, half a step and the step that is repeated: 30 + 1 + 2 s."""
    assert scale.goodput(2.0, 1, 0.0, 30.0, 1000.0, again=1) == pytest.approx(0.967, abs=0.005)
    assert scale.goodput(2.0, 1, 0.0, 30.0, 1000.0) > scale.goodput(2.0, 50, 0.0, 30.0, 1000.0)


def test_the_batch_is_the_same_whatever_the_degrees(scale: ModuleType) -> None:
    draw = random.Random(0)
    for _ in range(20):
        one = scale.Degrees(tp=draw.choice((1, 2, 4)), cp=draw.choice((8, 16)), ep=64, pp=draw.choice((4, 8)))
        assert one.tp * one.cp * one.pp * one.dp == one.devices
        assert one.microbatches * one.dp == scale.BATCH
