"""Code that takes its arguments in a list gets the last reference to what a phase is the last to use."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from piper.capture.autodiff.code import GraphCode
from piper.capture.compile.flat_gradients import FlatPhase, write_in_place
from piper.compiler import Program, compile
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.launchers.inline import launch_inline
from piper.plan.plan import Plans
from piper.runtime.debug.check import check
from piper.runtime.setup import JobLike, ProgramLike, Shapes
from tests.runtime.grid import Cell, batches, compiled, job

Code = Callable[..., tuple[Tensor, ...]]


class Boxed:
    """Code that empties the list of its arguments, and looks which of them are gone then."""

    def __init__(self, code: Code, gone: list[int]) -> None:
        self.code, self.gone = code, gone

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        return self.code(*arguments)

    def boxed(self, arguments: list[Tensor]) -> tuple[Tensor, ...]:
        out = self.code(*arguments)
        watched = [weakref.ref(value) for value in arguments]
        arguments.clear()
        self.gone.append(sum(ref() is None for ref in watched))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class InBoxes:
    """A program whose code takes lists."""

    program: Program
    gone: list[int]

    @property
    def job(self) -> JobLike:
        return self.program.job

    @property
    def plans(self) -> Plans:
        return self.program.plans

    @property
    def outline(self) -> CapturedModel:
        return self.program.outline

    @property
    def constants(self) -> Mapping[str, Tensor]:
        return self.program.constants

    @property
    def device(self) -> str:
        return self.program.device

    def code(self, chunk: Chunk, phase: Phase) -> Boxed:
        return Boxed(self.program.code(chunk, phase), self.gone)

    def build(self, called: Iterable[tuple[Chunk, Phase]], meanwhile: Callable[[], None]) -> None:
        self.program.build(called, meanwhile)

    def origins(self, node: str) -> list[str]:
        return self.program.origins(node)

    def evaluation(self, batch: Mapping[str, Tensor]) -> ProgramLike:
        return self.program.evaluation(batch)

    @property
    def shapes(self) -> Mapping[Shapes, ProgramLike]:
        return self.program.shapes

    def shaped(self, batch: Mapping[str, Tensor]) -> ProgramLike:
        return self.program.shaped(batch)


def test_saved_values_are_given_away_with_their_last_use() -> None:
    cell = Cell(case="mlp", schedule="1f1b", dp=2, zero=3)
    gone: list[int] = []
    report = check(InBoxes(program=compiled(cell), gone=gone), launch_inline, batches(cell, 2))
    assert report.ok, report
    backwards = [count for count in gone if count]
    assert len(backwards) >= len(gone) / 2 - 1  # each backward is the last to use what its forward saved


class Listed:
    """A graph that takes its arguments in a list, as compiled code does."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        return self.boxed(list(arguments))

    def boxed(self, arguments: list[Tensor]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.module(*arguments)
        arguments.clear()
        return results


def as_compiled(program: Program) -> list[FlatPhase]:
    """Let a program run the graphs that a compiler would get; return those that write gradients in place."""
    found = []
    for captured in program.codes.values():
        for key, code in captured.codes.items():
            assert isinstance(code, GraphCode)
            for phase in code.shape.phases:
                built, places = code.build(phase), code.in_place(phase)
                captured.built[key, phase] = built
                if places:
                    gradients = [built.graph.output_node().args[0][i].meta["val"] for i in places]  # type: ignore[index, union-attr]
                    like = [(value.shape, value.dtype) for value in gradients]
                    listed = Listed(write_in_place(built, places))
                    found.append(FlatPhase(listed, places, like, torch.device("cpu")))
                    captured.built[key, phase] = found[-1]
    return found


@pytest.mark.parametrize(
    "cell",
    [
        Cell(case="mlp", schedule="zero-bubble", dp=2, zero=3),
        Cell(
            case="moe", schedule="1f1b", dp=2, ways=2, zero=2
        ),  # a table's gradient is copied into its place
    ],
    ids=str,
)
def test_gradients_are_written_where_they_are_reduced_from(cell: Cell, tmp_path: Path) -> None:
    program = compile(job(cell), device="cpu", compile=True, cache=tmp_path)
    phases = as_compiled(program)
    assert phases
    report = check(program, launch_inline, batches(cell, 2), tol=1e-9)
    assert report.ok, report
    plans = program.plans
    instrs = [ins for plan in plans.plans for ins in plan.instrs]
    scatters = [ins for ins in instrs if ins.op == "reduce_scatter"]
    assert scatters
    for ins in scatters:  # nothing is laid out: only the shard is held before it is added to an earlier one
        again = ins.writes[0] in ins.reads
        assert ins.workspace == (plans.buckets[ins.bucket].shard_nbytes if again else 0)
    sums = [ins for ins in instrs if ins.op == "accumulate" and ins.writes[0].kind == "grad"]
    assert sums
    for ins in sums:  # a sum begins in the memory of its first term
        assert (ins.workspace < 0) == (len(ins.reads) == 1)


def test_gradients_that_no_scatter_reads_are_returned(tmp_path: Path) -> None:
    cell = Cell(case="mlp", schedule="1f1b", dp=2, zero=1)
    assert as_compiled(compile(job(cell), device="cpu", compile=True, cache=tmp_path)) == []
