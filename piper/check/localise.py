"""Finds the first chunk whose result differs from one device: it localises a difference that is known.

The captured chunks run one after another here, under autograd, on the slices of the plans: no directives, no
plan. This shares code with what runs, so it certifies nothing; `check/check.py` does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from piper.callbacks import StepNumbers
from piper.check.distance import distance
from piper.check.reference import Reference
from piper.check.slicing import Slice, take
from piper.ir.chunk import AxisPosition, Batch, Chunk, Constant, Output, Source
from piper.ir.ids import Pass, Phase, SlotId
from piper.runtime.batch import as_run, wanted_batch
from piper.runtime.compute import draw_place, parts_of
from piper.runtime.context import Dice, draw_seed
from piper.runtime.recorders import OutputKey
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

BACKWARD: tuple[Phase, ...] = ("B", "BI")  # either gives the gradients of inputs


class Checked(Protocol):
    """A running job whose numbers can be read."""

    def step(self, batch: Mapping[str, Tensor]) -> StepNumbers: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def trails(self) -> dict[int, dict[OutputKey, Tensor]]: ...


Launch = Callable[[ProgramLike, Options], AbstractContextManager[Checked]]


@dataclass(slots=True)
class Walk:
    """The values that the chunks returned for one slice of the samples."""

    batch: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    # By chunk and position, each with a gradient of its own:
    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)


class ChunkwiseReference(Reference):
    """Trains on one device chunk by chunk, by autograd, and records what each chunk returned."""

    def __init__(self, program: ProgramLike) -> None:
        super().__init__(program, sliced=True)
        self.walks: list[tuple[Slice, Walk]] = []
        self.dice = Dice(self.device)
        self.constants = {name: value.to(self.device) for name, value in program.constants.items()}

    def step(self, batch: Mapping[str, Tensor]) -> float:
        self.walks = []
        return super().step(batch)

    def _slice_loss(self, batch: Mapping[str, Tensor], part: Slice) -> Tensor | tuple[Tensor, Tensor]:
        walk = self.walk(take(batch, part.samples), part)
        self.walks.append((part, walk))
        self.set_buffers(walk.buffers)
        loss, weight = self.program.outline.loss, self.program.outline.weight
        value = walk.outputs[loss.chunk, loss.index]
        return value if weight is None else (value, walk.outputs[weight.chunk, weight.index])

    def walk(self, batch: Mapping[str, Tensor], part: Slice) -> Walk:
        """Run one slice of the batch forward and return its values."""
        walk = Walk(batch, self.buffers())  # copies: a chunk replaces some
        drawn: dict[str, Tensor] = {}  # where the generator of each region stands
        for chunk in self.program.outline.chunks:
            if chunk.kind in ("route", "unroute"):
                for index in range(len(chunk.outputs)):
                    walk.outputs[chunk.name, index] = self._value(walk, chunk.inputs[index])
                continue
            if chunk.random:
                place = draw_place(chunk.drawer, part.part, part.replica)
                seed = draw_seed(self.job.seed, self.steps, place)
                with self.dice.seeded(drawn.get(chunk.drawer, seed)):
                    self._forward(walk, chunk)
                    drawn[chunk.drawer] = self.dice.generator.get_state()
            else:
                self._forward(walk, chunk)
        return walk

    def _value(self, walk: Walk, source: Source) -> Tensor:
        match source:
            case Batch(field=name):
                return walk.batch[name]
            case Constant(name=name):
                return self.constants[name]
            case Output(chunk=chunk, index=index):
                return walk.outputs[chunk, index]
            case AxisPosition():
                raise AssertionError("sharded models are not run chunk by chunk")

    def _forward(self, walk: Walk, chunk: Chunk) -> None:
        """Run a chunk; each input is a view of its own, so that it shows this chunk's gradient alone."""
        spec = chunk.phases["F"]
        inputs = []
        for position in spec.inputs:
            value = self._value(walk, chunk.inputs[position])
            if value.requires_grad:
                value = value.view_as(value)
                value.retain_grad()
                walk.inputs[chunk.name, position] = value
            inputs.append(value)
        held = [*map(self.params.__getitem__, spec.params), *map(walk.buffers.__getitem__, spec.buffers)]
        out = self.program.code(chunk, "F")(*inputs, *held)
        for index in range(len(chunk.outputs)):
            walk.outputs[chunk.name, index] = out[index]
        first = len(chunk.outputs) + len(chunk.saved)
        for name, value in zip(chunk.mutated, out[first:], strict=True):
            walk.buffers[name] = value.detach()


def first_difference(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float,
    options: Options,
) -> str | None:
    """Repeat the steps, and name the first wrong result of a chunk. None: none is, or none can run alone."""
    first, outline, plans = wanted_batch(program), program.outline, program.plans
    experts = {chunk.name for chunk in outline.chunks if chunk.kind == "expert"}
    divided = (bucket.ways > 1 for bucket in plans.buckets.values() if experts & {*bucket.chunks})
    if outline.degrees or any(divided):
        return None  # a chunk of a sharded region computes with what other devices give: it cannot run alone
    if not all(as_run(program, batch, first)[1] for batch in batches):
        return None  # the chunks of other shapes are those of other programs
    names = [chunk.name for chunk in outline.chunks if chunk.has_code]
    if len({(len(plans.chunks[name].devices), *sorted(parts_of(plans, name))) for name in names}) > 1:
        return None  # the chunks of other device sets were captured for slices of another size
    if any(chunk.precision for chunk in outline.chunks):
        return None  # autograd cannot repeat chunks with products in fp8: rounding has no derivative
    reference = ChunkwiseReference(program)
    with launch(program, replace(options, keep_outputs=True)) as run:
        for number, batch in enumerate(batches):
            run.step(batch)
            reference.step(batch)
            trails = run.trails()
            for device, mark, value in expected(program, reference):
                got = trails[device].get(mark)
                if got is not None and value.numel() and not (diff := distance(got, value)) <= tol:
                    return f"step {number}: {mark[0]} on device {device}: {mark[1]} differs by {diff:.3g}"
    return None


def expected(program: ProgramLike, reference: ChunkwiseReference) -> Iterator[tuple[int, OutputKey, Tensor]]:
    """Yield what each chunk should return on each device: forwards in order, then backwards in reverse."""
    # Rows between route and unroute are grouped by device in a plan, so only what surrounds them is compared.
    chunks = [chunk for chunk in program.outline.chunks if chunk.kind == "compute"]

    def device(chunk: Chunk, piece: Slice) -> int:
        return program.plans.chunks[chunk.name].devices_for(piece.part)[piece.replica]

    for piece, walk in reference.walks:
        for chunk in chunks:
            for index in range(len(chunk.outputs)):
                mark = Pass(phase="F", chunk=chunk.name, part=piece.part), SlotId("output", chunk.name, index)
                yield device(chunk, piece), mark, walk.outputs[chunk.name, index].detach()
    for piece, walk in reference.walks:
        for chunk in reversed(chunks):
            for position in range(len(chunk.inputs)):
                given = walk.inputs.get((chunk.name, position))
                if given is None or given.grad is None:
                    continue
                slot = SlotId("input_gradient", chunk.name, position)
                for phase in BACKWARD:
                    run = Pass(phase=phase, chunk=chunk.name, part=piece.part)
                    yield device(chunk, piece), (run, slot), given.grad
