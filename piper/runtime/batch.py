"""The batch that a program was compiled for, and whether a step gets one like it."""

from collections.abc import Mapping

from torch import Tensor

from piper.errors import ConfigError
from piper.ir.chunk import Batch
from piper.runtime.compute import parts_of
from piper.runtime.setup import Setup

Shapes = Mapping[str, tuple[int, ...]]


def wanted_shapes(setup: Setup) -> Shapes:
    """The shape of every field of the global batch that some chunk reads."""
    found: dict[str, tuple[int, ...]] = {}
    plans = setup.plans
    for chunk in setup.outline.chunks:
        for source, spec in zip(chunk.inputs, chunk.input_specs, strict=True):
            if isinstance(source, Batch) and source.field not in found:
                pieces = len(plans.chunks[chunk.name].devices) * len(parts_of(plans, chunk.name))
                found[source.field] = (spec.shape[0] * pieces, *spec.shape[1:])
    return found


def check_batch(batch: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Refuse a batch that the plan cannot slice."""
    for field, shape in shapes.items():
        got = tuple(batch[field].shape) if field in batch else None
        if got != shape:
            raise ConfigError(
                "the batch is not like the one that was compiled",
                by="step",
                facts={
                    "wanted": f"{field} {shape}",
                    "got": "no such field" if got is None else f"{field} {got}",
                },
                hint="give every step a batch of the same shape: drop a smaller last one, or pad it",
            )
