"""The driver's side of checkpoints: where a run's are, which it goes on from, and how they are committed.

Workers write and read their parts.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import Tensor

from piper.callbacks import Callback, named_callbacks
from piper.checkpoint.bucket_spans import held_names
from piper.checkpoint.folder import (
    Retention,
    begun,
    by_step,
    candidates,
    commit,
    discard,
    discarding,
    settled,
)
from piper.checkpoint.json_state import Plain, decode, encode, name_of, name_of_dtype
from piper.checkpoint.load import Done, Values
from piper.checkpoint.metadata import (
    FILE,
    DamagedError,
    Spec,
    Trainer,
    changes_in_training,
    check_model,
    check_trainer,
    name_in_group,
    wanted_model,
)
from piper.checkpoint.save import Copied, copied, record_of
from piper.checkpoint.storage import TensorRange, Written, write_parts
from piper.checkpoint.target import target_of, unwritten
from piper.errors import ConfigError, WorkerError
from piper.job import Job
from piper.runtime.setup import ProgramLike
from piper.runtime.trainers import empty_optimizer
from piper.workers.group import A, R, WorkerGroup
from piper.workers.results import Resumed
from piper.workers.serve import WorkerAnswers
from piper.workers.timeouts import TIMEOUTS

log = logging.getLogger("piper")
LET_SAVE = 'let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))'


def checkpoints_of(folder: Path, job: Job) -> Path | None:
    """Return the folder of a run's checkpoints; a relative one is in the run's own. None: it saves none."""
    return None if job.checkpoint is None else folder / job.checkpoint.folder


def prepare_saves(folder: Path, job: Job, own: Callable[[Path], bool]) -> Path | None:
    """Make the folder of a run's checkpoints; refuse one with a checkpoint that is not the run's `own`."""
    where = checkpoints_of(folder, job)
    if where is None:
        return None
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(where, str(error)) from None
    if earlier := [path for path in by_step(where) if not own(path)]:
        raise ConfigError(
            "this folder holds the checkpoints of another run",
            by=str(where),
            facts={"newest": earlier[-1].name},
            hint="go on with it: --resume, or piper.launch(program, resume=...); "
            "or let the job save elsewhere: Checkpoint(folder=...)",
        )
    return where


def past_of(folder: Path, job: Job) -> list[Path | DamagedError]:
    """Return the checkpoints that a run may go on from, the newest first, or what is wrong with one."""
    where = checkpoints_of(folder, job)
    if where is None:
        what = "the job saves no checkpoints, so there is nothing to go on from"
        raise ConfigError(what, by="--resume", hint=LET_SAVE)
    return loadable(where)


def loadable(where: Path) -> list[Path | DamagedError]:
    """Return the checkpoints of a folder, the newest first, or what is wrong with one. Refuse if all are."""
    checkpoints = candidates(where)
    if checkpoints and not any(isinstance(one, Path) for one in checkpoints):
        raise none_left(where, [one for one in checkpoints if isinstance(one, DamagedError)])
    return checkpoints


def checkpoints_at(path: Path, job: Job) -> list[Path | DamagedError]:
    """Return the checkpoints at a path, newest first: itself, those of a folder, or of a run, if any."""
    inside = checkpoints_of(path, job)
    for where in (path,) if inside is None else (inside, path):
        if by_step(where):
            return loadable(where)
    begun = inside is not None and inside.is_dir() and settled(path) == path
    return [] if begun else [path]


def none_left(where: Path, damaged: Sequence[DamagedError]) -> ConfigError:
    """Return the error of a run none of whose checkpoints can be loaded."""
    return ConfigError(
        "no checkpoint of this run can be loaded",
        by="--resume",
        facts={"folder": str(where), **{error.path.name: error.why for error in damaged}},
        hint="bring one back from a copy, or start a run of its own with another --out",
    )


def load_newest(read: Callable[[Path], Resumed], past: Sequence[Path | DamagedError]) -> Resumed:
    """Load the newest checkpoint that is intact. Say which newer ones are damaged."""
    damaged: list[DamagedError] = []
    for one in past:
        if isinstance(one, DamagedError):
            damaged.append(one)
            continue
        try:
            resumed = read(one)
        except DamagedError as error:
            damaged.append(error)
            continue
        for bad in damaged:
            log.warning("%s is damaged (%s): using %s instead", bad.path, bad.why, one)
        return replace(resumed, path=str(one))
    raise none_left(damaged[0].path.parent, damaged)


def run_folder(checkpoint: Path, job: Job) -> Path | None:
    """Return the folder of the run that wrote a checkpoint. None: the job would not have written it there."""
    parts = () if job.checkpoint is None else Path(job.checkpoint.folder).parts
    where = checkpoint.parent.absolute()
    if not parts or Path(*parts).is_absolute() or where.parts[-len(parts) :] != parts:
        return None
    return Path(*where.parts[: -len(parts)])


CALLBACKS, DATA = "piper callbacks", "data"  # keys of the data of a checkpoint that has both


def with_states(callbacks: Sequence[Callback], data: object) -> object:
    """Return the data of a checkpoint, with the states of those callbacks that have any."""
    states = {name: callback.state_dict() for name, callback in named_callbacks(callbacks).items()}
    kept = {name: state for name, state in states.items() if state}
    return {CALLBACKS: kept, DATA: data} if kept else data


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A save that workers have not finished."""

    path: Path
    keep: int | None
    data: Plain
    unread: Written
    done: dict[int, Done]


class SavedWorkers:
    """Workers that are asked until they end, and whose state is saved and loaded."""

    open = True
    pending: Pending | None = None
    error: ConfigError | None = None  # of a save whose end was not waited for

    def __init__(self, group: WorkerGroup) -> None:
        """Drive a group whose workers have started."""
        self.group, self.program, self.devices = group, group.program, group.devices
        self.unread = group.unread  # the values that no device holds, which a load replaces
        self.retention = Retention()

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        """Call a method of workers, each with its argument, and return their answers."""
        return self.guarded(lambda: self.group.ask(call, arguments))

    def guarded(self, act: Callable[[], R]) -> R:
        """Return what workers answer. With an error of theirs the session ends."""
        if not self.open:
            raise ended()
        try:
            return act()
        except BaseException as error:
            if not self.group.in_order:
                self.pending = None  # what workers still answer is not the answer to the next call
            if isinstance(error, WorkerError):
                self.close()
            raise

    def ask_all(self, call: Callable[[WorkerAnswers, A], R], argument: A) -> dict[int, R]:
        """Call a method of all workers with one argument, and return their answers."""
        return self.ask(call, dict.fromkeys(self.devices, argument))

    def close(self) -> None:
        """End every worker. Idempotent."""
        try:
            if self.open:
                self.settle()
        finally:
            self.open = False
            self.group.close()

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Copy the state and let it be written with `data`; what was saved before is on the disk first."""
        self.settle()
        target = target_of(path)
        plain = encode(data, "data")
        with begun(target) as partial:
            unread = write_parts(partial, "driver", unread_parts(self.program, self.unread))
        self.ask_all(WorkerAnswers.save, str(partial))
        self.pending = Pending(path=target, keep=keep, data=plain, unread=unread, done={})
        if wait:
            self.settle()

    def try_write(self, folder: Path, data: object) -> None:
        """Refuse what could not be saved, without copying or writing anything."""
        encode(data, "data")
        done = self.ask_all(WorkerAnswers.try_save, None)
        if (failed := failed_one(done)) is not None and failed.refused is not None:
            raise failed.refused.as_config_error("save", folder)
        record_of([cast(Copied, done[device].copied) for device in self.devices], self.program.job.seed)

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
        if failed := failed_one(pending.done):
            discard(pending.path)
            if failed.refused is not None:
                raise failed.refused.as_config_error("save", pending.path)
            raise unwritten(pending.path, str(failed.trouble))
        written = [pending.unread, *(done.written for done in pending.done.values())]
        copies = [cast(Copied, pending.done[device].copied) for device in self.devices]
        model = model_of(self.program, self.unread)
        with discarding(pending.path):
            record = replace(record_of(copies, self.program.job.seed), data=pending.data, model=model)
        commit(pending.path, record, written)
        self.retention.trust(pending.path)
        if pending.keep is not None:
            self.retention.start(pending.path.parent, pending.keep)

    def read(self, path: Path | str) -> Resumed:
        """Take the state of a checkpoint, whatever its strategy, once workers have read and verified all."""
        self.settle()
        values = Values(Path(path).absolute())
        folder, record = values.folder, values.record
        wanted = wanted_model(self.program.plans, self.program.outline)
        check_model(folder, record, wanted)
        check_trainer(folder, record, trainer_names(self.program), self.program.job.seed)
        try:
            data = decode(record.data)
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(folder, f"{FILE}: {error}") from error
        on_devices = held_names(self.program.plans)
        unread = {name: values[name] for name in values if name not in on_devices}
        self.ask_all(WorkerAnswers.load, str(folder))
        done: dict[int, Done] = {}
        while not self._all_done(done, TIMEOUTS.save_poll):
            continue
        if failed := failed_one(done):
            self.ask_all(WorkerAnswers.adopt, False)
            if failed.refused is not None:
                raise failed.refused.as_config_error("load", folder)
            raise DamagedError(folder, str(failed.trouble))
        try:
            self.ask_all(WorkerAnswers.adopt, True)
        except BaseException:
            self.close()  # some workers may have the new state and some the old
            raise
        if changes := changes_in_training(record, wanted):
            log.warning("%s was saved with other parameters trained: %s", folder, changes)
        self.unread.update(unread)
        self.retention.trust(folder)
        callbacks: Mapping[str, object] = {}
        if isinstance(data, Mapping) and CALLBACKS in data:
            data, callbacks = data[DATA], data[CALLBACKS]
        return Resumed(step=record.step, data=data, callbacks=callbacks, path=str(path))


def ended() -> WorkerError:
    """Return the error of a run that is used after its end."""
    return WorkerError("the workers have ended", by="run", hint="launch the program again")


def failed_one(done: Mapping[int, Done]) -> Done | None:
    """Return the outcome of a worker whose save or load has failed, if any: one that refused it first."""
    failed = [one for one in done.values() if one.refused is not None or one.trouble is not None]
    return min(failed, key=lambda one: one.refused is None, default=None)


def model_of(program: ProgramLike, unread: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return the specs of what a program's checkpoints hold; unread values keep their types."""
    specs = wanted_model(program.plans, program.outline)
    for name, value in unread.items():
        if name in specs:
            specs[name] = Spec(shape=tuple(value.shape), dtype=name_of_dtype(value.dtype))
    of_groups = {
        name_in_group(name, group): replace(specs[name], group=group)
        for name in held_names(program.plans)
        for group in range(1, len(program.plans.groups_apart))
    }
    return {**specs, **of_groups}


def unread_parts(program: ProgramLike, unread: Mapping[str, Tensor]) -> list[TensorRange]:
    """Return the values that no device holds and a checkpoint does, as parts of it."""
    wanted = wanted_model(program.plans, program.outline)
    kept = {name: value for name, value in unread.items() if name in wanted and value.numel()}
    return [whole_part(f"model.{name}", value) for name, value in kept.items()]


def whole_part(key: str, value: Tensor) -> TensorRange:
    """Return all of a tensor as a part."""
    return TensorRange(key=key, size=value.numel(), start=0, tensor=copied(value).view(-1))


def trainer_names(program: ProgramLike) -> Trainer:
    """Return which optimizer and scheduler a program's workers have."""
    job = program.job
    sizes = {p.name: p.shape for p in program.outline.parameters if p.trainable}
    optimizer = empty_optimizer(job.optimizer, sizes)
    if optimizer is None:
        return Trainer()
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    kinds = [None if part is None else name_of(type(part)) for part in (optimizer, scheduler)]
    return Trainer(optimizer=kinds[0], scheduler=kinds[1])
