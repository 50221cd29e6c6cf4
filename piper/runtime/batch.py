"""The batch that a program was compiled for, and whether a step gets one like it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from piper.errors import ConfigError
from piper.ir.chunk import Batch
from piper.runtime.compute import parts_of
from piper.runtime.setup import Setup
from piper.sharding import whole_sizes

FLOATING = "a floating type"  # each is cast to the one that computes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The global batch that a program was compiled for."""

    shapes: Mapping[str, tuple[int, ...]]  # of every field that some chunk reads
    types: Mapping[str, str]  # of every field, with FLOATING for all floating types


def wanted_batch(setup: Setup) -> BatchSpec:
    """Return the fields, shapes and types that every batch of a program has."""
    found: dict[str, tuple[int, ...]] = {}
    plans = setup.plans
    for chunk in setup.outline.chunks:
        for source, spec in zip(chunk.inputs, chunk.input_specs, strict=True):
            if isinstance(source, Batch) and source.field not in found:
                load = next(
                    ins.loads
                    for plan in plans
                    for ins in plan.instrs
                    if ins.op == "load" and ins.loads.name == source.field
                )
                pieces = (
                    len(plans.chunks[chunk.name].devices) // load.degree * len(parts_of(plans, chunk.name))
                )
                whole = whole_sizes(spec.shape, load.slices)
                found[source.field] = (whole[0] * pieces, *whole[1:])
    types = {name: type_of(spec.dtype) for name, spec in setup.outline.batch.items()}
    return BatchSpec(shapes=found, types=types)


def type_of(dtype: str) -> str:
    """Return a type's name; floating types are all the same."""
    return FLOATING if "float" in dtype else dtype


def check_batch(batch: Mapping[str, Tensor], wanted: BatchSpec, by: str = "step") -> None:
    """Refuse a batch that has other fields, shapes or types than the program was compiled for.

    by: who gave the batch.
    """
    if not isinstance(batch, Mapping):
        raise unlike(by, "a dict of tensors", type(batch).__name__)
    for name, shape in wanted.shapes.items():
        if name not in batch:
            raise unlike(by, f"{name} {shape}", "no such field")
    for name, value in batch.items():
        if name not in wanted.types:
            raise unlike(by, ", ".join(wanted.types), f"also {name}")
        if not isinstance(value, Tensor):
            raise unlike(by, f"{name} as a tensor", f"{name} as {type(value).__name__}")
        got = tuple(value.shape)
        if got != wanted.shapes.get(name, got):
            raise unlike(by, f"{name} {wanted.shapes[name]}", f"{name} {got}")
        dtype = str(value.dtype).removeprefix("torch.")
        if type_of(dtype) != wanted.types[name]:
            raise unlike(by, f"{name} of {wanted.types[name]}", f"{name} of {dtype}")


def unlike(by: str, wanted: str, got: str) -> ConfigError:
    """Return the error of a batch that differs from the one that was compiled."""
    return ConfigError(
        "the batch is not like the one that was compiled",
        by=by,
        facts={"wanted": wanted, "got": got},
        hint="give every step a batch of the same fields, shapes and types: drop or pad a smaller last one",
    )
