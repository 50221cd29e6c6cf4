"""Every strategy gives the numbers of plain PyTorch on one device, in fp64 to 1e-9."""

from itertools import product

import pytest
import torch

from piper.check.check import check
from piper.check.localise import ChunkwiseReference
from piper.check.reference import Reference
from piper.compiler import compile
from piper.directives import Directive, place, replicate, split
from piper.ir.select import at
from piper.run.launch import launch_inline
from tests import zoo
from tests.runtime.grid import SHAPES, Cell, batches, job
from tests.runtime.sharing import Shared
from tests.runtime.test_matrix import cells

REPLICAS = [(2, 0), (2, 1), (4, 2), (3, 3)]  # (DP, zero)
PARTS = {"none": 2}

# Small models, every way to divide experts, and two-way pipelines: the matrix has every model under every schedule.
MODELS = [
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=1, clip=0.3),
    Cell(case="decoder_untied", schedule="none", dp=2, zero=3, bucket_mb=0.02),
    Cell(case="moe", schedule="1f1b", dp=2, zero=0, ways=2),
    Cell(case="moe", schedule="dualpipe", dp=2, zero=3, parts=4, ways=2, clip=0.3, rows=1),
    Cell(case="moe", schedule="zbv", dp=2, zero=3, ways=2, rows=1),
    Cell(case="convnet", schedule="dualpipe", dp=2, zero=3, parts=4),
    Cell(case="dropout", schedule="dualpipe", dp=2, zero=2, parts=4),
]


# Sets of devices that differ, overlap or hold a tied parameter each.
PLACES: dict[str, tuple[str, int, list[Directive]]] = {  # the model, its stages, its strategy
    "sizes": (
        "mlp",
        3,
        [replicate(at(PP=0), [0, 1, 2, 3], zero=1), place(at(PP=1), [4, 5]), place(at(PP=2), [5])],
    ),
    "axes": ("mlp", 2, [replicate(at(), [0, 1]), split(at(), axis="OUTER", parts=2)]),
    "tied": ("decoder", 2, [replicate(at(PP=0), [0, 1], zero=3), place(at(PP=1), [2])]),
    "overlap": (
        "encoder_decoder",
        3,
        [
            replicate(at(PP=0), [0, 1]),
            replicate(at(PP=1), [0, 1, 2, 3], zero=2),
            replicate(at(PP=2), [2, 3]),
        ],
    ),
}


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
@pytest.mark.parametrize("schedule", [*SHAPES, "dualpipe"])
def test_schedules_and_replicas(shared: Shared, schedule: str, replicas: tuple[int, int]) -> None:
    dp, zero = replicas
    report = shared.check(Cell(case="mlp", schedule=schedule, dp=dp, zero=zero, parts=PARTS.get(schedule, 4)))
    assert report.ok, report


@pytest.mark.parametrize("cell", MODELS, ids=str)
def test_models(shared: Shared, cell: Cell) -> None:
    report = shared.check(cell)
    assert report.ok, report


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str) -> None:
    model, stages, places = PLACES[name]
    case = zoo.case(model, stages)
    given = [case.batch(16, seed) for seed in range(2)]
    strategy = [*places, split(at(), parts=2)]
    made = job(Cell(case=model, clip=0.3), model=case.model, strategy=strategy, data=lambda: given)
    report = check(compile(made), launch_inline, given)
    assert report.ok, report


def test_plain_pytorch_is_what_a_chunk_by_chunk_reference_is_equal_to() -> None:
    """What localises a difference, chunk by chunk, agrees with plain PyTorch on the whole batch."""
    cell = Cell(case="moe", dp=2)
    program = compile(job(cell))
    plain, chunks = Reference(program), ChunkwiseReference(program)
    for batch in batches(cell, 2):
        assert plain.step(batch) == pytest.approx(chunks.step(batch), rel=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, chunks.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_any_three_factors_of_the_matrix_meet() -> None:
    """The matrix leaves out pairs of DP and zero for a model under a schedule, but no three factors."""
    whole = cells()
    degrees = [(dp, zero) for dp in (2, 3, 4) for zero in range(4)]
    assert {(c.case, c.schedule, c.dp) for c in whole} == {*product(zoo.NAMES, SHAPES, (1, 2, 3, 4))}
    assert {(c.case, c.schedule, c.zero) for c in whole} == {*product(zoo.NAMES, SHAPES, range(4))}
    for factor, values in (("case", zoo.NAMES), ("schedule", SHAPES)):
        met = {(getattr(c, factor), (c.dp, c.zero)) for c in whole if c.dp > 1}
        assert met == {*product(values, degrees)}
    divided = {(c.case, c.schedule, c.dp, c.ways) for c in whole if c.ways > 1}
    experts = [name for name in zoo.NAMES if zoo.case(name).experts]
    assert divided == {
        (*pair, *ways) for pair in product(experts, SHAPES) for ways in ((2, 2), (4, 2), (4, 4))
    }
