"""The batch that a program was compiled for, and whether a step gets one like it, but for its sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.errors import ConfigError
from piper.ir.chunk import Batch
from piper.ir.sharding import whole_sizes
from piper.job import Buckets, limit_of
from piper.runtime.compute import parts_of
from piper.runtime.setup import ProgramLike, Setup, Shapes
from piper.runtime.uneven import COUNTS, divides, filled

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


def shapes_of(batch: Mapping[str, Tensor]) -> Shapes:
    """Return the shape and type of every field of a batch, as a key."""
    return tuple(
        (name, tuple(field.shape), type_of(str(field.dtype).removeprefix("torch.")))
        for name, field in sorted(batch.items())
    )


def read_shapes(batch: Mapping[str, Tensor], wanted: BatchSpec) -> Shapes:
    """Return the shape and type of every field of a batch that a model reads, as a key."""
    read = (*wanted.shapes, COUNTS)
    return shapes_of({name: batch[name] for name in read if name in batch})


def check_batch(batch: Mapping[str, Tensor], wanted: BatchSpec, by: str = "step") -> None:
    """Refuse a batch that has other fields, types or numbers of axes than the program was compiled for.

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
        check_field(name, value, wanted, by)
    sizes = {name: len(batch[name]) for name in wanted.shapes}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {samples}" for name, samples in sizes.items())
        raise unlike(by, "the same number of samples in every field", counts)


def check_field(name: str, value: object, wanted: BatchSpec, by: str) -> None:
    """Refuse a field that is no tensor, or one of another type or number of axes."""
    if not isinstance(value, Tensor):
        raise unlike(by, f"{name} as a tensor", f"{name} as {type(value).__name__}")
    got = tuple(value.shape)
    shape = wanted.shapes.get(name, got)
    if len(got) != len(shape):
        raise unlike(by, f"{name} {shape}, or other sizes of {len(shape)} axes", f"{name} {got}")
    if 0 in got:
        raise unlike(by, f"{name} with at least one element", f"{name} {got}")
    dtype = str(value.dtype).removeprefix("torch.")
    if type_of(dtype) != wanted.types[name]:
        raise unlike(by, f"{name} of {wanted.types[name]}", f"{name} of {dtype}")


def as_run(
    program: ProgramLike, batch: Mapping[str, Tensor], wanted: BatchSpec
) -> tuple[Mapping[str, Tensor], bool]:
    """Return a checked batch as it runs: padded to a bucket, its samples repeated where they do not divide.

    And whether it runs with this program itself, which was compiled for batches like `wanted`.
    """
    batch = padded(batch, program.job.buckets)
    same = all(tuple(batch[name].shape) == shape for name, shape in wanted.shapes.items())
    if same and COUNTS not in batch:
        return batch, True
    known = with_strategy_for(program, batch)
    fits = known is None or divides(batch, known.plans)
    return batch if known is None or fits else filled(batch, known.plans, known.outline), False


def with_strategy_for(program: ProgramLike, batch: Mapping[str, Tensor]) -> ProgramLike | None:
    """Return the first program that was compiled with the strategy of a batch. None: there is none."""
    limit = limit_of(program.job, batch)
    return next((one for one in (program, *program.shapes.values()) if limit_of(one.job) == limit), None)


def padded(batch: Mapping[str, Tensor], buckets: Buckets | None) -> Mapping[str, Tensor]:
    """Return a batch whose fields are padded to the shortest length they fit in. A longer one stays."""
    fields = {} if buckets is None else {name: batch[name] for name in buckets.pad if name in batch}
    if buckets is None or not fields:
        return batch
    sizes = {name: field.shape[1] if field.dim() > 1 else None for name, field in fields.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        raise ConfigError(
            "the fields to pad differ in their lengths",
            by="Buckets",
            facts={name: str(tuple(field.shape)) for name, field in fields.items()},
            hint="axis 1 is the length: let all fields of `pad` have the same",
        )
    length = next(iter(fields.values())).shape[1]
    fits = min((size for size in buckets.lengths if size >= length), default=length)
    if fits == length:
        return batch
    return {**batch, **{name: longer(field, fits, buckets.pad[name]) for name, field in fields.items()}}


def longer(field: Tensor, length: int, value: float) -> Tensor:
    """Return a field with a value added at the end of axis 1, up to a length."""
    more = field.new_full((field.shape[0], length - field.shape[1], *field.shape[2:]), value)
    return torch.cat([field, more], 1)


def bucket_batches(batch: Mapping[str, Tensor], buckets: Buckets | None) -> Iterator[Mapping[str, Tensor]]:
    """Yield a batch of each length that a job's batches are padded to, made from one of them."""
    if buckets is None:
        return
    if missing := [name for name in buckets.pad if name not in batch]:
        raise ConfigError(
            f"there is no field {missing[0]!r} to pad",
            by="Buckets",
            facts={"batch": ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())},
            hint="name fields of the batch",
        )
    for length in buckets.lengths:
        cut = {name: batch[name][:, :length] for name in buckets.pad}
        yield {**batch, **{name: longer(field, length, buckets.pad[name]) for name, field in cut.items()}}


def unlike(by: str, wanted: str, got: str) -> ConfigError:
    """Return the error of a batch that differs from the one that was compiled."""
    return ConfigError(
        "the batch is not like the one that was compiled",
        by=by,
        facts={"wanted": wanted, "got": got},
        hint="give every step a batch of the same fields and types, of the same number of axes; "
        "sizes may differ",
    )
