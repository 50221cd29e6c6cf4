"""Compiled backwards write gradients where they are reduced from, and add those of later microbatches there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piper.check.check import check
from piper.compiler import compile
from piper.directives import Directive, offload, precision, protect, remat, replicate, split
from piper.ir.select import at
from piper.job import Job
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from tests.proof import models
from tests.runtime.as_compiled import as_compiled
from tests.runtime.grid import Cell, batches, job, strategy

WRITTEN = [
    Cell(case="mlp", schedule="zero-bubble", dp=2, zero=3),
    Cell(case="moe", schedule="1f1b", dp=2, ways=2, zero=2),  # a table's gradient is written in its place
]
ADDED = [
    *(Cell(case="mlp", schedule="gpipe", dp=2, zero=zero, parts=3) for zero in (0, 1, 2, 3)),
    Cell(case="mlp", schedule="1f1b", parts=3),  # nothing is reduced
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=1, clip=0.1),  # a tied table; halves of backwards
    Cell(case="decoder_untied", schedule="interleaved-1f1b", dp=2, zero=3, bucket_mb=0.01),
    Cell(case="moe", schedule="1f1b", dp=2, ways=2, zero=1),
    Cell(case="mlp", schedule="dualpipe", zero=1, parts=4),  # microbatches on different devices
    Cell(case="frozen", schedule="1f1b", dp=2),
    Cell(case="sum_weight", schedule="none", dp=2, zero=3),
]


def instrs_of(plans: Plans) -> list[Instr]:
    return [ins for plan in plans.plans for ins in plan.instrs]


@pytest.mark.parametrize("cell", WRITTEN, ids=str)
def test_gradients_are_written_where_they_are_reduced_from(cell: Cell, tmp_path: Path) -> None:
    program = compile(job(cell), device="cpu", compile=True, cache=tmp_path)
    assert as_compiled(program)
    report = check(program, launch_inline, batches(cell, 2), tol=1e-9)
    assert report.ok, report
    plans = program.plans
    scatters = [ins for ins in instrs_of(plans) if ins.op == "reduce_scatter"]
    assert scatters
    for ins in scatters:  # nothing is laid out: only the shard is held before it is added to an earlier one
        again = ins.writes[0] in ins.reads
        bucket = plans.buckets[ins.bucket]
        assert ins.workspace == (bucket.elements() * bucket.itemsize if again else 0)


@pytest.mark.parametrize("cell", ADDED, ids=str)
def test_backwards_add_to_the_sum_of_earlier_microbatches(cell: Cell, tmp_path: Path) -> None:
    program = compile(job(cell), device="cpu", compile=True, cache=tmp_path)
    assert as_compiled(program)
    report = check(program, launch_inline, batches(cell, 2), tol=1e-9)
    assert report.ok, report
    assert any(ins.adds_to for ins in instrs_of(program.plans))


def test_products_leave_no_sums_to_a_pass_of_their_own(tmp_path: Path) -> None:
    """Every gradient of this model is a product or a bias beside one."""
    cell = Cell(case="mlp", schedule="gpipe", dp=2, zero=1, parts=4)
    plans = compile(job(cell), device="cpu", compile=True, cache=tmp_path).plans
    sums = [ins.writes[0].kind for ins in instrs_of(plans) if ins.op == "accumulate"]
    assert sums and "grad" not in sums
    for plan in plans.plans:
        backwards = [ins for ins in plan.instrs if ins.run is not None and ins.run.phase == "B"]
        computed = [ins for ins in backwards if ins.op == "compute"]
        assert [len(ins.adds_to) for ins in computed] == [0, 1, 1, 1]


def test_sums_take_less_memory_than_gradients_beside_them(tmp_path: Path) -> None:
    cell = Cell(case="mlp", schedule="gpipe", dp=2, zero=1, parts=4)
    added = compile(job(cell), device="cpu", compile=True, cache=tmp_path).plans
    apart = compile(job(cell), device="cpu").plans
    for plan, other in zip(added.plans, apart.plans, strict=True):
        kinds = [slot.kind for slot in plan.slots]
        assert "gradient" in [slot.kind for slot in other.slots] and "gradient" not in kinds


def test_one_microbatch_has_nothing_to_add_to(tmp_path: Path) -> None:
    cell = Cell(case="mlp", schedule="none", dp=2, zero=1, parts=1)
    assert as_compiled(compile(job(cell), device="cpu", compile=True, cache=tmp_path)) == []


@pytest.mark.parametrize(
    "beside",
    [
        remat(at(), budget=0.0),
        remat(at(), budget=0.0, across="PP"),
        offload(at(), least_mb=0),
        offload(at(), what="optimizer"),
        protect(at(), copies=1, devices_per_machine=2),
        precision(at(PP=0), "fp8"),  # products of another kind: their gradients are added apart
    ],
    ids=str,
)
def test_sums_compose_with_other_directives(beside: Directive, tmp_path: Path) -> None:
    cell = Cell(case="mlp", schedule="gpipe", dp=2, zero=1, parts=4)
    asked = [*strategy(cell), beside]
    program = compile(job(cell, strategy=asked), device="cpu", compile=True, cache=tmp_path)
    assert as_compiled(program)
    report = check(program, launch_inline, batches(cell, 2), tol=1e-9)
    assert report.ok, report
    assert any(ins.adds_to for ins in instrs_of(program.plans))


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Let torch fill memory that is not initialised with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_memory")
def test_a_backward_may_begin_one_sum_and_add_to_another(tmp_path: Path) -> None:
    """Two stages on one set of devices share a weight: the second to run adds to it, and begins its own."""
    asked = [*(replicate(at(PP=stage), [0, 1]) for stage in range(2)), split(at(), parts=2)]
    data = [models.batch(16, seed) for seed in range(2)]
    shared = Job(
        model=models.Tied, loss=models.mean_loss, data=lambda: data, strategy=asked, precision="fp64"
    )
    program = compile(shared, device="cpu", compile=True, cache=tmp_path)
    assert as_compiled(program)
    given = [(ins, [s for s in ins.writes if s.kind == "grad"]) for ins in instrs_of(program.plans)]
    assert any(0 < len(ins.adds_to) < len(written) for ins, written in given)
    report = check(program, launch_inline, data, tol=1e-9)
    assert report.ok, report
