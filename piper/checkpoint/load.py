"""Reads a checkpoint that was saved under any strategy: its values by name, or a worker's state."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from piper.checkpoint.bucket_spans import length_of, saved_buckets, spans
from piper.checkpoint.folder import settled
from piper.checkpoint.json_state import Plain, decode, dtype_named, nested_state
from piper.checkpoint.metadata import FILE, DamagedError, Record, can_keep, name_in_group, read_record
from piper.checkpoint.save import Copied, RefusedError, buffer_parts, copied, copy_state, range_of
from piper.checkpoint.storage import CheckpointReader, StorageError, TensorRange, Written, write_parts
from piper.errors import ConfigError
from piper.ir.sharding import FlatRuns, whole_sizes
from piper.plan.bucket import Bucket
from piper.runtime.optimizer_states import SETTINGS, optimizers_in, states_of
from piper.runtime.trainers import PARAMS, telling
from piper.runtime.worker import Worker

OWN_STATE = "let what state_dict() adds be the same on all devices, and keep the rest in state[parameter]"
WAYS = ("fused", "foreach", "capturable")  # how an optimizer computes where it runs, not what


class Values(Mapping[str, Tensor]):
    """The parameters and buffers of a checkpoint. A tied parameter has its first name."""

    def __init__(self, path: Path | str) -> None:
        self.folder = settled(Path(path))
        self.record = read_record(self.folder)
        self.reader = CheckpointReader(self.folder, self.record)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensor(f"model.{name}", self.record.model[name].shape, self.dtype(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a parameter or buffer. Nothing is stored of one without elements."""
        stored = self.record.tensors.get(f"model.{name}")
        return dtype_named(stored.dtype if stored else self.record.model[name].dtype or "float32")

    def tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read any tensor of the record, which has this shape and type."""
        flat = torch.empty(math.prod(shape), dtype=dtype)
        try:
            self.reader.read([TensorRange(key=key, size=len(flat), start=0, tensor=flat)])
        except StorageError as error:
            raise DamagedError(self.folder, str(error)) from error
        return flat.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.values)

    def __len__(self) -> int:
        return len(self.record.values)


def read_state(worker: Worker, reader: CheckpointReader) -> list[Callable[[], object]]:
    """Read a worker's part of a checkpoint or version, and return functions that give it to the worker.

    The worker's state changes only when these are called: after every worker has read and verified its part.
    """
    record, buckets = reader.record, worker.setup.plans.buckets_on(worker.device)
    adoptions: list[Callable[[], object]] = [read_bucket(worker, bucket, reader) for bucket in buckets]
    slots = worker.setup.plans.of(worker.device).buffers
    for name, value in worker.buffers(slots).items():
        flat = torch.empty(value.numel(), dtype=value.dtype)
        stored = saved_name(worker, record, name)
        reader.read(buffer_parts(stored, slots[name], worker.device, value, flat))
        adoptions.append(partial(value.copy_, flat.view(value.shape)))
    adoptions.append(read_unused(worker, reader))
    optimizer, scheduler = worker.env.state.optimizer, worker.env.state.scheduler
    if optimizer is not None and record.seed is not None:
        adoptions.append(read_optimizer(worker, optimizer, reader))
        if scheduler is not None:
            schedule = cast("dict[str, object]", decode(record.trainer.schedule))
            check_settings(schedule, scheduler.state_dict(), "last_epoch")
            adoptions.append(partial(scheduler.load_state_dict, schedule))

    def renew() -> None:
        worker.env.step = record.step
        worker.renew()

    return [*adoptions, renew]


def saved_name(worker: Worker, record: Record, name: str) -> str:
    """Return the name under which a value of a worker's group is saved: its own where there is no other."""
    in_group = name_in_group(name, worker.setup.plans.place_in_group(worker.device)[0])
    return in_group if f"model.{in_group}" in record.tensors else name


def check_settings(saved: object, here: Mapping[str, object], key: str) -> None:
    """Refuse saved settings that lack a key of the optimizer or scheduler that is to load them."""
    if not isinstance(saved, dict) or (key in here and key not in saved):
        raise StorageError(f"{FILE}: trainer has no {key}")


def read_bucket(worker: Worker, bucket: Bucket, reader: CheckpointReader) -> Callable[[], None]:
    """Read the parameters of a bucket: all that the device computes with, and the exact ones it trains."""
    holding = worker.env.state.holdings[bucket.name]
    low, high = holding.layout.held
    if holding.master is None:
        exact = copied(holding.flat)
    else:
        exact = torch.zeros(len(holding.flat), dtype=holding.layout.sums)
    read_into(worker, bucket, reader, exact, (low, high))
    full = None
    if holding.master is not None and bucket.slices:
        full = copied(holding.master)
        read_into(worker, bucket.update, reader, full, bucket.update.owned(worker.device))

    def adopt() -> None:
        holding.write(exact.to(holding.flat.device), low)
        if full is not None:
            holding.take(full)

    return adopt


def read_into(
    worker: Worker,
    bucket: Bucket,
    reader: CheckpointReader,
    target: Tensor,
    extent: tuple[int, int],
) -> None:
    """Read the parameters of a bucket between two of its elements."""
    sizes = {piece.name: math.prod(whole_sizes(piece.shape, piece.shardings)) for piece in bucket.pieces}
    reader.read(
        range_of(f"model.{saved_name(worker, reader.record, name)}", sizes[name], runs, target, extent[0])
        for name, own_runs in spans(bucket, worker.device, *extent).items()
        for runs in own_runs
    )


def read_optimizer(worker: Worker, optimizer: Optimizer, reader: CheckpointReader) -> Callable[[], None]:
    """Read an optimizer's settings and what it keeps for each parameter."""
    record = reader.record
    where = worker.setup.device  # of tensors that were on an accelerator
    groups = cast("list[dict[str, object]]", decode(record.trainer.groups, where))
    here = optimizer.param_groups
    if len(groups) != len(here):
        raise RefusedError(
            "the optimizer has other groups of parameters",
            {"saved": f"{len(groups)} groups", "here": f"{len(here)} groups"},
            "go on with the same optimizer",
        )
    for saved, now in zip(groups, here, strict=True):
        check_settings(saved, now, "lr")
    kept: dict[Tensor, dict[str, object]] = {}
    for name, segments in worker.env.state.segments.items():
        update = worker.setup.plans.buckets[name].update
        tensors = dict(segments)
        for called, own_runs in spans(update, worker.device, *update.owned(worker.device)).items():
            tensor = tensors[called]
            stored = saved_name(worker, record, called)
            if flat := moments_of(stored, own_runs, tuple(tensor.shape), reader):
                kept[tensor] = nested_state(flat)

    own = cast("dict[str, Any]", decode(record.trainer.own, where) or {})

    def adopt() -> None:
        worker.env.state.regroup(record.trainer.members)
        name = type(optimizer).__name__
        with telling(f"{name}.load_state_dict() failed", worker.setup.optimizer, OWN_STATE):
            load_states(optimizer, kept, own, groups)
            states = states_of(optimizer)
            for parameter, values in kept.items():
                for key, value in values.items():
                    now = states[parameter][key]
                    # torch casts to the parameter's type, and makes other containers than there were.
                    if not isinstance(value, Tensor) or now.dtype != value.dtype:
                        to = now.device if isinstance(now, Tensor) else parameter.device
                        states[parameter][key] = tree_map_only(Tensor, partial(Tensor.to, device=to), value)
        set_options(optimizer, groups)

    return adopt


def load_states(
    optimizer: Optimizer,
    kept: Mapping[Tensor, object],
    own: Mapping[str, Any],
    groups: Sequence[Mapping[str, object]],
) -> None:
    """Let an optimizer load what it and those inside keep. Objects that they share stay the same ones."""
    several = optimizers_in(optimizer)
    before = [{key: vars(each)[key] for key in SETTINGS if key in vars(each)} for each in several]
    loaded: dict[Tensor, object] = {}
    for each in several:
        parameters = [p for group in each.param_groups for p in group["params"]]
        state = {number: kept[p] for number, p in enumerate(parameters) if p in kept}
        one = {**each.state_dict(), "state": state}
        each.load_state_dict(with_own(one, own, groups) if each is optimizer else one)
        loaded |= each.state
    if len(several) > 1:
        for each, objects in zip(several, before, strict=True):
            for group, new in zip(objects.get("param_groups", ()), each.param_groups, strict=False):
                group.update({**new, "params": group["params"]})
            vars(each).update(objects)
        states = states_of(optimizer)
        for parameter, values in loaded.items():
            states[parameter] = values


def with_own(
    state: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, object]]
) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer with what one of another process had for no parameter."""
    whole = {**state, **own, "state": {**state.get("state", {}), **own.get("state", {})}}
    if len(packed := state.get("param_groups", ())) == len(groups):
        saved = ({k: v for k, v in group.items() if k not in (*WAYS, *PARAMS)} for group in groups)
        whole["param_groups"] = [{**here, **one} for here, one in zip(packed, saved, strict=True)]
    return whole


def read_unused(worker: Worker, reader: CheckpointReader) -> Callable[[], None]:
    """Read what an optimizer kept for parameters that are frozen now, on the devices that save it again."""
    record, device = reader.record, worker.device
    unused: dict[str, dict[str, dict[str, object]]] = {}
    for bucket in saved_buckets(worker.setup.plans, device):
        if bucket.trainable:
            continue
        states = {
            name: moments_of(stored, own_runs, (length_of(own_runs),), reader)
            for name, own_runs in spans(bucket, device, *bucket.owned(device)).items()
            if can_keep(record, stored := saved_name(worker, record, name))
        }
        unused[bucket.name] = {name: state for name, state in states.items() if state}

    return partial(setattr, worker.env.state, "unused", unused)


def set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, object]]) -> None:
    """Set the options of an optimizer's groups to saved ones, but for how it computes where it runs."""
    for here, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            held = here.get(key)
            if isinstance(value, Tensor) and isinstance(held, Tensor):
                here[key] = value.to(held.device)
            elif key not in (*WAYS, "param_names"):
                here[key] = value


def moments_of(
    owner: str, own_runs: Sequence[FlatRuns], whole: tuple[int, ...], reader: CheckpointReader
) -> dict[str, object]:
    """Return what the optimizer keeps for the runs of a parameter that a device has, in the shape `whole`."""
    record = reader.record
    moments: dict[str, object] = {}
    for key, shape in record.moments.get(owner, {}).items():
        name = f"optimizer.{owner}.{key}"
        stored = record.tensors[name]
        # Of a parameter that is a single number, another parameter shows whether it goes with the elements.
        others = (keys.get(key, ()) for keys in record.moments.values())
        like = shape is None or (shape == () and None in others)
        flat = torch.empty(length_of(own_runs) if like else stored.size, dtype=dtype_named(stored.dtype))
        begin = min(runs.here for runs in own_runs)
        all_of_it = FlatRuns(here=begin, there=0, length=stored.size)
        reader.read(
            range_of(name, stored.size, runs, flat, begin) for runs in (own_runs if like else [all_of_it])
        )
        moments[key] = flat.view(whole if like else cast("tuple[int, ...]", shape))
    plain = cast("dict[str, Plain]", record.numbers.get(owner, {}))
    return moments | {key: decode(value) for key, value in plain.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The outcome of a save or load: done, refused, or failed because of the files."""

    trouble: str | None = None
    refused: RefusedError | None = None
    written: Written = field(default_factory=lambda: Written(files={}))
    copied: Copied | None = None  # without its tensors


class BackgroundSaver:
    """Saves and loads one worker's state in a thread, while the worker may go on."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.thread: threading.Thread | None = None
        self.done: Done | None = None
        self.adoptions: list[Callable[[], object]] = []  # what a load has read for the worker

    def save(self, folder: str) -> None:
        """Copy the state, and begin to write the copy down."""
        self.done = self._copy(copied)
        if self.done.copied is not None:
            self._begin("save", self.done.copied, folder)

    def try_save(self, _: object = None) -> Done:
        """Return what a save would be refused for, if anything. Tensors are looked at, not copied."""
        done = self._copy(partial(copied, to="meta"))
        return replace(done, copied=done.copied and replace(done.copied, parts=[]))

    def _copy(self, take: Callable[[Tensor], Tensor]) -> Done:
        """Copy the state with `take` for each tensor, or return why it is refused."""
        try:
            return Done(copied=copy_state(self.worker, take))
        except RefusedError as error:
            return Done(refused=error)
        except ConfigError as error:
            return Done(refused=RefusedError(error.what, error.facts, error.hint))

    def load(self, folder: str) -> None:
        """Begin to read the state that a checkpoint holds. The worker keeps its own until `adopt`."""
        self._begin("load", None, folder)

    def adopt(self, wanted: bool) -> None:
        """Give the worker the state that was read; if it is not wanted, forget it."""
        adoptions, self.adoptions = self.adoptions, []
        for act in adoptions if wanted else ():
            act()

    def _begin(self, what: Literal["save", "load"], copied: Copied | None, folder: str) -> None:
        assert self.thread is None, "one at a time"
        self.done = None

        def work() -> None:
            try:
                if copied is None:
                    reader = CheckpointReader(Path(folder), read_record(Path(folder)))
                    self.adoptions = read_state(self.worker, reader)
                    self.done = Done()
                else:
                    written = write_parts(Path(folder), f"device-{self.worker.device:05}", copied.parts)
                    self.done = Done(written=written, copied=replace(copied, parts=[]))
            except RefusedError as error:
                self.done = Done(refused=error)
            except StorageError as error:
                self.done = Done(trouble=str(error))
            except Exception as error:  # noqa: BLE001  it is reported to the driver, which raises
                self.done = Done(trouble=f"{type(error).__name__}: {error}")

        self.thread = threading.Thread(target=work, name=f"{what} {self.worker.device}", daemon=True)
        self.thread.start()

    def poll(self, wait: float) -> Done | None:
        """Return the outcome of the save or load. None: it has not ended within `wait` seconds."""
        if self.thread is not None:
            self.thread.join(wait)
            if self.thread.is_alive():
                return None
            self.thread = None
        assert self.done is not None
        return self.done
