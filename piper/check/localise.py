"""Finds the first chunk whose result differs from one device: it localises a difference that is known.

The captured chunks run one after another here, on the slices of the plans. This shares code with what runs,
so it certifies nothing; `check/check.py` does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from piper.check.buffer_histories import BufferHistories
from piper.check.chunkwise import Chunkwise, Walk
from piper.check.collected import first_bad_collective
from piper.check.distance import distance
from piper.check.reference import Reference
from piper.ir.ids import Pass, Phase, SlotId, Tags
from piper.runtime.batch import as_run, wanted_batch
from piper.runtime.compute import parts_of, slices
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.setup import ProgramLike, Setup, setup_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSlice:
    """The samples that one device sees at a time."""

    replica: int
    part: Tags
    batch: Mapping[str, Tensor]


class ChunkwiseReference(Reference):
    """Trains on one device chunk by chunk, and records what each chunk returned."""

    def __init__(self, program: ProgramLike) -> None:
        super().__init__(program, sliced=True)
        self.setup = setup_of(program)
        self.walks: list[tuple[SampleSlice, Walk]] = []

    def _sliced(self, batch: Mapping[str, Tensor]) -> float:
        """Compute the losses and gradients of every slice; only the first replica changes the buffers."""
        self.walks = []
        pieces, outline = [*cut(self.setup, batch)], self.setup.outline
        weighted = outline.weight is not None
        losses: list[float] = []
        weights: list[float] = []
        histories = BufferHistories(outline, self.slicing, self.buffers, self.set_buffers)
        for piece in sorted(pieces, key=lambda piece: piece.part):
            histories.begin(piece.part, piece.replica)
            buffers = self.buffers()  # copies: a chunk replaces some, and the model's own stay for autograd
            walk = Chunkwise(self.setup, self.params, buffers).run(
                piece.batch, self.steps, piece.part, piece.replica
            )
            self.walks.append((piece, walk))
            loss = walk.outputs[outline.loss.chunk, outline.loss.index]
            weights.append(1.0)
            if outline.weight is not None:
                weights[-1] = walk.outputs[outline.weight.chunk, outline.weight.index].item()
            (loss if weighted else loss / len(pieces)).backward()
            losses.append(loss.item())
            self.set_buffers(buffers)
            histories.end(piece.part, piece.replica)
        histories.keep_first(pieces[0].part)
        if weighted:
            for parameter in self.params.values():
                if parameter.grad is not None:
                    parameter.grad /= sum(weights)
        return sum(losses) / sum(weights)


def cut(setup: Setup, batch: Mapping[str, Tensor]) -> Iterator[SampleSlice]:
    """Yield the slices of a batch as the devices of the loss see them, replica by replica."""
    plans, chunk = setup.plans, setup.outline.loss.chunk
    devices = plans.chunks[chunk].devices
    for replica in range(len(devices)):
        for part in sorted(parts_of(plans, chunk)):
            fields = {}
            for name, value in batch.items():
                rows = slices(plans, len(value), replica, len(devices), part)
                piece = torch.cat([value[low:high] for low, high in rows])
                fields[name] = piece.to(
                    setup.device, setup.dtype if piece.is_floating_point() else piece.dtype
                )
            yield SampleSlice(replica=replica, part=part, batch=fields)


def first_difference(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float,
    options: Options,
) -> str | None:
    """Repeat the steps, and name the first result of a chunk, in the order of the model, that differs."""
    first = wanted_batch(setup_of(program))
    if not all(as_run(program, batch, first)[1] for batch in batches):
        return None  # the chunks of other shapes are those of other programs
    if program.outline.degrees:
        return first_of_a_group(program, launch, batches, tol, options)
    if not one_slicing(program):
        return None  # the chunks of other device sets were captured for slices of another size
    if any(chunk.precision for chunk in program.outline.chunks):
        return None  # autograd cannot repeat chunks with products in fp8: rounding has no derivative
    reference = ChunkwiseReference(program)
    with launch(program, replace(options, keep_outputs=True)) as run:
        for number, batch in enumerate(batches):
            run.step(batch)
            reference.step(batch)
            trails = run.trails()
            for device, mark, wanted in expected(program, reference):
                got = trails[device].get(mark)
                if got is None or not wanted.numel():
                    continue
                diff = distance(got, wanted)
                if not diff <= tol:
                    return f"step {number}: {mark[0]} on device {device}: {mark[1]} differs by {diff:.3g}"
    return None


def first_of_a_group(
    program: ProgramLike,
    launch: Launch,
    batches: Sequence[Mapping[str, Tensor]],
    tol: float,
    options: Options,
) -> str | None:
    """Repeat the steps of a sharded model, and name the first collective whose result is wrong."""
    with launch(program, replace(options, keep_outputs=True)) as run:
        for number, batch in enumerate(batches):
            run.step(batch)
            bad = first_bad_collective(program.outline, program.plans, run.trails(), tol)
            if bad is not None:
                return f"step {number}: {bad}"
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
