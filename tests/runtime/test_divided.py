"""Divided models give the numbers of one device: tensor, sequence and context parallelism, and all with the rest."""

from dataclasses import asdict

import pytest

from piper.run.launch import launch_local
from tests.covering import Choices, covering_each, selected
from tests.runtime.divided import AXES, MODELS, STRATEGIES, checked, job
from tests.runtime.sharing import Shared

FEW = [("decoder", "tp2dp2z3"), ("decoder", "cp2heads"), ("moe", "sp2ep4"), ("moe", "cp2ep4")]
ON_PROCESSES = [
    *FEW,
    ("decoder", "tp2zbv"),
    ("llama", "sp2"),
    ("qwen3", "tp2pp2"),
    ("mistral", "cp2zigzag"),
    ("gpt2", "tp2"),
]


def fits(model: str, strategy: str) -> bool:
    """Return whether a model has what a strategy shards: experts, or four heads of keys, which differ over four devices alone."""
    if "ep" in strategy:
        return model == "moe"
    return model != "decoder4" or strategy == "tp4"


ALL = [
    (model, strategy)
    for model in MODELS
    for strategy in sorted(STRATEGIES, key=lambda name: STRATEGIES[name][0])
    if fits(model, strategy) and (model, strategy) not in FEW
]


def division(cell: tuple[str, str]) -> Choices:
    """Return how a cell divides its model, which is the same whatever its ZeRO and schedule are."""
    model, strategy = cell
    axes = AXES[strategy]
    divided = {"weights": axes.weights, "between": axes.between, "sequence": axes.sequence}
    return {"model": model, **divided, "experts": axes.experts}


def composition(cell: tuple[str, str]) -> Choices:
    """Return what a cell composes, which is the same for all models."""
    return asdict(AXES[cell[1]])


# Mistral has Llama's modules and a window: ways to divide Llama itself are exhaustive cells.
UNLIKE = [cell for cell in ALL if cell[0] != "llama"]
CHOSEN = covering_each(UNLIKE, division, composition, given=FEW)


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Share captures between tests, those of one model at a time."""
    return Shared()


@pytest.mark.parametrize(("model", "strategy"), FEW)
def test_a_divided_model_has_the_numbers_of_one_device(shared: Shared, model: str, strategy: str) -> None:
    report = checked(job(model, strategy), shared)
    assert report.ok, report
    assert report.notes == ()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "strategy"), ON_PROCESSES)
def test_processes_have_the_numbers_of_one_device(shared: Shared, model: str, strategy: str) -> None:
    report = checked(job(model, strategy), shared, launch_local)
    assert report.ok, report


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "strategy"), selected(ALL, CHOSEN))
def test_every_model_under_every_strategy(shared: Shared, model: str, strategy: str) -> None:
    report = checked(job(model, strategy), shared)
    assert report.ok, report
