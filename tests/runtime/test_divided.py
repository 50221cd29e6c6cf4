"""Divided models give the numbers of one device: tensor, sequence and context parallelism, and all with the rest."""

import pytest

from piper.errors import CaptureError
from piper.launchers.local import launch_local
from tests.runtime.divided import MODELS, STRATEGIES, checked

FEW = [
    ("decoder", "tp2dp2z3"),
    ("decoder", "cp2heads"),
    ("decoder", "tp2zbv"),
    ("moe", "sp2ep2"),
    ("llama", "sp2"),
    ("qwen3", "tp2pp2"),
    ("mistral", "cp2zigzag"),
    ("gpt2", "tp2"),
]


def fits(model: str, strategy: str) -> bool:
    """Return whether a model's heads divide as a strategy asks."""
    if strategy == "tp4":
        return model in ("decoder4", "gpt2")
    if model == "moe":  # a router sorts all rows of a group
        return "cp" not in strategy
    if strategy in ("tp2ep2", "sp2ep2"):
        return False
    return model != "decoder4"


ALL = [
    (model, strategy)
    for model in MODELS
    for strategy in STRATEGIES
    if fits(model, strategy) and (model, strategy) not in FEW
]


@pytest.mark.parametrize(("model", "strategy"), FEW)
def test_a_divided_model_has_the_numbers_of_one_device(model: str, strategy: str) -> None:
    report = checked(model, strategy)
    assert report.ok, report
    assert report.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), FEW)
def test_processes_have_the_numbers_of_one_device(model: str, strategy: str) -> None:
    report = checked(model, strategy, launch_local)
    assert report.ok, report


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "strategy"), ALL)
def test_every_model_under_every_strategy(model: str, strategy: str) -> None:
    report = checked(model, strategy)
    assert report.ok, report


def test_a_router_needs_the_whole_sequence() -> None:
    with pytest.raises(
        CaptureError, match=r"cannot be divided: it needs the rows of every device, as a mixture"
    ):
        checked("moe", "cp2")
