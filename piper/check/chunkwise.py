"""Runs the captured chunks one after another on one device, under autograd: no directives, no plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper.ir.chunk import AxisPosition, Batch, Chunk, Constant, HostPlace, Output, Source, Tags
from piper.ir.sharding import UNSHARDED, Sharding
from piper.runtime.compute import draw_place
from piper.runtime.context import Dice, draw_seed
from piper.runtime.setup import Setup


@dataclass(slots=True)
class Walk:
    """The values that the chunks returned for one slice of the samples."""

    batch: Mapping[str, Tensor]
    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    inputs: dict[tuple[str, int], Tensor] = field(
        default_factory=dict
    )  # by chunk and position, each with own gradient


class Chunkwise:
    """Runs a captured model chunk by chunk; gradients come from autograd, not from captured backwards."""

    def __init__(self, setup: Setup, params: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> None:
        self.setup, self.params, self.buffers = setup, params, buffers
        self.dice = Dice(setup.device)
        self.constants = {name: value.to(setup.device) for name, value in setup.constants.items()}
        self.ways: dict[str, int] = {}
        self.shardings: dict[str, Sharding] = {
            slot.owner: held.sharding
            for plan in setup.plans
            for slot, held in plan.residents.items()
            if slot.kind == "buffer"
        }
        for bucket in setup.plans.buckets.values():
            self.shardings |= {p.name: p.shardings[0] if p.shardings else UNSHARDED for p in bucket.pieces}
            for chunk in bucket.chunks:
                self.ways[chunk] = max(len(bucket.groups), self.ways.get(chunk, 1))

    def run(self, batch: Mapping[str, Tensor], step: int, part: Tags, replica: int) -> Walk:
        """Run one slice of the batch forward and return its values."""
        walk = Walk(batch)
        drawn: dict[str, Tensor] = {}  # where the generator of each region stands
        for chunk in self.setup.outline.chunks:
            if chunk.kind in ("route", "unroute"):
                for index in range(len(chunk.outputs)):
                    walk.outputs[chunk.name, index] = self._value(walk, chunk.inputs[index])
                continue
            if chunk.random:
                seed = draw_seed(self.setup.seed, step, draw_place(chunk.drawer, part, replica))
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
            case AxisPosition() | HostPlace():
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
        params = [self.params[name] for name in spec.params]
        buffers = [self.buffers[name] for name in spec.buffers]
        ways = self.ways.get(chunk.name, 1)
        if chunk.kind == "expert" and ways > 1:
            out = self._experts(chunk, ways, inputs, params, buffers)
        else:
            out = self.setup.code(chunk, "F")(*inputs, *params, *buffers)
        for index in range(len(chunk.outputs)):
            walk.outputs[chunk.name, index] = out[index]
        first = len(chunk.outputs) + len(chunk.saved)
        for name, value in zip(chunk.mutated, out[first:], strict=True):
            self.buffers[name] = value.detach()

    def _experts(
        self, chunk: Chunk, ways: int, inputs: list[Tensor], params: list[Tensor], buffers: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run an expert chunk whose code is for some of the experts: each part on its rows, then joined."""
        positions = chunk.phases["F"].inputs
        sources = [chunk.inputs[i] for i in positions]
        counted = next(
            i for i, source in enumerate(sources) if isinstance(source, Output) and source.index == 1
        )
        rows = inputs[counted].view(ways, -1).sum(1).tolist()
        parts: list[list[Tensor]] = [
            list(value.chunk(ways) if i == counted else value.split(rows)) for i, value in enumerate(inputs)
        ]
        spec = chunk.phases["F"]
        for name, value in zip((*spec.params, *spec.buffers), (*params, *buffers), strict=True):
            sharding = self.shardings[name]
            parts.append(list(value.chunk(ways, sharding.dim)) if sharding.degree > 1 else [value] * ways)
        results = [self.setup.code(chunk, "F")(*arguments) for arguments in zip(*parts, strict=True)]
        count = len(chunk.outputs)
        joined = (torch.cat(pieces) for pieces in zip(*(result[:count] for result in results), strict=True))
        return (*joined, *results[0][count:])
