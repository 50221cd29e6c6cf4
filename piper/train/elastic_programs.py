"""The programs of an elastic job: those of fewer devices are compiled while the run trains.

They are compiled in a process of low priority that is forked from the driver, so a step does not wait for
them, and neither does a run that loses a device later.
"""

import os
import signal
import struct
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from piper.capture.compile.cache import CACHE
from piper.compiler import Program, compile
from piper.errors import ConfigError, PiperError, ScheduleError
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.job import Job, directives_for
from piper.plan.plan import Plans
from piper.run.elastic import ElasticRange, ElasticRecovery
from piper.run.recovery import Recovery
from piper.run.run import Run
from piper.runtime.batch import as_run, read_shapes, wanted_batch
from piper.runtime.setup import Code, Forward, ProgramLike, Setup, Shapes, setup_of
from piper.train.interrupt import SIGNALS
from piper.workers.messages import pack_setup, unpack_setup
from piper.workers.processes import nameless_file
from piper.workers.transport.fork_server import die_with

PRIORITY = 19  # the lowest
LENGTH = struct.Struct("=q")  # of a program, before it; 0: it is not complete
DEVICES = "devices"  # the file of a run's folder that asks for a number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class SentProgram:
    """A program that another process has compiled."""

    setup: Setup
    whole: Program  # for all devices
    size: int
    shapes: dict[Shapes, ProgramLike] = field(default_factory=dict)  # programs of other batches
    here: list[Program] = field(default_factory=list)  # the same, compiled here for what was not sent

    @property
    def job(self) -> Job:
        """Return the job with the strategy of this size."""
        return replace(self.whole.job, strategy=directives_for(self.whole.job, self.size), elastic=None)

    @property
    def plans(self) -> Plans:
        """Return the plans."""
        return self.setup.plans

    @property
    def outline(self) -> CapturedModel:
        """Return the model's chunks."""
        return self.setup.outline

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Return the tensors that the trace lifted out of the model."""
        return self.setup.constants

    @property
    def device(self) -> str:
        """Return the kind of device that it runs on."""
        return self.whole.device

    def code(self, chunk: Chunk, phase: Phase) -> Code:
        """Return the code of one phase of a chunk."""
        return self.setup.code(chunk, phase)

    def origins(self, node: str) -> list[str]:
        """Return no directives: they stay where the program was compiled."""
        return []

    def compiled(self) -> Program:
        """Return the same program, compiled in this process."""
        if not self.here:
            self.here.append(resized(self.whole, self.size))
        return self.here[0]

    def evaluation(self, batch: Mapping[str, Tensor], forward: Forward | None = None) -> ProgramLike:
        """Compile the forward of this program, to evaluate what it trains."""
        return self.compiled().evaluation(batch, forward)

    def shaped(self, batch: Mapping[str, Tensor]) -> ProgramLike:
        """Return the program that trains on batches like `batch`."""
        wanted = wanted_batch(self.setup)
        rows, first = as_run(self, batch, wanted)
        if first:
            return self
        return self.shapes.setdefault(read_shapes(rows, wanted), self.compiled().shaped(batch))


class Programs:
    """The programs of an elastic job by the number of their devices."""

    def __init__(self, program: Program) -> None:
        self.fewest, self.most = program.job.elastic or (0, 0)  # of a job that is not elastic there is one
        self.whole, self.programs = program, dict[int, ProgramLike]({self.most: program})
        self.files: dict[int, int] = {}  # of programs that another process compiles
        self.compiler: int | None = None  # the process that compiles them
        self.waiter = threading.Thread(target=self._fork, name="compiler", daemon=True)

    @property
    def sessions(self) -> Callable[..., Recovery]:
        """Return the class of the sessions of a run."""
        if self.whole.job.elastic is None:
            return Recovery
        sizes = ElasticRange(fewest=self.fewest, most=self.most, program=self.program)
        return partial(ElasticRecovery, sizes=sizes)

    def prepare(self) -> None:
        """Begin to compile the programs of fewer devices in another process, which cannot capture on CUDA."""
        if self.whole.device == "cpu" and self.fewest < self.most:
            self.files = {size: nameless_file(LENGTH.size) for size in range(self.fewest, self.most)}
            self.waiter.start()

    def _fork(self) -> None:
        """Fork the process that compiles, and wait for its end. Runs in a thread that has not computed.

        OpenMP keeps its pool of threads for each thread that uses it, and a fork of one that has a pool hangs
        when it computes. The thread waits because the system ends a process with the thread that forked it.
        """
        driver = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of any fork beside threads
            process = os.fork()
        if not process:
            self._compile(driver)
        self.compiler = process
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # its number stays taken until it is forgotten
        self.compiler = None
        os.waitpid(process, 0)

    def _compile(self, driver: int) -> NoReturn:
        """Compile all sizes, from the largest to the smallest, in a process that ends with the driver."""
        try:
            die_with(driver)
            os.setpgid(0, 0)  # Ctrl-C is for the driver
            os.nice(PRIORITY)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for size, file in sorted(self.files.items(), reverse=True):
                with suppress(PiperError):  # it is raised again when this size is asked for
                    data = pack_setup(setup_of(resized(self.whole, size)))
                    os.pwrite(file, data, LENGTH.size)
                    os.pwrite(file, LENGTH.pack(len(data)), 0)  # last: now it is complete
        except BaseException:  # noqa: BLE001  it is shown, and is the end of the process
            traceback.print_exc()
        finally:
            os._exit(0)

    def program(self, size: int) -> ProgramLike:
        """Return the program for so many devices. Compile it now, if that is not done yet."""
        if size not in self.programs:
            file = self.files.get(size)
            (length,) = (0,) if file is None else LENGTH.unpack(os.pread(file, LENGTH.size, 0))
            if file is not None and length:
                setup = unpack_setup(os.pread(file, length, LENGTH.size))
                self.programs[size] = SentProgram(setup=setup, whole=self.whole, size=size)
            else:
                self.programs[size] = resized(self.whole, size)
        return self.programs[size]

    def close(self) -> None:
        """End the process that compiles, and give the memory back."""
        if (process := self.compiler) is not None:
            os.kill(process, signal.SIGKILL)
        for file in self.files.values():
            os.close(file)
        self.files = {}


def resized(program: Program, size: int) -> Program:
    """Compile an elastic job for fewer devices than its program has. What is captured is used again."""
    job = replace(program.job, strategy=directives_for(program.job, size), elastic=None)
    return compile(
        job,
        device=program.device,
        compile=program.cache is not None,
        cache=program.cache or CACHE,
        captured=program,
    )


class SizeFile:
    """The file in a run's folder that asks for a number of devices: `echo 2 > DIR/devices`."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.path, self.say, self.seen = folder / DEVICES, say, ""

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def obey(self, run: Run) -> None:
        """Let a run go on with the number of devices that was asked for since the last look."""
        text = self._text()
        if text == self.seen or not run.sessions.elastic:
            return
        self.seen = text
        try:
            if text.isdecimal():
                run.resize(int(text))
            elif text:
                self.say(f"warning: {self.path} asks for {text!r}, which is not a number of devices")
        except (ConfigError, ScheduleError) as error:
            self.say(f"warning: {error}")
