"""Code that takes its arguments in a list gets the last reference to what a phase is the last to use."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from piper.check.check import check
from piper.compiler import Program
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.runtime.setup import Forward, ProgramLike, Shapes
from tests.runtime.grid import Cell, batches, compiled

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
    def job(self) -> Job:
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

    def evaluation(self, batch: Mapping[str, Tensor], forward: Forward | None = None) -> ProgramLike:
        return self.program.evaluation(batch, forward)

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
