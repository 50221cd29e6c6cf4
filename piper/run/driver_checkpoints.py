"""Checkpoints that the driver writes alone: of a state in memory that no worker can write, or of weights."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shutil import copyfile
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from piper.checkpoint.folder import begun, commit
from piper.checkpoint.json_state import Plain, decode, dtype_named, encode
from piper.checkpoint.metadata import Record, Spec, Trainer, check_model, read_record, wanted_model
from piper.checkpoint.plain_state import PlainState, nested_tensors
from piper.checkpoint.save import Shapes
from piper.checkpoint.storage import TensorRange, sync, write_parts
from piper.checkpoint.target import target_of
from piper.errors import ConfigError
from piper.run.checkpointing import model_of, unread_parts, whole_part
from piper.runtime.setup import ProgramLike, initial_tensors
from piper.workers.transport.versions import Versions


def write_version(
    program: ProgramLike,
    versions: Versions,
    step: int,
    path: Path,
    *,
    unread: Mapping[str, Tensor],
    data: object,
    options: Iterable[tuple[int, str, float]] = (),
) -> None:
    """Write a complete version as a checkpoint, with the unread values and options that were set after it."""
    target = target_of(path)
    plain = encode(data, "data")
    record_before, ranges_of = versions.saved(step, program.job.seed)
    parts = {f"device-{device:05}": ranges for device, ranges in ranges_of.items()}
    parts["driver"] = unread_parts(program, unread)
    with begun(target) as partial:  # now nothing can be lost any more with a machine that holds the version
        written = [write_parts(partial, name, ranges) for name, ranges in parts.items()]
    record = replace(
        record_before,
        trainer=with_options(record_before.trainer, options),
        data=plain,
        model=model_of(program, unread),
    )
    commit(target, record, written)


def copy_moved(
    state: Path, path: Path, *, data: object, options: Iterable[tuple[int, str, float]] = ()
) -> None:
    """Write a state that has moved to another layout as a checkpoint, with options that were set after it."""
    target, plain, moved = target_of(path), encode(data, "data"), read_record(state)
    with begun(target) as partial:
        for name in moved.files:
            copyfile(state / name, partial / name)
            sync(partial / name)
    commit(target, replace(moved, trainer=with_options(moved.trainer, options), data=plain))


def with_options(trainer: Trainer, options: Iterable[tuple[int, str, float]]) -> Trainer:
    """Return a trainer, in whose optimizer's groups options are set."""
    if trainer.groups is None:
        return trainer
    changed = cast("list[dict[str, object]]", decode(trainer.groups))
    for group, key, value in options:
        before = changed[group][key]
        changed[group][key] = torch.full_like(before, value) if isinstance(before, Tensor) else value
    return replace(trainer, groups=encode(changed, "optimizer.param_groups"))


MOST = 2**30  # bytes of values that are held at a time


def write_start(
    program: ProgramLike,
    values: Mapping[str, Tensor],
    path: Path | str,
    trained: tuple[Record, PlainState] | None = None,
) -> None:
    """Write a checkpoint that holds these weights: `launch(program, resume=path)` begins with them.

    values: every parameter and persistent buffer by name; a tied one by any of its names. Buffers that a
    model does not save are as it makes them. trained: the rest of a training, as a record without tensors and
    the optimizer's state. None: this is step 0 of one.
    """
    target = target_of(path)
    wanted = wanted_model(program.plans, program.outline)
    names = names_here(program, values)
    made = {b.name for b in program.outline.buffers if not b.persistent and b.name not in names}
    unsaved = made & wanted.keys()
    initial = initial_tensors(program) if unsaved else {}
    given = {name: wanted.get(name, Spec(shape=())) for name in (*names, *unsaved)}
    record, state = (Record(step=0), None) if trained is None else trained
    source = target if state is None else state.path  # named where it is of another model
    check_model(source, Record(step=0, model=given), wanted)

    def value(name: str) -> Tensor:
        tensor = initial[name] if name in unsaved else values[names[name]]
        spec = wanted[name]
        here = {name: Spec(shape=tuple(tensor.shape))}
        check_model(source, Record(step=0, model=here), {name: spec})
        return tensor if spec.dtype is None else tensor.to(dtype_named(spec.dtype))

    moments: dict[str, Shapes] = {}
    numbers: dict[str, dict[str, Plain]] = {}
    tensors: Iterable[tuple[str, Tensor]] = ((f"model.{name}", value(name)) for name in wanted)
    if state is not None:
        own = names_here(program, state.kept)
        kept = {name: state.kept[given] for name, given in own.items() if wanted[name].trainable}
        tensors = chain(tensors, kept_tensors(state, kept, wanted, moments, numbers))
        record = replace(record, moments=moments, numbers=numbers)
    with begun(target) as partial:
        batches = enumerate(batched(tensors))
        written = [write_parts(partial, f"values-{number:05}", parts) for number, parts in batches]
    commit(target, replace(record, model=wanted), written)


def kept_tensors(
    state: PlainState,
    kept: Mapping[str, Mapping[str, str]],
    wanted: Mapping[str, Spec],
    moments: dict[str, Shapes],
    numbers: dict[str, dict[str, Plain]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's tensors by key, in the types of workers, and note `moments` and `numbers`."""
    like: dict[str, str] = {}  # by key: a parameter whose tensor has its elements
    for name, keys in kept.items():
        spec = wanted[name]
        for key, given in keys.items():
            value = state.source[given]
            if not isinstance(value, Tensor):
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    raise nested_tensors(state.path, given)
                numbers.setdefault(name, {})[key] = encode(value, f"optimizer.{name}.{key}")
                continue
            if value.dim() and tuple(value.shape) == spec.shape:
                like[key] = name
                if value.is_floating_point() and spec.dtype is not None:
                    value = value.to(dtype_named(spec.dtype))
                moments.setdefault(name, {})[key] = None
            else:
                moments.setdefault(name, {})[key] = tuple(value.shape)
            yield f"optimizer.{name}.{key}", value
    for name, shapes in moments.items():
        for key, shape in shapes.items():
            if shape and key in like and math.prod(shape) != math.prod(wanted[name].shape):
                raise ConfigError(
                    "the optimizer's state has other shapes than the parameters",
                    by=str(state.path),
                    facts={name: f"{key} is {list(shape)}, the parameter is {list(wanted[name].shape)}"},
                    hint="import it with a recipe that builds the model it was saved from",
                )


def names_here(program: ProgramLike, values: Mapping[str, object]) -> dict[str, str]:
    """Return the given name of each value, by the first name that the value has in the model."""
    first = {alias: p.name for p in program.outline.parameters for alias in p.aliases}
    first |= {alias: b.name for b in program.outline.buffers for alias in b.saved_as}
    return {first.get(name, name): name for name in values}


def batched(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[TensorRange]]:
    """Yield whole tensors as parts, as many at a time as memory should hold."""
    ranges: list[TensorRange] = []
    for key, tensor in tensors:
        if tensor.numel():
            ranges.append(whole_part(key, tensor))
        if sum(one.tensor.nbytes for one in ranges) > MOST:
            yield ranges
            ranges = []
    if ranges:
        yield ranges
