"""What starts the workers of a program, again and again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.agent_versions import ShortMachine
from piper.workers.agent_watch import WarmAgent
from piper.workers.group import WorkerGroup
from piper.workers.transport.versions import Versions


class Starter(ABC):
    """Starts the workers of a program, again and again, from what stays when workers end."""

    waited = 0.0  # seconds of the last start until every machine that it uses could fork workers

    def __init__(self, program: ProgramLike, versions: Versions | None = None) -> None:
        """Prepare for a program; `versions`: the memory for copies of its state. None: none are kept."""
        self.program, self.versions = program, versions
        self.packed: bytes | None = None  # the setup as a message, once it is made

    @property
    def near(self) -> bool:
        """Return whether all workers are on the driver's machine, and see its memory."""
        return True

    @abstractmethod
    def start(self, options: Options) -> WorkerGroup:
        """Start all workers."""

    def room(self, *, warm: bool = False) -> int | None:
        """Return for how many devices workers can be started now; `warm`: at once. None: for any number."""
        return None

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on; `places`: the accelerator of each device."""
        self.program, self.versions = program, versions
        self.packed = getattr(program, "packed", None)  # of one that came as bytes from another process

    def expect(self, group: WorkerGroup, stall: float) -> None:
        """Let workers fail when nothing has moved for so many seconds. Threads have their own timeout."""
        group.stall = stall

    def warmed(self) -> Sequence[WarmAgent]:
        """Return the spares whose agents have become warm since the last call."""
        return ()

    def passed_over(self) -> Sequence[ShortMachine]:
        """Return the spares that were not used since the last call, because they are short of memory."""
        return ()

    def close(self) -> None:  # noqa: B027  threads leave nothing
        """End what outlives workers. Idempotent."""


class GivenGroup(Starter):
    """Starts the workers of a group that was made before, once."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group.program)
        self.group = group

    def start(self, options: Options) -> WorkerGroup:
        self.group.begin()
        return self.group
