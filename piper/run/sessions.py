"""The sessions of a run. Here a run has one; `recovery` starts others when it ends.

Under torchrun every rank runs the same script. Rank 0 asks the workers, and sends what each call returned or
raised to the other ranks, where the same call then returns or raises it too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import ParamSpec, TypeVar, cast

from piper import errors
from piper.checkpoint.json_state import Plain, decode, encode
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.target import UndroppedError, UnwrittenError
from piper.errors import ConfigError, LaunchError, PiperError, WorkerError
from piper.run.run_events import Repeats
from piper.run.session import Session
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.rank_agent import RankZeroResult, ServedAgent
from piper.workers.results import Batch, Resumed, StepResult
from piper.workers.torchrun import TorchrunStarter

P = ParamSpec("P")
T = TypeVar("T")
CHANGES = ("step", "_evaluate", "read")  # calls that every rank has to make when rank 0 does
KINDS = {kind.__name__: kind for kind in (UnwrittenError, UndroppedError, DamagedError)}


class Sessions:
    """The sessions of a run: one, which ends with the first failure."""

    elastic = False  # the number of devices can change
    drives = True  # this process asks the workers, and writes what callbacks write
    failed = False  # the block of the run ends with an error

    def __init__(self, program: ProgramLike, options: Options, starter: Starter) -> None:
        self.program, self.options, self.starter = program, options, starter
        self.done = 0  # steps that are trained, those before a loaded checkpoint included
        self.current: Session | None = None
        self.repeats = Repeats()  # those before a recovery too: its message comes once

    def begin(self) -> None:
        """Start all workers."""
        self.current = self.open(self.options)

    def open(self, options: Options) -> Session:
        """Start all workers, and return their session."""
        return Session(self.starter.start(options), self.repeats)

    @property
    def session(self) -> Session:
        """Return the session. Start its workers if they do not run."""
        if self.current is None:
            self.begin()
        assert self.current is not None
        return self.current

    def call(self, name: str, act: Callable[[], T]) -> T:
        """Return what a function returns that asks the workers of the session; `name`: of what it does."""
        return act()

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch."""
        result = self.call("step", lambda: self._step(batch))
        self.done += 1
        return result

    def _step(self, batch: Batch) -> StepResult:
        return self.session.step(batch)

    def complete(self, data: Callable[[], object]) -> None:
        """Note that all of the last step is done; `data`: what a checkpoint has besides tensors."""

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Write a checkpoint; `data`: with the states of callbacks, if they have any."""
        self.call("write", lambda: self.session.write(path, data, wait=wait, keep=keep))

    def try_write(self, folder: Path, data: object) -> None:
        """Refuse what could not be saved as it is now."""
        self.call("try_write", lambda: self.session.try_write(folder, data))

    def read(self, path: Path | str) -> Resumed:
        """Let workers go on from a checkpoint."""
        resumed = self.call("read", lambda: self.session.read(path))
        self.done = resumed.step
        return resumed

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self.call("settle", lambda: self.session.settle())

    def flush(self, folder: Path, data: Callable[[], object]) -> int | None:
        """End all workers, and write the newest state in memory as a checkpoint. Return its step, if any."""
        return None

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters, from the next step on."""
        self.call("set_optimizer_option", lambda: self.session.set_optimizer_option(group, key, value))

    def resize(self, devices: int) -> None:
        """Go on with so many devices, if the job is elastic."""
        raise ConfigError(
            f"this run cannot go on with {devices} devices: their number is fixed",
            by="resize",
            hint="let piper train recover (--retries) and make the job elastic: piper.Job(elastic=(2, 4))",
        )

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return self.current is not None and self.current.group.leaving

    def close(self) -> None:
        """End every worker, and what starts them. Idempotent."""
        try:
            if self.current is not None:
                self.current.close()
        finally:
            self.starter.close()


def asking(method: Callable[P, T]) -> Callable[P, T]:
    """Do all of a method of a run again if workers are lost meanwhile, where the run recovers."""

    @wraps(method)
    def act(*args: P.args, **kwargs: P.kwargs) -> T:
        sessions = cast(Sessions, getattr(args[0], "sessions"))  # noqa: B009  of the run
        return sessions.call(method.__name__, partial(method, *args, **kwargs))

    return act


class LeaderSessions(Sessions):
    """The session of rank 0."""

    starter: TorchrunStarter

    def call(self, name: str, act: Callable[[], T]) -> T:
        try:
            value = super().call(name, act)
        except PiperError as error:
            failure = RankZeroResult(
                call=name,
                error=type(error).__name__,
                what=error.what,
                by=error.by,
                facts=error.facts,
                hint=error.hint,
                notes=tuple(getattr(error, "__notes__", ())),
            )
            self.starter.publish(failure)
            raise
        sent: object = value
        if isinstance(value, Resumed):  # a dataset may save what messages do not hold, such as arrays
            data, callbacks = encode(value.data, "data"), encode(value.callbacks, "callbacks")
            sent = replace(value, data=data, callbacks=cast("dict[str, object]", callbacks))
        self.starter.publish(RankZeroResult(call=name, value=sent))
        return value


class FollowerSessions(Sessions):
    """The session of rank 0, as the script of another rank sees it."""

    drives = False

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        results: SimpleQueue[RankZeroResult | None],
        agent: ServedAgent | None = None,
    ) -> None:
        """Return results of rank 0; `agent`: of this rank. None: it has none, in a test."""
        super().__init__(program, options, Starter(program))
        self.results, self.agent, self.over = results, agent, False

    def begin(self) -> None:
        """Do nothing: rank 0 starts the workers."""

    def call(self, name: str, act: Callable[[], T]) -> T:
        """Return what a call returned on rank 0. Calls in between that only rank 0 makes are skipped."""
        while not self.over and (result := self.results.get()) is not None:
            if result.error is not None:
                raise error_of(result)
            if result.call == name:
                value = result.value
                if isinstance(value, Resumed):
                    data, callbacks = decode(cast(Plain, value.data)), decode(cast(Plain, value.callbacks))
                    value = replace(value, data=data, callbacks=cast("dict[str, object]", callbacks))
                return cast(T, value)
            if result.call in CHANGES:
                raise LaunchError(
                    "the ranks do not do the same",
                    by="run",
                    facts={"rank 0": result.call.strip("_"), "here": name.strip("_")},
                    hint="call step, load, save and the like on every rank, in one order",
                )
        self.over = True
        hint = "look at what rank 0 says; it may have failed"
        raise WorkerError("the run has ended on rank 0", by="run", hint=hint)

    def close(self) -> None:
        """Wait until rank 0 has ended the run. After an error end the worker at once. Idempotent."""
        self.over = True
        if self.agent is None:
            return
        try:
            if not self.failed:
                self.agent.wait()
        finally:
            self.agent.leave()


def error_of(result: RankZeroResult) -> PiperError:
    """Return the error that rank 0 has raised."""
    kind = KINDS.get(result.error or "") or getattr(errors, result.error or "", None)
    assert isinstance(kind, type) and issubclass(kind, PiperError), result.error
    error = kind.__new__(kind)  # a class of ours may be made in another way
    PiperError.__init__(error, result.what, by=result.by, facts=result.facts, hint=result.hint)
    for note in result.notes:
        error.add_note(note)
    return error
