"""The driver's side of checkpoints: workers write and read their parts, the driver commits."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from piper.checkpoint.background import Done
from piper.checkpoint.bucket_spans import held_names
from piper.checkpoint.folder import Retention, begun, commit, discard, settled
from piper.checkpoint.json_state import Plain, decode, dtype_named, encode
from piper.checkpoint.metadata import (
    FILE,
    DamagedError,
    Spec,
    Trainer,
    changes_in_training,
    check_model,
    check_trainer,
    name_in_group,
    read_record,
    wanted_model,
)
from piper.checkpoint.save import Copied, name_of, record_of
from piper.checkpoint.storage import CheckpointReader, TensorRange, Written, write_parts
from piper.checkpoint.target import target_of, unwritten
from piper.checkpoint.verified_files import StorageError
from piper.errors import ConfigError
from piper.job import Job
from piper.run.saves import split_states
from piper.runtime.setup import ProgramLike
from piper.runtime.trainers import empty_optimizer
from piper.workers.answers import WorkerAnswers
from piper.workers.group import WorkerGroup
from piper.workers.results import Resumed
from piper.workers.timeouts import TIMEOUTS

log = logging.getLogger("piper")
A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A save that workers have not finished."""

    path: Path
    keep: int | None
    data: Plain
    unread: Written
    done: dict[int, Done]


class SavedWorkers(ABC):
    """Workers whose state is saved and loaded."""

    pending: Pending | None = None
    error: ConfigError | None = None  # of a save whose end was not waited for

    def __init__(self, group: WorkerGroup) -> None:
        """Drive a group whose workers have started."""
        self.group, self.program, self.devices = group, group.program, group.devices
        self.unread = group.unread  # the values that no device holds, which a load replaces
        self.retention = Retention()

    @abstractmethod
    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        """Call a method of workers, each with its argument, and return their answers."""

    def ask_all(self, call: Callable[[WorkerAnswers, A], R], argument: A) -> dict[int, R]:
        """Call a method of all workers with one argument, and return their answers."""
        return self.ask(call, dict.fromkeys(self.devices, argument))

    @abstractmethod
    def close(self) -> None:
        """End every worker. Idempotent."""

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Copy the state and let it be written; what was saved before is on the disk first.

        data: what a checkpoint has besides tensors, with the states of callbacks, if they have any.
        """
        self.settle()
        target = target_of(path)
        plain = encode(data, "data")
        with begun(target) as partial:
            unread = write_parts(partial, "driver", [*whole_parts(unread_kept(self.program, self.unread))])
        self.ask_all(WorkerAnswers.save, str(partial))
        self.pending = Pending(path=target, keep=keep, data=plain, unread=unread, done={})
        if wait:
            self.settle()

    def poll(self, wait: float = 0.0) -> None:
        """Finish the save that is under way, if every worker has done its part."""
        pending = self.pending
        if pending is not None and self._all_done(pending.done, wait):
            self.pending = None
            try:
                self._complete(pending)
            except ConfigError as error:
                self.error = error

    def _all_done(self, done: dict[int, Done], wait: float) -> bool:
        """Note which workers have saved or loaded their part. Return whether all have."""
        waiting = [device for device in self.devices if device not in done]
        answers = self.ask(WorkerAnswers.poll, dict.fromkeys(waiting, wait))
        done |= {device: answer for device, answer in answers.items() if answer is not None}
        return len(done) == len(self.devices)

    def settle(self) -> None:
        """Wait until the save that is under way is complete; if it fails, the error comes here."""
        while self.pending is not None:
            self.poll(TIMEOUTS.save_poll)
        self.error = self.retention.finish() or self.error
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _complete(self, pending: Pending) -> None:
        if refused := next((d.refused for d in pending.done.values() if d.refused is not None), None):
            discard(pending.path)
            raise refused.as_config_error("save", pending.path)
        if trouble := next((d.trouble for d in pending.done.values() if d.trouble is not None), None):
            discard(pending.path)
            raise unwritten(pending.path, trouble)
        written = [pending.unread, *(done.written for done in pending.done.values())]
        copies = [cast(Copied, pending.done[device].copied) for device in self.devices]
        model = model_of(self.program, self.unread)
        record = replace(record_of(copies, self.program.job.seed), data=pending.data, model=model)
        commit(pending.path, record, written)
        self.retention.trust(pending.path)
        if pending.keep is not None:
            self.retention.start(pending.path.parent, pending.keep)

    def read(self, path: Path | str) -> Resumed:
        """Take the state of a checkpoint, whatever strategy it was saved under.

        Workers read and verify their parts first, and take them once all have: a load that is refused changes
        nothing, and another may follow.
        """
        self.settle()
        folder = settled(Path(path).absolute())
        record = read_record(folder)
        wanted = wanted_model(self.program.plans, self.program.outline)
        check_model(folder, record, wanted)
        check_trainer(folder, record, trainer_names(self.program), self.program.job.seed)
        try:
            data = decode(record.data)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(folder, f"{FILE}: {error}") from error
        try:
            unread = read_unread(self.program, CheckpointReader(folder, record))
        except StorageError as error:
            raise DamagedError(folder, str(error)) from error
        self.ask_all(WorkerAnswers.load, str(folder))
        done: dict[int, Done] = {}
        while not self._all_done(done, TIMEOUTS.save_poll):
            continue
        if failed := next((d for d in done.values() if d.refused is not None or d.trouble is not None), None):
            self.ask_all(WorkerAnswers.adopt, False)
            raise (
                failed.refused.as_config_error("load", folder)
                if failed.refused
                else DamagedError(folder, str(failed.trouble))
            )
        try:
            self.ask_all(WorkerAnswers.adopt, True)
        except BaseException:
            self.close()  # some workers may have the new state and some the old
            raise
        if changes := changes_in_training(record, wanted):
            log.warning("%s was saved with other parameters trained: %s", folder, changes)
        self.unread.update(unread)
        self.retention.trust(folder)
        data, callbacks = split_states(data)
        return Resumed(step=record.step, data=data, callbacks=callbacks, path=str(path))


def model_of(program: ProgramLike, unread: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return the specs of what a program's checkpoints hold; unread values keep their types."""
    specs = wanted_model(program.plans, program.outline)
    for name, value in unread_kept(program, unread).items():
        specs[name] = Spec(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
    of_groups = {
        name_in_group(name, group): replace(specs[name], group=group)
        for name in held_names(program.plans)
        for group in range(1, len(program.plans.groups_apart))
    }
    return {**specs, **of_groups}


def unread_kept(program: ProgramLike, unread: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values that no device holds and a checkpoint does."""
    wanted = wanted_model(program.plans, program.outline)
    return {name: value for name, value in unread.items() if name in wanted}


def whole_parts(values: Mapping[str, Tensor]) -> Iterable[TensorRange]:
    """Yield full values as parts, each of which is all of its value."""
    for name, value in values.items():
        if value.numel():
            yield whole_part(f"model.{name}", value)


def whole_part(key: str, value: Tensor) -> TensorRange:
    """Return all of a tensor as a part."""
    flat = value.detach().to("cpu", copy=True).contiguous().view(-1)
    return TensorRange(key=key, size=value.numel(), start=0, tensor=flat)


def read_unread(program: ProgramLike, reader: CheckpointReader) -> dict[str, Tensor]:
    """Read the values that no device holds."""
    on_devices = held_names(program.plans)
    unread = {
        name: torch.empty(spec.shape, dtype=dtype_named(spec.dtype or "float32"))
        for name, spec in reader.record.values.items()
        if name not in on_devices
    }
    reader.read(
        TensorRange(key=f"model.{name}", size=value.numel(), start=0, tensor=value.view(-1))
        for name, value in unread.items()
    )
    return unread


def trainer_names(program: ProgramLike) -> Trainer:
    """Return which optimizer and scheduler a program's workers have."""
    job: Job = program.job
    sizes = {p.name: p.shape for p in program.outline.parameters if p.trainable}
    optimizer = empty_optimizer(job.optimizer, [b.update for b in program.plans.buckets.values()], sizes)
    if optimizer is None:
        return Trainer()
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    return Trainer(optimizer=name_of(optimizer), scheduler=None if scheduler is None else name_of(scheduler))
