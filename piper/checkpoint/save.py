"""Copies what a worker writes into a checkpoint: its own runs of parameters, moments and buffers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from piper.checkpoint.bucket_spans import length_of, saved_buckets, saved_buffers, spans
from piper.checkpoint.json_state import Plain, encode, flat_state, name_of
from piper.checkpoint.metadata import Record, Trainer, name_in_group
from piper.checkpoint.storage import TensorRange
from piper.errors import ConfigError
from piper.ir.sharding import FlatRuns, flat_runs
from piper.plan.bucket import Bucket
from piper.plan.plan import Slot
from piper.runtime.bucket_layout import runs_of_slice
from piper.runtime.device_state import DeviceState
from piper.runtime.optimizer_states import SETTINGS, optimizers_in, states_of
from piper.runtime.trainers import is_ours
from piper.runtime.worker import Worker

T = TypeVar("T")
Take = Callable[[Tensor], Tensor]
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})
Shapes = dict[str, tuple[int, ...] | None]  # of the optimizer's tensors for a parameter; None: like it


class RefusedError(Exception):
    """A state that a worker cannot save or load as it is asked to; its driver reports it."""

    def __init__(self, what: str, facts: Mapping[str, str], hint: str) -> None:
        super().__init__(what, facts, hint)  # as given, so that it can be sent
        self.what, self.facts, self.hint = what, facts, hint

    def as_config_error(self, by: str, path: Path) -> ConfigError:
        """Return the error that the user sees."""
        return ConfigError(self.what, by=by, facts={"path": str(path), **self.facts}, hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A worker's state at one moment, in memory of its own."""

    parts: list[TensorRange]
    trainer: Trainer
    moments: dict[str, Shapes]
    numbers: dict[str, dict[str, Plain]]
    step: int


def copied(value: Tensor, to: str = "cpu") -> Tensor:
    """Copy a tensor to memory of its own on the host; `to`: "meta" copies its shape and type only."""
    return value.detach().to(to, copy=True, memory_format=torch.contiguous_format)


def copy_state(worker: Worker, copied: Take = copied) -> Copied:
    """Copy the state that this worker saves, in the layout that it is in, with `copied` for each tensor."""
    updates = saved_buckets(worker.holder.setup.plans, worker.device)
    buffers = saved_buffers(worker.setup.plans, worker.device)
    return copy_parts(worker, updates, buffers, trainer_of(worker.holder), copied)


def copy_parts(
    worker: Worker,
    updates: Iterable[Bucket],
    buffers: Iterable[str],
    trainer: Trainer,
    copied: Take,
    joined: Mapping[str, Tensor] = NO_TENSORS,
) -> Copied:
    """Copy what a worker owns of buckets and buffers; `joined`: by bucket, its two halves where known."""
    device, (group, _) = worker.device, worker.setup.plans.place_in_group(worker.device)
    sizes = {p.name: p.numel for p in worker.setup.outline.parameters}
    parts: list[TensorRange] = []
    moments: dict[str, Shapes] = {}
    numbers: dict[str, dict[str, Plain]] = {}
    updates = [*updates]
    for update in updates:
        low, high = update.owned(device)
        known = update.name in joined
        owned = joined[update.name] if known else worker.holder.holdings[update.name].trained
        for piece, own_runs in spans(update, device, low, high).items():
            key = f"model.{name_in_group(piece, group)}"
            own = (range_of(key, sizes[piece], runs, owned, low) for runs in own_runs)
            parts += [replace(one, tensor=copied(one.tensor)) for one in own]
    singles = single_numbers(worker.holder)
    for update, states in states_here(worker, updates):
        shapes = {piece: tensor.shape for piece, tensor in worker.holder.segments.get(update.name, ())}
        for piece, own_runs in spans(update, device, *update.owned(device)).items():
            name, whole = name_in_group(piece, group), length_of(own_runs) == sizes[piece]
            for key, value in states.get(piece, {}).items():
                where = f"optimizer.{name}.{key}"
                if not isinstance(value, Tensor):
                    numbers.setdefault(name, {})[key] = encode(value, where)
                    continue
                like = elementwise(own_runs, value) and key not in singles
                if ranges := moment_parts(where, own_runs, sizes[piece], value, copied, like=like):
                    parts += ranges
                    # Where a parameter is whole, its elements may be kept in another shape.
                    as_trained = like and (not whole or value.shape == shapes.get(piece, value.shape))
                    moments.setdefault(name, {})[key] = None if as_trained else tuple(value.shape)
    slots = worker.setup.plans.of(device).buffers
    for name, value in worker.buffers(buffers).items():
        stored = name_in_group(name, group)
        parts += buffer_parts(stored, slots[name], device, value, copied(value).view(-1))
    return Copied(parts=parts, trainer=trainer, moments=moments, numbers=numbers, step=worker.env.step)


def range_of(key: str, size: int, runs: FlatRuns, flat: Tensor, begin: int = 0) -> TensorRange:
    """Return runs of a flat tensor as elements of the whole one. begin: where `flat` begins in a bucket."""
    tensor = runs_of_slice(flat, runs, begin).squeeze(0)  # [runs, length], or [length] of a single run
    return TensorRange(key=key, size=size, start=runs.there, tensor=tensor, stride=runs.there_step)


def buffer_parts(name: str, slot: Slot, device: int, value: Tensor, flat: Tensor) -> list[TensorRange]:
    """Return a device's slice of a buffer as runs of the whole one. flat: the elements of the slice."""
    if not value.numel():
        return []
    key, size = f"model.{name}", slot.sharding.degree * value.numel()
    held = flat_runs(tuple(value.shape), slot.shardings, slot.position(device))
    return [range_of(key, size, runs, flat) for runs in held]


def elementwise(own_runs: Sequence[FlatRuns], value: Tensor) -> bool:
    """Return whether a tensor of the optimizer has an element for each that a device holds of a parameter."""
    return value.dim() > 0 and value.numel() == length_of(own_runs)


def single_numbers(state: DeviceState) -> set[str]:
    """Return what an optimizer keeps as one number for each parameter, though these have more elements."""
    kept = {} if state.optimizer is None else states_of(state.optimizer)
    return {
        key
        for parameter, values in kept.items()
        if isinstance(parameter, Tensor) and parameter.numel() > 1
        for key, value in flat_state(values).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def moment_parts(
    name: str, own_runs: Sequence[FlatRuns], size: int, value: Tensor, copied: Take, *, like: bool
) -> list[TensorRange]:
    """Return a tensor that the optimizer keeps for a parameter, or if it is like it, the runs of elements.

    What does not go with them is the same on all devices: the one with the first element writes it down.
    """
    if like:
        flat, begin = copied(value).view(-1), min(runs.here for runs in own_runs)
        return [range_of(name, size, runs, flat, begin) for runs in own_runs]
    if value.numel() > 1 and (length := length_of(own_runs)) != size:
        raise RefusedError(
            "the optimizer's state cannot be written down from shards",
            {"state": f"{name} of shape {list(value.shape)}", "shard": f"{length} of {size} elements"},
            "use zero=0, or an elementwise optimizer such as AdamW or SGD",
        )
    if min(runs.there for runs in own_runs):
        return []
    return [TensorRange(key=name, size=value.numel(), start=0, tensor=copied(value).view(-1))]


def states_here(
    worker: Worker, updates: Iterable[Bucket]
) -> Iterator[tuple[Bucket, Mapping[str, Mapping[str, object]]]]:
    """Yield what the optimizer keeps for buckets, and kept, in the first layout, for those frozen now."""
    home, holder = worker.env.state, worker.holder
    states = {} if holder.optimizer is None else states_of(holder.optimizer)
    for update in updates:
        if update.trainable:
            own = holder.segments.get(update.name, ())
            yield update, {name: flat_state(states[tensor]) for name, tensor in own if tensor in states}
    frozen = updates if home is holder else saved_buckets(home.setup.plans, worker.device)
    yield from ((update, home.unused.get(update.name, {})) for update in frozen if not update.trainable)


def trainer_of(state: DeviceState) -> Trainer:
    """Return a device's optimizer and scheduler, in words and numbers. Of `params` it counts those it has."""
    optimizer, scheduler = state.optimizer, state.scheduler
    if optimizer is None or not state.trains:
        return Trainer()
    saved = {} if is_ours(optimizer) else optimizer.state_dict()
    live, packed = optimizer.param_groups, saved.get("param_groups", ())  # a `state_dict` may add to groups
    options = packed if len(packed) == len(live) else live
    groups = [{**each, "params": len(group["params"])} for each, group in zip(options, live, strict=True)]
    own = own_state(optimizer, saved)
    kept = encode(own, "optimizer") if own else None
    return replace(trainer_with(optimizer, groups, scheduler), own=kept, members=state.members())


def trainer_with(optimizer: Optimizer, groups: object, scheduler: LRScheduler | None) -> Trainer:
    """Return an optimizer, the options of its groups and a scheduler, in words and numbers."""
    return Trainer(
        optimizer=name_of(type(optimizer)),
        groups=encode(groups, "optimizer.param_groups"),
        scheduler=None if scheduler is None else name_of(type(scheduler)),
        schedule=None if scheduler is None else encode(scheduler.state_dict(), "scheduler"),
    )


def inside(value: object) -> bool:
    """Return whether a value of a `state_dict()` is that of one or several optimizers inside, saved apart."""
    parts = tree_leaves(value, is_leaf=lambda each: isinstance(each, dict) and {*SETTINGS} <= each.keys())
    return bool(parts) and all(isinstance(part, dict) for part in parts)


def own_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, object]:
    """Return what an optimizer's `state_dict` has that belongs to no parameter. Empty: nothing."""
    if is_ours(optimizer):
        return {}
    groups = [group for each in optimizers_in(optimizer) for group in each.param_groups]
    known = {id(group) for group in groups} <= {id(group) for group in optimizer.param_groups}
    added = ((key, value) for key, value in saved.items() if key not in SETTINGS)
    own = {key: value for key, value in added if not (known and inside(value))}
    named = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    kept = {id(value) for value in optimizer.state.values()}  # which a `state_dict` may have under other keys
    packed = saved.get("state", {}).items()
    named |= {key: value for key, value in packed if type(key) is not int and id(value) not in kept}
    return own | ({"state": named} if named else {})


def one_trainer(devices: Iterable[Trainer]) -> Trainer:
    """Return the trainer of all devices. A step may change options, of a group also only where it trains."""
    trainers = [trainer for trainer in devices if trainer.optimizer is not None]
    if not trainers:
        return Trainer()
    said = zip(*(cast("list[dict[str, dict[str, Plain]]]", one.groups) for one in trainers), strict=True)
    groups = [max((one["map"] for one in options), key=lambda each: bool(each["params"])) for options in said]
    if any(trainer.own != trainers[0].own for trainer in trainers):
        raise ConfigError(
            "the optimizer's state cannot be written down",
            by="save",
            facts={
                "optimizer": str(trainers[0].optimizer),
                "but": "devices differ in what it keeps outside state[parameter]",
            },
            hint="keep what belongs to a parameter in the optimizer's state[parameter]",
        )
    apart: Plain = [{"map": {key: one for key, one in group.items() if key != "params"}} for group in groups]
    members = [one.members for one in trainers if one.members is not None]
    union = [[*dict.fromkeys(chain(*several))] for several in zip(*members, strict=True)] or None
    return replace(trainers[0], groups=apart, members=union)


def record_of(copies: Sequence[Copied], seed: int) -> Record:
    """Return the record of what all workers have copied, without files."""
    moments, numbers = merged(c.moments for c in copies), merged(c.numbers for c in copies)
    trainer = one_trainer(copy.trainer for copy in copies)
    return Record(step=copies[0].step, seed=seed, trainer=trainer, moments=moments, numbers=numbers)


def merged(tables: Iterable[Mapping[str, Mapping[str, T]]]) -> dict[str, dict[str, T]]:
    """Merge the tables of all workers into one, by parameter."""
    whole: dict[str, dict[str, T]] = {}
    for table in tables:
        for name, keys in table.items():
            whole.setdefault(name, {}).update(keys)
    return whole
