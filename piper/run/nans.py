"""Refuses numbers that are not finite, and finds the first result of the step that is not."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel
from piper.ir.ids import Pass, SlotId
from piper.workers.results import StepResult

if TYPE_CHECKING:
    from piper.run.run import Run

Mark = tuple[Pass, SlotId]  # a pass and one of its results
Trails = Mapping[int, Mapping[Mark, Tensor]]  # what every chunk returned, by device


def check_finite(run: "Run", step: int, result: StepResult) -> None:
    """Refuse to go on from a step whose loss or gradient is not finite."""
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    facts = {"loss": f"{result.loss:g}", "gradient": f"norm {result.grad_norm:g}"}
    hint = "name the first chunk that made it: --detect-nan, or piper.launch(program, keep_outputs=True)"
    if run.sessions.options.keep_outputs:
        first = first_bad(run.program.outline, run.trails(), run.state_dict())
        facts |= {} if first is None else {"first": first}
        hint = "lower the learning rate or clip the gradient; --resume goes on from the last checkpoint"
    raise ConfigError("the numbers are not finite any more", by=f"step {step}", facts=facts, hint=hint)


def first_bad(outline: CapturedModel, trails: Trails, state: Mapping[str, Tensor]) -> str | None:
    """Return the first bad result in the order of the model. None: all results are finite.

    The order: forwards, backwards in reverse, parameters. Later results only propagate it. Within a chunk,
    microbatches are looked at one after another.
    """
    order = {chunk.name: place for place, chunk in enumerate(outline.chunks)}
    bad_results: list[tuple[tuple[int, int], int, Mark, str]] = []
    for device, trail in trails.items():
        for place, (mark, value) in enumerate(trail.items()):
            if bad := kind_of(value):
                chunk = order[mark[0].chunk]
                forward = mark[0].phase == "F"
                bad_results.append(
                    ((0, chunk) if forward else (1, -chunk), place, mark, f"{bad} on device {device}")
                )
    if bad_results:
        _, _, (run, slot), what = min(bad_results, key=lambda item: item[:2])
        return f"{run}: {slot} holds {what}"
    for name, tensor in state.items():
        if bad := kind_of(tensor):
            return f"the update: {name} holds {bad}"
    return None


def kind_of(value: Tensor) -> str | None:
    """Return what is wrong with a tensor's numbers. None: all are finite."""
    if not value.is_floating_point() or bool(torch.isfinite(value).all()):
        return None
    return "a NaN" if bool(torch.isnan(value).any()) else "an infinity"
