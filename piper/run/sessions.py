"""The sessions of a run. Here a run has one; `recovery` starts others when it ends."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from piper.errors import ConfigError
from piper.run.run_events import Repeats
from piper.run.session import Session
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.results import Batch, Resumed, StepResult

P = ParamSpec("P")
T = TypeVar("T")


class Sessions:
    """The sessions of a run: one, which ends with the first failure."""

    elastic = False  # the number of devices can change

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

    def call(self, act: Callable[[], T], *, steps: int = 0) -> T:
        """Return what a function returns that asks the workers of the session; `steps`: that it trains."""
        return act()

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch."""
        result = self.call(lambda: self._step(batch), steps=1)
        self.done += 1
        return result

    def _step(self, batch: Batch) -> StepResult:
        return self.session.step(batch)

    def complete(self, data: Callable[[], object]) -> None:
        """Note that all of the last step is done; `data`: what a checkpoint has besides tensors."""

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Write a checkpoint; `data`: with the states of callbacks, if they have any."""
        self.call(lambda: self.session.write(path, data, wait=wait, keep=keep))

    def try_write(self, folder: Path, data: object) -> None:
        """Refuse what could not be saved as it is now."""
        self.call(lambda: self.session.try_write(folder, data))

    def read(self, path: Path | str) -> Resumed:
        """Let workers go on from a checkpoint."""
        resumed = self.call(lambda: self.session.read(path))
        self.done = resumed.step
        return resumed

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self.call(lambda: self.session.settle())

    def flush(self, folder: Path, data: Callable[[], object]) -> int | None:
        """End all workers, and write the newest state in memory as a checkpoint. Return its step, if any."""
        return None

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters, from the next step on."""
        self.call(lambda: self.session.set_optimizer_option(group, key, value))

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
        return sessions.call(partial(method, *args, **kwargs))

    return act
