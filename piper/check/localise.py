"""Finds the first chunk whose result differs from one device: it localises a difference that is known.

The captured chunks run one after another here, on the slices of the plans. This shares code with what runs,
so it certifies nothing; `check/check.py` does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from piper.check.chunkwise import Chunkwise, Walk
from piper.check.collected import Trails, first_bad_collective
from piper.check.distance import distance
from piper.check.reference import Reference
from piper.check.slicing import Slice, take
from piper.ir.ids import Pass, Phase, SlotId
from piper.runtime.batch import as_run, wanted_batch
from piper.runtime.compute import parts_of
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.worker import Options

BACKWARD: tuple[Phase, ...] = ("B", "BI")  # either gives the gradients of inputs


class CheckedResult(Protocol):
    """The result of a step."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


class Checked(Protocol):
    """A running job whose numbers can be read."""

    def step(self, batch: Mapping[str, Tensor]) -> CheckedResult: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def trails(self) -> dict[int, dict[OutputKey, Tensor]]: ...


Launch = Callable[[ProgramLike, Options], AbstractContextManager[Checked]]


class ChunkwiseReference(Reference):
    """Trains on one device chunk by chunk, and records what each chunk returned."""

    def __init__(self, program: ProgramLike) -> None:
        super().__init__(program, sliced=True)
        self.setup = setup_of(program)
        self.walks: list[tuple[Slice, Walk]] = []

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one global batch, and return the loss."""
        self.walks = []
        return super().step(batch)

    def _slice_loss(self, batch: Mapping[str, Tensor], part: Slice) -> Tensor | tuple[Tensor, Tensor]:
        """Run the chunks on one slice of a batch."""
        outline, buffers = self.setup.outline, self.buffers()  # copies: a chunk replaces some
        rows = take(batch, part.samples)
        walk = Chunkwise(self.setup, self.params, buffers).run(rows, self.steps, part.part, part.replica)
        self.walks.append((part, walk))
        self.set_buffers(buffers)
        loss = walk.outputs[outline.loss.chunk, outline.loss.index]
        if outline.weight is None:
            return loss
        return loss, walk.outputs[outline.weight.chunk, outline.weight.index]


def first_difference(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float,
    options: Options,
) -> str | None:
    """Repeat the steps, and name the first result that is wrong, in the order of the model.

    Of a sharded model that is a collective, else a result of a chunk.
    """
    first, outline = wanted_batch(setup_of(program)), program.outline
    if not all(as_run(program, batch, first)[1] for batch in batches):
        return None  # the chunks of other shapes are those of other programs
    if not outline.degrees and not one_slicing(program):
        return None  # the chunks of other device sets were captured for slices of another size
    if not outline.degrees and any(chunk.precision for chunk in outline.chunks):
        return None  # autograd cannot repeat chunks with products in fp8: rounding has no derivative
    reference = None if outline.degrees else ChunkwiseReference(program)
    with launch(program, replace(options, keep_outputs=True)) as run:
        for number, batch in enumerate(batches):
            run.step(batch)
            if reference is None:
                bad = first_bad_collective(outline, program.plans, run.trails(), tol)
            else:
                reference.step(batch)
                bad = first_bad_chunk(program, reference, run.trails(), tol)
            if bad is not None:
                return f"step {number}: {bad}"
    return None


def first_bad_chunk(
    program: ProgramLike, reference: ChunkwiseReference, trails: Trails, tol: float
) -> str | None:
    """Name the first result of a chunk that differs from the reference's last step. None: all are right."""
    for device, mark, wanted in expected(program, reference):
        got = trails[device].get(mark)
        if got is None or not wanted.numel():
            continue
        diff = distance(got, wanted)
        if not diff <= tol:
            return f"{mark[0]} on device {device}: {mark[1]} differs by {diff:.3g}"
    return None


def one_slicing(program: ProgramLike) -> bool:
    """Return whether every chunk runs on as many devices, on the same microbatches."""
    plans = program.plans
    names = [chunk.name for chunk in program.outline.chunks if chunk.has_code]
    return len({(len(plans.chunks[name].devices), *sorted(parts_of(plans, name))) for name in names}) == 1


def expected(program: ProgramLike, reference: ChunkwiseReference) -> Iterator[tuple[int, OutputKey, Tensor]]:
    """Yield what each chunk should return on each device: forwards in order, then backwards in reverse.

    Rows between route and unroute are grouped by device in a plan, so only what surrounds them is compared.
    """
    chunks = [chunk for chunk in program.outline.chunks if chunk.kind == "compute"]
    placed = program.plans.chunks
    for piece, walk in reference.walks:
        for chunk in chunks:
            for index in range(len(chunk.outputs)):
                mark = Pass(phase="F", chunk=chunk.name, part=piece.part), SlotId("output", chunk.name, index)
                device = placed[chunk.name].devices_for(piece.part)[piece.replica]
                yield device, mark, walk.outputs[chunk.name, index].detach()
    for piece, walk in reference.walks:
        for chunk in reversed(chunks):
            for position in range(len(chunk.inputs)):
                given = walk.inputs.get((chunk.name, position))
                if given is None or given.grad is None:
                    continue
                slot = SlotId("input_gradient", chunk.name, position)
                for phase in BACKWARD:
                    run = Pass(phase=phase, chunk=chunk.name, part=piece.part)
                    yield placed[chunk.name].devices_for(piece.part)[piece.replica], (run, slot), given.grad
