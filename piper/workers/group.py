"""The workers of a program from their start to their end, how a driver asks them, and what starts them."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from torch import Tensor

from piper.checkpoint.bucket_spans import held_names
from piper.runtime.recorders import ClockOffset
from piper.runtime.setup import ProgramLike, Setup
from piper.runtime.worker import Options
from piper.workers.agent_versions import ShortMachine
from piper.workers.blame import Failure, JobSnapshot
from piper.workers.processes import ProcessStatus
from piper.workers.serve import WorkerAnswers
from piper.workers.transport.versions import Versions

A = TypeVar("A")
R = TypeVar("R")


class WorkerGroup(ABC):
    """The workers of a program, one for each device."""

    leaving = False  # whether the system has asked a worker to end
    versions: object = None  # the memory in which workers keep copies of their state, if they do
    in_order = False  # a call that fails leaves no answers behind, so the next call gets its own
    unread: dict[str, Tensor]  # the initial parameters and buffers that no worker holds

    def __init__(self, program: ProgramLike, options: Options) -> None:
        self.program, self.options = program, options
        self.current = program  # what workers run now
        self.devices: Sequence[int] = program.plans.devices
        self.failures: list[Failure] = []  # that workers have reported
        self.stall = options.timeout  # seconds without any progress after which the job has stalled

    def begin(self) -> None:
        """Start all workers, or none."""
        try:
            self.unread = self.start()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def start(self) -> dict[str, Tensor]:
        """Start all workers. Return the initial parameters and buffers that no worker holds."""

    def snapshot(self, statuses: Mapping[int, ProcessStatus], timeout: float) -> JobSnapshot:
        """Return the state of the job; `timeout`: the seconds after which a wait is a failure."""
        return JobSnapshot(
            plans=self.current.plans,
            origins=self.current.origins,
            timeout=timeout,
            statuses=statuses,
            failures=self.failures,
        )

    @abstractmethod
    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        """Call a method of workers, each with its argument. After a WorkerError none can be asked."""

    @abstractmethod
    def prepare(self, number: int, setup: Setup, buffers: Mapping[str, Tensor], *, trains: bool) -> None:
        """Give all workers another program, and the values of buffers that only this program reads."""

    @contextmanager
    def running(self, program: ProgramLike) -> Iterator[None]:
        """Take note inside the block that workers run another program than the one they train with."""
        self.current = program
        try:
            yield
        finally:
            self.current = self.program

    def sharing(self, step: int) -> AbstractContextManager[None]:
        """Let all workers reach the versions of a step inside the block, wherever they lie."""
        return nullcontext()

    def clock(self, device: int) -> ClockOffset:
        """Compare the clock of a worker with that of the driver. Threads have the same."""
        return ClockOffset(offset=0.0, error=0.0)

    @abstractmethod
    def close(self) -> None:
        """End every worker. Idempotent."""


def unread_values(program: ProgramLike, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the initial values of parameters and buffers that no device holds. They never change."""
    on_devices = held_names(program.plans)
    return {name: value.clone() for name, value in values.items() if name not in on_devices}


class Starter:
    """Starts the workers of a program again and again, from what stays when workers end. This starts none."""

    waited = 0.0  # seconds of the last start until every machine that it uses could fork workers
    places: Sequence[int] | None = None  # the accelerator of each device. None: in their order

    def __init__(self, program: ProgramLike, versions: Versions | None = None) -> None:
        """Prepare for a program; `versions`: the memory for copies of its state. None: none are kept."""
        self.program, self.versions = program, versions
        self.packed: bytes | None = None  # the setup as a message, once it is made
        # What is not yet reported: spares that have imported torch, with their seconds, and spares unused.
        self.warmed: deque[tuple[str, float]] = deque()
        self.passed_over: deque[ShortMachine] = deque()

    @property
    def near(self) -> bool:
        """Return whether all workers are on the driver's machine, and see its memory."""
        return True

    def start(self, options: Options) -> WorkerGroup:
        """Start all workers."""
        raise AssertionError("its only device runs in this process")

    def room(self, *, warm: bool = False) -> int | None:
        """Return for how many devices workers can be started now; `warm`: at once. None: for any number."""
        return None

    def notice(self) -> None:
        """Note which spares have become warm. It is called between steps."""

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on; `places`: the accelerator of each device."""
        self.program, self.versions, self.places = program, versions, places
        self.packed = None

    def expect(self, group: WorkerGroup, stall: float) -> None:
        """Let workers fail when nothing has moved for so many seconds. Threads have their own timeout."""
        group.stall = stall

    def close(self) -> None:
        """End what outlives workers. Idempotent."""
