"""A worker's side of checkpoints: what it holds as parts of full tensors, out to files and in from them."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.checkpoint.layout import (
    Span,
    buffers_of,
    held_buckets,
    owned_range,
    saved_buckets,
    saved_buffers,
    spans,
)
from piper.checkpoint.plain import Plain, decode, dtype_named, encode
from piper.checkpoint.record import Record, Trainer, read_record
from piper.checkpoint.storage import Part, Placed, Shelf, StorageError, write_parts
from piper.errors import ConfigError
from piper.ir.chunk import Outline
from piper.plan.plan import Bucket
from piper.runtime.setup import Initial
from piper.runtime.worker import Worker

Shapes = dict[str, tuple[int, ...] | None]  # of the optimizer's tensors for a parameter; None: like it


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A worker's state at one moment, in memory that nobody else uses."""

    parts: list[Part]
    trainer: Trainer
    moments: dict[str, Shapes]
    numbers: dict[str, dict[str, Plain]]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of a save or load: all in order, or in words what is wrong."""

    trouble: str | None = None
    placed: list[Placed] = field(default_factory=list)
    copied: Copied | None = None  # without its tensors


class Keeper:
    """Saves and loads one worker's state, while the worker may go on."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.thread: threading.Thread | None = None
        self.done: Done | None = None

    def save(self, folder: str) -> None:
        """Copy the state, and begin to write the copy down."""
        try:
            copied = copy_state(self.worker)
        except ConfigError as error:
            self.done = Done(trouble=str(error))
        else:
            self._begin("save", copied, folder)

    def load(self, folder: str) -> None:
        """Begin to take the state that a checkpoint holds."""
        self._begin("load", None, folder)

    def _begin(self, what: Literal["save", "load"], copied: Copied | None, folder: str) -> None:
        assert self.thread is None, "one at a time"
        self.done = None

        def work() -> None:
            try:
                if copied is None:
                    load_state(self.worker, Path(folder))
                    self.done = Done()
                else:
                    placed = write_parts(Path(folder), f"device-{self.worker.device:05}", copied.parts)
                    self.done = Done(placed=placed, copied=replace(copied, parts=[]))
            except (StorageError, ConfigError) as error:
                self.done = Done(trouble=str(error))
            except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
                self.done = Done(trouble=f"{type(error).__name__}: {error}")

        self.thread = threading.Thread(target=work, name=f"{what} {self.worker.device}", daemon=True)
        self.thread.start()

    def poll(self, wait: float) -> Done | None:
        """What became of it, if it has ended within so many seconds."""
        if self.thread is not None:
            self.thread.join(wait)
            if self.thread.is_alive():
                return None
            self.thread = None
        assert self.done is not None
        return self.done


def blank_values(outline: Outline) -> Initial:
    """Values of the right shape that take no memory, for a worker that is about to load others."""
    known = {value.name: (value.shape, value.dtype) for value in outline.parameters}
    known |= {value.name: (value.shape, value.dtype) for value in outline.buffers}

    def blank(name: str) -> Tensor:
        shape, dtype = known[name]
        return torch.zeros((), dtype=dtype_named(dtype)).expand(shape)

    return blank


def copy_state(worker: Worker) -> Copied:
    """Copy all that a worker is the one to write down."""
    plans, device = worker.setup.plans, worker.device
    sizes = {p.name: p.numel for p in worker.setup.outline.parameters}
    parts: list[Part] = []
    moments: dict[str, Shapes] = {}
    numbers: dict[str, dict[str, Plain]] = {}
    for bucket in saved_buckets(plans, device):
        low, high = owned_range(bucket, device)
        owned = worker.env.state.holdings[bucket.name].trained
        states = states_of(worker, bucket)
        for span in spans(bucket, device, low, high):
            size = sizes[span.name]
            parts.append(model_part(span, size, copied(owned[span.at - low : span.at - low + span.length])))
            for key, value in states.get(span.name, {}).items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(span.name, {})[key] = encode(value, f"optimizer.{span.name}.{key}")
                elif (part := moment_part(span, size, key, value)) is not None:
                    parts.append(part)
                    like = elementwise(span.length, value)
                    moments.setdefault(span.name, {})[key] = None if like else tuple(value.shape)
    for name in saved_buffers(plans, device):
        value = worker.buffer(name)
        assert value is not None
        if value.numel():
            flat = copied(value).view(-1)
            parts.append(Part(key=f"model.{name}", size=value.numel(), start=0, tensor=flat))
    return Copied(
        parts=parts, trainer=trainer_of(worker), moments=moments, numbers=numbers, step=worker.env.step
    )


def copied(value: Tensor) -> Tensor:
    """A tensor in memory of its own, on the host."""
    return value.detach().to("cpu", copy=True).contiguous()


def model_part(span: Span, size: int, tensor: Tensor) -> Part:
    """A run of a parameter's own elements."""
    return Part(key=f"model.{span.name}", size=size, start=span.start, tensor=tensor)


def elementwise(span_length: int, value: Tensor) -> bool:
    """Whether a tensor of the optimizer has an element for each of the parameter's."""
    return value.dim() > 0 and value.numel() == span_length


def moment_part(span: Span, size: int, key: str, value: Tensor) -> Part | None:
    """A tensor that the optimizer keeps for a parameter, or the run of it that goes with the elements.

    What does not go with the elements is the same on all devices that share the parameter: only the one that
    has the first element writes it down.
    """
    name = f"optimizer.{span.name}.{key}"
    if elementwise(span.length, value):
        return Part(key=name, size=size, start=span.start, tensor=copied(value).view(-1))
    if value.dim() and span.length != size:
        raise ConfigError(
            "the optimizer's state cannot be written down from shards",
            by="save",
            facts={"state": f"{name} of shape {list(value.shape)}", "shard": f"{span.length} of {size}"},
            hint="use zero=0, or an elementwise optimizer such as AdamW or SGD",
        )
    if span.start:
        return None
    return Part(key=name, size=value.numel(), start=0, tensor=copied(value).view(-1))


def states_of(worker: Worker, bucket: Bucket) -> Mapping[str, Mapping[str, object]]:
    """What the optimizer keeps for the parameters of a bucket."""
    state = worker.env.state
    if state.optimizer is None:
        return {}
    found = state.optimizer.state
    return {name: found[tensor] for name, tensor in state.segments.get(bucket.name, ()) if tensor in found}


def trainer_of(worker: Worker) -> Trainer:
    """How a worker's parameters change, in words and numbers."""
    optimizer, scheduler = worker.env.state.optimizer, worker.env.state.scheduler
    if optimizer is None:
        return Trainer()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return Trainer(
        optimizer=name_of(optimizer),
        groups=encode(groups, "optimizer.param_groups"),
        scheduler=None if scheduler is None else name_of(scheduler),
        schedule=None if scheduler is None else encode(scheduler.state_dict(), "scheduler"),
    )


def name_of(value: object) -> str:
    """The class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def load_state(worker: Worker, folder: Path) -> None:
    """Give a worker its part of the state that a checkpoint holds."""
    record = read_record(folder)
    shelf = Shelf(folder, record)
    for bucket in held_buckets(worker.setup.plans, worker.device):
        load_bucket(worker, bucket, shelf)
    for name in buffers_of(worker.setup.plans, worker.device):
        value = worker.buffer(name)
        assert value is not None
        flat = torch.empty(value.numel(), dtype=value.dtype)
        shelf.read([Part(key=f"model.{name}", size=value.numel(), start=0, tensor=flat)])
        value.copy_(flat.view(value.shape))
    if worker.env.state.optimizer is not None and record.seed is not None:
        load_optimizer(worker, worker.env.state.optimizer, shelf)
        scheduler = worker.env.state.scheduler
        if scheduler is not None:
            scheduler.load_state_dict(cast("dict[str, object]", decode(record.trainer.schedule)))
    worker.env.step = record.step


def load_bucket(worker: Worker, bucket: Bucket, shelf: Shelf) -> None:
    """Read the parameters of a bucket: all that the device computes with, and the exact ones it trains."""
    holding = worker.env.state.holdings[bucket.name]
    own = owned_range(bucket, worker.device)
    low, high = own if bucket.zero == 3 else (0, bucket.numel)
    exact = holding.flat if holding.master is None else torch.zeros(len(holding.flat), dtype=torch.float32)
    shelf.read(parts_between(worker, bucket, (low, high), exact))
    if holding.master is not None:
        holding.flat.copy_(exact)
        holding.master.copy_(exact if bucket.zero == 3 else exact[own[0] : own[1]])


def parts_between(worker: Worker, bucket: Bucket, between: tuple[int, int], flat: Tensor) -> Iterator[Part]:
    """The parts of parameters that lie between two elements of a bucket, over a tensor that begins there."""
    sizes = {p.name: p.numel for p in worker.setup.outline.parameters}
    low, high = between
    for span in spans(bucket, worker.device, low, high):
        first = span.at - low
        yield model_part(span, sizes[span.name], flat[first : first + span.length])


def load_optimizer(worker: Worker, optimizer: Optimizer, shelf: Shelf) -> None:
    """Give an optimizer its settings and what it keeps for each parameter."""
    record = shelf.record
    groups = cast("list[dict[str, object]]", decode(record.trainer.groups))
    here = optimizer.state_dict()["param_groups"]
    if len(groups) != len(here):
        raise ConfigError(
            "the optimizer has other groups of parameters",
            by="load",
            facts={"saved": f"{len(groups)} groups", "here": f"{len(here)} groups"},
            hint="go on with the same optimizer",
        )
    numbers = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, object]] = {}
    for name, segments in worker.env.state.segments.items():
        bucket = worker.setup.plans.buckets[name]
        tensors = dict(segments)
        for span in spans(bucket, worker.device, *owned_range(bucket, worker.device)):
            kept = moments_of(worker, span, tensors[span.name], shelf)
            if kept:
                state[numbers[id(tensors[span.name])]] = kept
    merged = [{**now, **saved} for now, saved in zip(here, groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": merged})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in state.get(numbers[id(parameter)], {}).items():
                now = optimizer.state[parameter][key]
                if isinstance(value, Tensor) and now.dtype != value.dtype:  # torch casts to the parameter's
                    optimizer.state[parameter][key] = value.to(now.device)


def moments_of(worker: Worker, span: Span, trained: Tensor, shelf: Shelf) -> dict[str, object]:
    """What the optimizer keeps for one parameter, for the run of it that this device trains."""
    record = shelf.record
    found: dict[str, object] = {}
    for key, shape in record.moments.get(span.name, {}).items():
        name = f"optimizer.{span.name}.{key}"
        stored = record.tensors[name]
        like = shape is None or (shape == () and goes_with_elements(record, key))
        length = span.length if like else stored.size
        flat = torch.empty(length, dtype=dtype_named(stored.dtype))
        shelf.read([Part(key=name, size=stored.size, start=span.start if like else 0, tensor=flat)])
        found[key] = flat.view(trained.shape if like else cast("tuple[int, ...]", shape))
    plain = cast("dict[str, Plain]", record.numbers.get(span.name, {}))
    return found | {key: decode(value) for key, value in plain.items()}


def goes_with_elements(record: Record, key: str) -> bool:
    """Whether the optimizer's tensors of a name have an element for each of a parameter's: some show it.

    A parameter that is a single number does not.
    """
    return any(keys.get(key, ()) is None for keys in record.moments.values())
