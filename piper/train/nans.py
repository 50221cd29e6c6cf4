"""Finds where a NaN or an infinity came from: the first result of a step that holds one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from piper.ids import Pass, SlotId
from piper.ir.chunk import CapturedModel

Mark = tuple[Pass, SlotId]  # a pass and one of its results
Trails = Mapping[int, Mapping[Mark, Tensor]]  # what every chunk returned, by device


def first_bad(outline: CapturedModel, trails: Trails, state: Mapping[str, Tensor]) -> str | None:
    """Return the first bad result in the order of the model. None: all results are finite.

    The order: forwards, backwards in reverse, parameters. Later results only propagate it. Within a chunk,
    microbatches are looked at one after another.
    """
    order = {chunk.name: place for place, chunk in enumerate(outline.chunks)}
    found: list[tuple[tuple[int, int], int, Mark, str]] = []
    for device, trail in trails.items():
        for place, (mark, value) in enumerate(trail.items()):
            if bad := kind_of(value):
                chunk = order[mark[0].chunk]
                forward = mark[0].phase == "F"
                found.append(
                    ((0, chunk) if forward else (1, -chunk), place, mark, f"{bad} on device {device}")
                )
    if found:
        _, _, (run, slot), what = min(found, key=lambda item: item[:2])
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
