"""Finds the first result of a step that is not finite."""

from collections.abc import Mapping

import torch
from torch import Tensor

from piper.ir.chunk import CapturedModel
from piper.ir.ids import Pass, SlotId

Mark = tuple[Pass, SlotId]  # a pass and one of its results
Trails = Mapping[int, Mapping[Mark, Tensor]]  # what every chunk returned, by device


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
