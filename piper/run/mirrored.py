"""Gives the scripts of all ranks of a torchrun job the results of rank 0.

Every rank runs the same script. Rank 0 asks the workers, and sends what each call returned or raised to the
other ranks, where the same call then returns or raises it too.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, cast

from piper import errors
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.target import UndroppedError, UnwrittenError
from piper.errors import LaunchError, PiperError, WorkerError
from piper.run.run import Run, start_run
from piper.run.sessions import Sessions
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.rank_agent import RankZeroResult, ServedAgent
from piper.workers.rank_environment import RankEnvironment, check_size
from piper.workers.rendezvous import check_key, find_address, next_launch
from piper.workers.torchrun import TorchrunStarter

T = TypeVar("T")
CHANGES = ("step", "_evaluate", "read")  # calls that every rank has to make when rank 0 does
KINDS = {kind.__name__: kind for kind in (UnwrittenError, UndroppedError, DamagedError)}


class LeaderSessions(Sessions):
    """The session of rank 0."""

    starter: TorchrunStarter

    def call(self, name: str, act: Callable[[], T]) -> T:
        try:
            value = super().call(name, act)
        except PiperError as error:
            notes = tuple(getattr(error, "__notes__", ()))
            failure = RankZeroResult(call=name, error=type(error).__name__, text=str(error), notes=notes)
            self.starter.publish(failure)
            raise
        self.starter.publish(RankZeroResult(call=name, value=value))
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
        while not self.over:
            result = self.results.get()
            if result is None:
                break
            if result.error is not None:
                raise error_of(result)
            if result.call == name:
                return cast(T, result.value)
            if result.call in CHANGES:
                raise LaunchError(
                    "the ranks do not do the same",
                    by="run",
                    facts={"rank 0": result.call.strip("_"), "here": name.strip("_")},
                    hint="call step, load, save and the like on every rank, in one order",
                )
        self.over = True
        raise WorkerError(
            "the run has ended on rank 0", by="run", hint="look at what rank 0 says; it may have failed"
        )

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
    error = kind.__new__(kind)
    error.args = (result.text,)
    for note in result.notes:
        error.add_note(note)
    return error


def launch_on_ranks(program: ProgramLike, options: Options, world: RankEnvironment) -> Run:
    """Start a program on the ranks of a torchrun job, or join it as another rank than 0."""
    if world.leads:
        return start_run(LeaderSessions(program, options, TorchrunStarter(program, world)))
    check_size(world, len(program.plans.devices))
    check_key(world)
    results: SimpleQueue[RankZeroResult | None] = SimpleQueue()
    agent = ServedAgent(world, find_address(world, next_launch(world)), results.put)
    return start_run(FollowerSessions(program, options, results, agent))
