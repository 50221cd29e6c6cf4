"""Start the workers of a program again and again, from what stays when workers end."""

from collections.abc import Sequence
from typing import Protocol

from piper.errors import LaunchError
from piper.launchers.agent_versions import AgentVersions, ShortMachine
from piper.launchers.agent_watch import WarmAgent
from piper.launchers.driver import RemoteRun
from piper.launchers.inline import InlineRun
from piper.launchers.local import LocalWorkerGroup
from piper.launchers.processes import gone
from piper.launchers.rank_environment import RankEnvironment, rank_environment
from piper.launchers.run_programs import ProgramRun
from piper.launchers.transport.fork_server import ForkServer
from piper.launchers.transport.versions import Versions
from piper.plan.plan import Plans
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

Recoverable = ProgramRun  # a run whose state can be kept in memory and taken from there


class Starter(Protocol):
    """Starts the workers of a program, again and again."""

    @property
    def waited(self) -> float:
        """Return the seconds of the last start until every machine that it uses could fork workers."""

    @property
    def near(self) -> bool:
        """Return whether all workers are on the driver's machine, and see its memory."""

    def start(self, options: Options) -> Recoverable:
        """Start all workers."""

    def room(self, *, warm: bool = False) -> int | None:
        """Return for how many devices workers can be started now; `warm`: at once. None: for any number."""

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on; `places`: the accelerator of each device."""

    def expect(self, run: Recoverable, stall: float) -> None:
        """Let a run end when nothing has moved for so many seconds."""

    def warmed(self) -> Sequence[WarmAgent]:
        """Return the spares whose agents have become warm since the last call."""

    def passed_over(self) -> Sequence[ShortMachine]:
        """Return the spares that were not used since the last call, because they are short of memory."""

    def close(self) -> None:
        """End what outlives workers."""


class InlineStarter:
    """Starts workers as threads. What hangs in a thread cannot be ended."""

    near, waited = True, 0.0

    def __init__(self, program: ProgramLike, versions: Versions) -> None:
        self.program, self.versions = program, versions

    def room(self, *, warm: bool = False) -> int | None:
        """Return None: threads need no room."""
        return None

    def start(self, options: Options) -> InlineRun:
        """Start all workers."""
        return InlineRun(self.program, options, self.versions.files)

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on."""
        self.program, self.versions = program, versions

    def expect(self, run: Recoverable, stall: float) -> None:
        """Do nothing: waits of threads have the timeout that they began with."""

    def warmed(self) -> Sequence[WarmAgent]:
        """Return nothing: there are no spares."""
        return ()

    def passed_over(self) -> Sequence[ShortMachine]:
        """Return nothing: there are no spares."""
        return ()

    def close(self) -> None:
        """Do nothing: threads end with their run."""


class LocalStarter:
    """Starts workers as processes, from one fork server that stays warm."""

    near, waited = True, 0.0

    def __init__(self, program: ProgramLike, versions: Versions) -> None:
        self.program, self.versions = program, versions
        self.forks: ForkServer | None = None
        self.places: Sequence[int] | None = None
        self.packed: bytes | None = None
        self.group: LocalWorkerGroup | None = None

    def room(self, *, warm: bool = False) -> int | None:
        """Return None: this machine is there as long as the driver."""
        return None

    def start(self, options: Options) -> RemoteRun:
        """Start all workers, and the fork server too where it is lost."""
        if self.forks is not None and gone(self.forks.server):
            self.close()
        self.forks = self.forks or ForkServer()
        group = self.group = LocalWorkerGroup(self.program, options, self.forks, self.versions.files)
        group.packed, group.places = self.packed, self.places
        try:
            run = group.start()
        except OSError as error:  # the fork server went while it was asked
            group.close()
            self.close()
            raise LaunchError(
                "no process can be started",
                by="launch",
                facts={"why": f"{type(error).__name__}: {error}"},
                hint="look at what the process printed; is the machine out of memory or processes?",
            ) from error
        except BaseException as error:
            group.close()
            if isinstance(error, LaunchError):
                self.close()
            raise
        self.packed = group.packed
        return run

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on; `places`: the accelerator of each device."""
        self.program, self.versions, self.places = program, versions, places
        self.packed = getattr(program, "packed", None)  # of one that came as bytes from another process

    def expect(self, run: Recoverable, stall: float) -> None:
        """Let a run end when nothing has moved for so many seconds."""
        assert self.group is not None
        self.group.stall = stall

    def warmed(self) -> Sequence[WarmAgent]:
        """Return nothing: there are no spares."""
        return ()

    def passed_over(self) -> Sequence[ShortMachine]:
        """Return nothing: there are no spares."""
        return ()

    def close(self) -> None:
        """End the fork server."""
        if self.forks is not None:
            self.forks.close()
            self.forks = None


def versions_of(plans: Plans, on: str) -> Versions:
    """Return the memory for versions of a launcher: of this machine, or of all machines with agents."""
    if on == "ray":
        from piper.launchers.ray import RayCalls

        return AgentVersions(plans, RayCalls())
    if (world := ranks_of(on)) is not None:
        from piper.launchers.torchrun_agents import RankCalls

        return AgentVersions(plans, RankCalls(world))
    return Versions(plans)


def ranks_of(on: str) -> RankEnvironment | None:
    """Return the ranks of torchrun that `local` joins. None: there are none, or it is another launcher."""
    return rank_environment() if on == "local" else None


def starter_of(
    program: ProgramLike,
    on: str,
    versions: Versions,
    spares: int,
) -> Starter:
    """Return what starts the workers of a launcher, without importing the others."""
    match on:
        case "inline":
            return InlineStarter(program, versions)
        case "local" if isinstance(versions, AgentVersions):
            from piper.launchers.torchrun_agents import TorchrunStarter

            return TorchrunStarter(program, versions, spares)
        case "local":
            return LocalStarter(program, versions)
        case "ray":
            from piper.launchers.ray import RayStarter

            return RayStarter(program, versions, spares)
    raise AssertionError(f"{on} is checked")
