"""The batch that a program was compiled for, and whether a step gets one like it, but for its sizes.

[Note: uneven batches] Where samples do not divide into equal slices, rows are repeated, and each slice knows
its samples. A slice of 6 rows may hold 6 samples, 3 samples twice, 2 three times, 1 six times, or copies
without weight. Every sample of a slice occurs equally often, so the mean of the rows is the mean of the
samples, and a sum counts by the share of the rows that are different samples. All slices have as many rows,
as plans need.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor, nn

from piper.errors import ConfigError
from piper.ir.chunk import Batch, CapturedModel
from piper.ir.sharding import whole_sizes
from piper.job import Buckets, Loss, Mean, Metrics, limit_of
from piper.plan.ops import Field
from piper.plan.plan import Plans
from piper.runtime.compute import parts_of, slices, slices_of
from piper.runtime.setup import ProgramLike, Shapes

FLOATING = "a floating type"  # each is cast to the one that computes
COUNTS = "piper_samples_in_slice"  # the field of a batch that says how many samples each row's slice holds
Weighted = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The global batch that a program was compiled for."""

    shapes: Mapping[str, tuple[int, ...]]  # of every field that some chunk reads
    types: Mapping[str, str]  # of every field, with FLOATING for all floating types


def wanted_batch(program: ProgramLike) -> BatchSpec:
    """Return the fields, shapes and types that every batch of a program has."""
    found: dict[str, tuple[int, ...]] = {}
    plans, outline, loads = program.plans, program.outline, dict[str, Field]()
    for ins in (ins for plan in plans for ins in plan.instrs if ins.op == "load"):
        loads.setdefault(ins.loads.name, ins.loads)
    for chunk in outline.chunks:
        for source, spec in zip(chunk.inputs, chunk.input_specs, strict=True):
            if isinstance(source, Batch) and source.field not in found:
                load = loads[source.field]
                devices = len(plans.chunks[chunk.name].devices) // load.degree
                first, *rest = whole_sizes(spec.shape, load.slices)
                found[source.field] = (first * devices * len(parts_of(plans, chunk.name)), *rest)
    types = {name: type_of(spec.dtype) for name, spec in outline.batch.items()}
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
    """Refuse a batch, given by `by`, of other fields, types or numbers of axes than were compiled for."""
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
    got, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    shape = wanted.shapes.get(name, got)
    if len(got) != len(shape):
        raise unlike(by, f"{name} {shape}, or other sizes of {len(shape)} axes", f"{name} {got}")
    if 0 in got:
        raise unlike(by, f"{name} with at least one element", f"{name} {got}")
    if type_of(dtype) != wanted.types[name]:
        raise unlike(by, f"{name} of {wanted.types[name]}", f"{name} of {dtype}")


def as_run(
    program: ProgramLike, batch: Mapping[str, Tensor], wanted: BatchSpec
) -> tuple[Mapping[str, Tensor], bool]:
    """Return a checked batch as it runs, padded and filled up, and whether it runs with this very program."""
    batch = padded(batch, program.job.buckets)
    same = all(tuple(batch[name].shape) == shape for name, shape in wanted.shapes.items())
    if same and COUNTS not in batch:
        return batch, True
    known = with_strategy_for(program, batch)
    if known is None or len(next(iter(batch.values()))) % slices_of(known.plans) == 0:
        return batch, False
    return filled(batch, known.plans, known.outline), False


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


def filled(batch: Mapping[str, Tensor], plans: Plans, outline: CapturedModel) -> dict[str, Tensor]:
    """Return a batch whose rows divide into slices, and say what each slice holds: [Note: uneven batches]."""
    samples, chunk = len(next(iter(batch.values()))), outline.loss.chunk
    degree = next(outline.degree(one) for one in outline.chunks if one.name == chunk)
    places, parts = len(plans.chunks[chunk].devices) // degree, sorted(parts_of(plans, chunk))
    each = places * len(parts)  # the slices of the loss: other chunks may have more
    rows, counts = arranged(samples, each, slices_of(plans) // each)
    groups = len(plans.groups_apart)
    share = each // groups
    if not all(any(counts[first : first + share]) for first in range(0, each, share)):
        raise ConfigError(
            f"{samples} samples leave a group that trains apart without any",
            by="step",
            facts={"groups": str(groups), "slices": f"{each}, of which each holds at most {rows} samples"},
            hint="drop the last batch where it is smaller, or average fewer groups",
        )
    order = torch.zeros(rows * each, dtype=torch.int64)
    held = torch.zeros(rows * each, dtype=torch.int64)
    first, number = 0, 0
    for place in range(places):
        for part in parts:
            spans = slices(plans, rows * each, place, places, part)
            at = torch.cat([torch.arange(low, high) for low, high in spans])
            count = counts[number]
            order[at] = first + torch.arange(rows) % count if count else 0
            held[at] = count
            first, number = first + count, number + 1
    rows_of = {name: field[order] for name, field in batch.items() if field.shape[:1] == (samples,)}
    return {**batch, **rows_of, COUNTS: held}


def arranged(samples: int, pieces: int, multiple: int) -> tuple[int, list[int]]:
    """Return the rows of each slice, as few as possible, and how many samples each of the slices holds."""
    # The rows are a multiple of `multiple` and of the samples in the slice, unless these are 0.
    rows = -(-samples // (pieces * multiple)) * multiple
    while True:
        for full in range(min(pieces, samples // rows), -1, -1):
            rest = samples - full * rows
            if rest >= 2 * rows:
                break
            found = fewest(rest, [n for n in range(1, rows + 1) if rows % n == 0])
            if full + len(found) <= pieces:
                counts = [rows] * full + found
                return rows, counts + [0] * (pieces - len(counts))
        rows += multiple


def fewest(total: int, numbers: list[int]) -> list[int]:
    """Return the fewest of some numbers, which may repeat and include 1, that add up to a total."""
    best: list[tuple[int, ...]] = [()]
    for value in range(1, total + 1):
        best.append(min(((n, *best[value - n]) for n in numbers if n <= value), key=len))
    return sorted(best[total], reverse=True)


def counted_loss(loss: Loss) -> Callable[..., Weighted | tuple[Weighted, Metrics]]:
    """Return a loss that counts the samples of a slice, of which some are repeated, each once."""

    @wraps(loss)
    def counted(model: nn.Module, batch: Mapping[str, Tensor]) -> Weighted | tuple[Weighted, Metrics]:
        count, rows = batch[COUNTS][0].double(), len(batch[COUNTS])
        share = count / rows
        returned = loss(model, {name: field for name, field in batch.items() if name != COUNTS})
        if isinstance(returned, tuple) and isinstance(returned[1], Mapping):
            metrics = {name: (total * share, weight * share) for name, (total, weight) in returned[1].items()}
            return scaled(returned[0], count, share), metrics
        return scaled(returned, count, share)

    return counted


def scaled(returned: Mean, count: Tensor, share: Tensor) -> Weighted:
    """Return a sum and a weight that count the samples of a slice once each."""
    if isinstance(returned, tuple):
        return (returned[0] * share).to(returned[0].dtype), returned[1] * share
    return (returned * count).to(returned.dtype), count
