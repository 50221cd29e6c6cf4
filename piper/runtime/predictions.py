"""Predictions: the result of a forward for each sample, kept where a loss would be added up.

The program that predicts has the forward's result in the place of the loss of each microbatch. So its proof,
that every loss is counted exactly once, says of the predictions that none is missing.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from piper.ir.chunk import CapturedModel, Chunk, Tags
from piper.ir.ids import LOSS
from piper.plan.instr import Instr
from piper.runtime.compute import slices
from piper.runtime.context import Bound, Env
from piper.runtime.setup import ProgramLike


def predicts(outline: CapturedModel) -> bool:
    """Return whether a program predicts: what it has in place of a loss is more than one number."""
    return bool(loss_chunk(outline).outputs[outline.loss.index].shape)


def loss_chunk(outline: CapturedModel) -> Chunk:
    """Return the chunk that computes the loss."""
    return next(chunk for chunk in outline.chunks if chunk.name == outline.loss.chunk)


class PredictionRecorder:
    """The predictions of a device, by microbatch."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.kept: dict[Tags, Tensor] = {}

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Return an instruction that keeps a prediction, in place of one that adds up losses."""
        if ins.op != "accumulate" or ins.writes[0] != LOSS:
            return run
        slots, source, total = self.env.slots, self.env.at(ins.reads[0]), self.env.at(LOSS)
        part, device = ins.reads[0].part, self.env.setup.device

        def keep() -> None:
            self.kept[part] = cast(Tensor, slots[source]).clone()
            slots[total] = torch.zeros(1, dtype=torch.float64, device=device)

        return keep

    def take(self) -> dict[Tags, Tensor]:
        """Return the predictions on the host, and keep them no longer."""
        kept, self.kept = self.kept, {}
        return {part: value.cpu() for part, value in kept.items()}


def predicted_rows(program: ProgramLike, answers: Mapping[int, Mapping[Tags, Tensor]]) -> Tensor:
    """Return the rows that devices predicted, in the order of the batch. Devices that share samples agree."""
    plans, chunk = program.plans, loss_chunk(program.outline)
    degree, placed = program.outline.degree(chunk), plans.chunks[chunk.name]
    values: list[tuple[int, int, Tags, Tensor]] = []  # a slice of the samples, of how many, and its rows
    for device, kept in answers.items():
        for part, value in kept.items():
            devices = placed.devices_for(part)
            position, member = divmod(devices.index(device), degree)
            if not member:
                values.append((position, len(devices) // degree, part, value))
    samples = sum(len(value) for *_, value in values)
    rows = values[0][-1].new_empty((samples, *values[0][-1].shape[1:]))
    for position, count, part, value in values:
        spans = slices(plans, samples, position, count, part)
        rows[torch.cat([torch.arange(low, high) for low, high in spans])] = value
    return rows
