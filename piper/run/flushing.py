"""Writes a state that is in memory to a disk, when no worker is left to do so."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import cast

import torch
from torch import Tensor

from piper.checkpoint.folder import begun, commit
from piper.checkpoint.json_state import Plain, decode, encode
from piper.checkpoint.read_record import read_record
from piper.checkpoint.storage import TensorRange, sync, write_parts
from piper.checkpoint.target import target_of
from piper.run.checkpointing import model_of, unread_kept, whole_parts
from piper.runtime.setup import ProgramLike
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
    """Write a complete version as a checkpoint.

    unread: the values that no device holds. options: of the optimizer, which were set after the step.
    """
    target = target_of(path)
    plain = encode(data, "data")
    parts: dict[str, list[TensorRange]] = {
        f"device-{device:05}": ranges for device, ranges in versions.parts(step).items()
    }
    parts["driver"] = [*whole_parts(unread_kept(program, unread))]
    record_before = versions.reader(step, program.job.seed).record
    with begun(target) as partial:  # now nothing can be lost any more with a machine that holds the version
        written = [write_parts(partial, name, ranges) for name, ranges in parts.items()]
    record = replace(
        record_before,
        trainer=replace(record_before.trainer, groups=with_options(record_before.trainer.groups, options)),
        data=plain,
        model=model_of(program, unread),
    )
    commit(target, record, written)


def copy_moved(
    state: Path, path: Path, *, data: object, options: Iterable[tuple[int, str, float]] = ()
) -> None:
    """Write a state that has moved to another layout as a checkpoint.

    options: of the optimizer, which were set after its step.
    """
    target, plain, moved = target_of(path), encode(data, "data"), read_record(state)
    with begun(target) as partial:
        for name in moved.files:
            copyfile(state / name, partial / name)
            sync(partial / name)
    groups = with_options(moved.trainer.groups, options)
    commit(target, replace(moved, trainer=replace(moved.trainer, groups=groups), data=plain))


def with_options(groups: Plain, options: Iterable[tuple[int, str, float]]) -> Plain:
    """Return the groups of an optimizer, in which options are set."""
    changed = cast("list[dict[str, object]]", decode(groups)) if groups is not None else []
    for group, key, value in options:
        before = changed[group][key]
        changed[group][key] = torch.full_like(before, value) if isinstance(before, Tensor) else value
    return encode(changed, "optimizer.param_groups") if changed else groups
