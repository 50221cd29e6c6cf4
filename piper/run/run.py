"""A running job and its training loop, which `run.train()`, a script's own loop and `piper train` share.

A step of the loop: take the next batch of the job's data, train on it, refuse numbers that are not finite,
call the callbacks, evaluate and save where that is due. The position in the data is saved with the state, so
a run that goes on from a checkpoint is the run that was not stopped, to the last bit.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self, cast

from torch import Tensor

from piper.callbacks import Callback, named_callbacks
from piper.checkpoint.folder import step_path
from piper.checkpoint.target import UndroppedError, UnwrittenError
from piper.data.feed import Feed, is_position
from piper.errors import ConfigError
from piper.process.usercode import named
from piper.run.checkpointing import (
    checkpoints_at,
    load_newest,
    prepare_saves,
    run_folder,
    with_states,
)
from piper.run.run_calls import RunCalls
from piper.run.session import Session, Sessions, asking
from piper.run.whole_values import holders, whole_buffers, whole_parameters
from piper.runtime.batch import BatchSpec, check_batch, wanted_batch
from piper.runtime.recorders import ClockOffset, DeviceProfile, OutputKey, first_bad
from piper.runtime.setup import ProgramLike
from piper.workers.results import Batch, EvaluationResult, Resumed, StepResult, state_by_name
from piper.workers.serve import WorkerAnswers

log = logging.getLogger("piper")


class Watch(Callback):
    """What `piper train` adds to the loop: a callback that runs before those of the job. This is empty."""

    def begin(self, step: int) -> None:
        """Run before the batch of a step is taken."""

    def end(self, batch: Batch) -> None:
        """Run when a step is trained, before its result is looked at."""

    def on_option(self, group: int, key: str, value: float) -> None:
        """Run when an option of one of the optimizer's groups is set."""

    def between(self, run: "Run") -> bool:
        """Run after the callbacks, before the step is saved. Return whether the training ends here."""
        return run.sessions.leaving()


class Run(RunCalls):
    """A running job. It ends with its `with` block, with `close`, or when nothing refers to it any more."""

    stopping = False  # a callback has asked to stop
    saves = True  # it has a state that can be saved
    folder = Path()  # in which a relative folder of checkpoints lies
    watch = Watch()
    _feed: Feed | None = None  # made with the first batch that is taken
    _loaded: Resumed | None = None  # the checkpoint that it goes on from
    _from_newest = False  # and whether that was the newest of its folder
    tried = False  # whether a save of the state after a step has been tried
    saves_to: Path | None = None  # the folder of checkpoints, once it is known to be free

    def __init__(self, sessions: Sessions) -> None:
        """Train with the workers of sessions, which must not refer to the run: they end when it is gone."""
        self.sessions = sessions
        self.tables = {}
        self._end = weakref.finalize(self, sessions.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    @property
    def program(self) -> ProgramLike:
        """Return the program: of an elastic job, that of the devices which it has now."""
        return self.sessions.program

    @property
    def done(self) -> int:
        """Return how many steps are trained, those before a loaded checkpoint included."""
        return self.sessions.done

    @property
    def session(self) -> Session:
        """Return the workers as they run now."""
        return self.sessions.session

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch, of any sizes: the program of a new shape is compiled first."""
        return self.sessions.step(self.with_tables(batch))

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train so many more steps on the job's data, by default up to the job's `steps`.

        Batches follow those that were taken before, in this run or before its checkpoint. Where the data
        ends, the next epoch begins with a new call of `data`. After each step callbacks run, and the job is
        evaluated and saved where that is due, and at the last step. The training ends early where a callback
        calls `stop`, or the system asks a worker to end.
        """
        last = self._last(steps)
        for batch in self.batches(steps):
            result = self.step(batch)
            self.watch.end(batch)
            self.after_step(self.done, result, last)
            yield result
        self.after_training(self.done)

    def batches(self, steps: int | None = None) -> Iterator[Batch]:
        """Yield the batches of so many more steps, by default up to the job's `steps`: for your own loop."""
        last = self._last(steps)
        if steps is None and self.done >= last:
            log.warning("The run is at step %d of %d already: run.train(n) trains n more", self.done, last)
        self._prepare_saves()
        self._try_save()
        try:
            while self.done < last:
                self.watch.begin(self.done + 1)
                batch = next(self.feed)
                check_batch(batch, self.wanted, by=f"{named('data', self.feed.make)}, step {self.feed.step}")
                yield batch
                if self.stopping:
                    break
        finally:
            self.stopping = False  # a second call goes on

    @cached_property
    def wanted(self) -> BatchSpec:
        """Return the fields that a batch must have."""
        return wanted_batch(self.program)

    def _last(self, steps: int | None) -> int:
        return self.program.job.steps if steps is None else self.done + steps

    @property
    def feed(self) -> Feed:
        """Return the job's data, from the batch that follows the last step on."""
        if self._feed is None:
            job = self.program.job
            self._feed = Feed(job.data, job.seed)
            self._feed.seek(self.done, None if self._loaded is None else self._loaded.data)
        return self._feed

    def position(self) -> object:
        """Return the position in the data, for a checkpoint. None: no batch of it was taken by this run."""
        if self._feed is not None:
            return self._feed.state_dict()
        loaded = None if self._loaded is None else self._loaded.data
        return loaded if is_position(loaded) else None

    def after_step(self, step: int, result: StepResult, last: int) -> EvaluationResult | None:
        """Do what the job asks for after a step, in a loop of your own too. `train` does so by itself.

        Refuse a loss that is not finite, call the callbacks, evaluate and save where that is due or the step
        is the `last`. Return the result of an evaluation.
        """
        self._check_finite(step, result)
        for callback in self._callbacks:
            callback.on_step(self, step, result)
        asked, evaluated = self.program.job.evaluate, None
        if asked is not None and (step % asked.every == 0 or step == last):
            evaluated = self.evaluate()
            for callback in self._callbacks:
                callback.on_evaluate(self, step, evaluated)
        if self.watch.between(self):
            self.stop()
        self._save_step(step, step == last or self.stopping)
        self.complete()
        return evaluated

    def _check_finite(self, step: int, result: StepResult) -> None:
        """Refuse to go on from a step whose loss or gradient is not finite."""
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return
        facts = {"loss": f"{result.loss:g}", "gradient": f"norm {result.grad_norm:g}"}
        hint = "name the first chunk that made it: --detect-nan, or piper.launch(program, keep_outputs=True)"
        if self.sessions.options.keep_outputs:
            first = first_bad(self.program.outline, self.trails(), self.state_dict())
            facts |= {} if first is None else {"first": first}
            hint = "lower the learning rate or clip the gradient; --resume goes on from the last checkpoint"
        raise ConfigError("the numbers are not finite any more", by=f"step {step}", facts=facts, hint=hint)

    def after_training(self, step: int) -> None:
        """Call the callbacks at the end of the training, in a loop of your own too."""
        for callback in self._callbacks:
            callback.on_end(self, step)

    @property
    def _callbacks(self) -> Sequence[Callback]:
        return (self.watch, *self.program.job.callbacks)

    def _prepare_saves(self) -> None:
        """Find out where checkpoints go, before the first step: not among those of another run."""
        if self.saves_to is None and self.saves:
            self.saves_to = prepare_saves(self.folder, self.program.job, self._own)

    def _own(self, path: Path) -> bool:
        """Return whether the run goes on from a checkpoint, or from a later one of its folder."""
        loaded = None if self._loaded is None else Path(self._loaded.path).absolute()
        if loaded is None or loaded.parent != path.parent.absolute():
            return False
        return self._from_newest or path.absolute() <= loaded

    def _try_save(self) -> None:
        """Refuse a state that cannot be saved before a step, and after one: not after hours of training."""
        if self.saves_to is not None and not self.tried:
            self.sessions.try_write(self.saves_to, self._data())

    def _save_step(self, step: int, last: bool) -> None:
        """Save where it is due. That it fails is a warning, except at the end, for which it waits."""
        wanted = self.program.job.checkpoint
        if wanted is None or not self.saves:
            return
        self._prepare_saves()
        self._try_save()  # with what the optimizer keeps since its first step
        self.tried = True
        if step % wanted.every and not last:
            return
        assert self.saves_to is not None
        path = step_path(self.saves_to, step)
        try:
            self.settle()  # the save before this one, which was left to finish by itself
        except (UnwrittenError, UndroppedError) as error:
            log.warning("warning: %s", error)
        try:
            self.save(path, wait=last, keep=wanted.keep)
            for callback in self._callbacks:
                callback.on_save(self, step, path)
        except (UnwrittenError, UndroppedError) as error:
            if last and isinstance(error, UnwrittenError):
                raise
            log.warning("warning: %s", error)

    def complete(self) -> None:
        """Take note that all of a step is done: it is evaluated and saved, and callbacks have run."""
        self.sessions.complete(self._data)

    def stop(self) -> None:
        """End the training after this step. For callbacks."""
        self.stopping = True

    def resize(self, devices: int) -> None:
        """Go on with so many devices, if the job is elastic. For callbacks."""
        self.sessions.resize(devices)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint: model, optimizer, scheduler, step, callbacks, and the position in the data.

        data: what to save in place of the position in the job's data, for batches that come from elsewhere.
        wait: False returns once the state is copied, and training goes on while it is written; an error then
        comes with the next `save`, `settle` or `close`.
        keep: how many of the newest `step-*` checkpoints in its folder stay once it is complete. None: all.
        """
        self.sessions.write(path, self._data(data), wait=wait, keep=keep)

    def _data(self, position: object = None) -> object:
        """Return what a checkpoint has besides tensors: the position in the data, and callbacks' states."""
        callbacks = self.program.job.callbacks
        return with_states(callbacks, self.position() if position is None else position)

    def flush(self, folder: Path) -> int | None:
        """End all workers, and write the newest state in memory as a checkpoint. Return its step, if any."""
        return self.sessions.flush(folder, self._data)

    def load(self, path: Path | str) -> Resumed:
        """Go on from a checkpoint, saved under any strategy, or from the newest of a run's folder."""
        given, job = Path(path), self.program.job
        past = checkpoints_at(given, job)
        alone = past in ([], [given])
        read = self.sessions.read
        resumed = read(given) if alone else load_newest(read, past)
        self._loaded, self._from_newest = resumed, not alone
        self._feed = self.saves_to = None
        self.folder = run_folder(Path(resumed.path), self.program.job) or self.folder
        for name, callback in named_callbacks(self.program.job.callbacks).items():
            if name in resumed.callbacks:
                callback.load_state_dict(cast("Mapping[str, object]", resumed.callbacks[name]))
                callback.on_load(self)
        self.complete()
        return resumed

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self.sessions.settle()

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""
        super().set_optimizer_option(group, key, value)
        self.watch.on_option(group, key, value)

    @asking
    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        """Return in full what the optimizer keeps for each parameter under a key, such as `exp_avg`."""
        buckets = [bucket for bucket in self.program.plans.buckets.values() if bucket.trainable]
        asked = {device: (key, names) for device, names in holders(buckets).items()}
        answers = self.session.ask(WorkerAnswers.optimizer_state, asked)
        kept = {d: {bucket: flat for bucket, (flat, _) in each.items()} for d, each in answers.items()}
        names = {name for each in answers.values() for _, of_bucket in each.values() for name in of_bucket}
        whole = whole_parameters(buckets, kept)
        return {name: value for name, value in whole.items() if name in names}

    @asking
    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, by fully qualified name."""
        outline, plans = self.program.outline, self.program.plans
        kept, buckets = self.session.unread, plans.buckets.values()
        values = kept | whole_parameters(buckets, self.session.ask(WorkerAnswers.owned, holders(buckets)))
        names = [buffer.name for buffer in outline.buffers if buffer.persistent]
        if names:
            values |= whole_buffers(plans, self.session.ask_all(WorkerAnswers.buffers, names))
        whole = state_by_name(outline, values)
        return {name: value.to("cpu", copy=True) for name, value in whole.items()}

    @asking
    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients in full, before clipping; `keep_gradients` must be on."""
        buckets = self.session.last.program.plans.buckets.values()
        owned = self.session.ask(WorkerAnswers.gradients, holders(buckets))
        given = {d: {b: flat for b, flat in each.items() if flat is not None} for d, each in owned.items()}
        whole = whole_parameters(buckets, given)
        first = self.session.devices[0]
        reached = self.session.ask(WorkerAnswers.reached, {first: None})[first]
        return {name: value for name, value in whole.items() if name in reached}

    @asking
    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        """Return what every chunk returned in the last step, by device; `keep_outputs` must be on."""
        return self.session.ask_all(WorkerAnswers.trail, None)

    @asking
    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
        """Return when the instructions of the recorded steps ran, by device; `profile` must be on."""
        profiles, clock = self.session.ask_all(WorkerAnswers.record, None), self.session.group.clock
        return {d: (profile, clock(d)) for d, profile in profiles.items() if profile is not None}

    def close(self) -> None:
        """End every worker. Idempotent."""
        self._end()


def start_run(sessions: Sessions) -> Run:
    """Start the workers of a run."""
    run = Run(sessions)
    try:
        sessions.begin()
    except BaseException:
        run.close()
        raise
    return run
