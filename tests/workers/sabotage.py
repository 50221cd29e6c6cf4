"""Programs that go wrong in one phase of one chunk: only the workers that run it notice."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.job import Job
from piper.plan.plan import Plans
from piper.runtime.setup import Code, Forward, ProgramLike, Shapes

Act = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """Code that does something before its own work, from its second call on."""

    code: Code
    act: Act
    calls: list[None]

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        self.calls.append(None)
        if len(self.calls) > 1:
            self.act()
        return self.code(*arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotaged:
    """A program with a trap in one phase of one chunk."""

    program: ProgramLike
    arg: str  # "F PP=1"
    act: Act

    @property
    def job(self) -> Job:
        return self.program.job

    @property
    def plans(self) -> Plans:
        return self.program.plans

    @property
    def outline(self) -> CapturedModel:
        return self.program.outline

    @property
    def constants(self) -> Mapping[str, Tensor]:
        return self.program.constants

    @property
    def device(self) -> str:
        return self.program.device

    def code(self, chunk: Chunk, phase: Phase) -> Code:
        code = self.program.code(chunk, phase)
        return Trap(code=code, act=self.act, calls=[]) if f"{phase} {chunk.name}" == self.arg else code

    def origins(self, node: str) -> list[str]:
        return self.program.origins(node)

    def evaluation(self, batch: Mapping[str, Tensor], forward: Forward | None = None) -> ProgramLike:
        return self.program.evaluation(batch, forward)

    @property
    def shapes(self) -> Mapping[Shapes, ProgramLike]:
        return self.program.shapes

    def shaped(self, batch: Mapping[str, Tensor]) -> ProgramLike:
        return self.program.shaped(batch)


class BrokenError(Exception):
    """What a trap raises: a class of the user's own, which the driver need not know."""


def fail() -> None:
    raise BrokenError("the glass is broken")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # the signal may take a moment, in which the work must not go on


def sleep() -> None:
    time.sleep(600)


def mute() -> None:
    """Lose all that this process sends from now on."""
    from piper.runtime.comm.gloo import GlooPipe

    GlooPipe.send = lambda *_: None  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOnce:
    """Sleeps for long, but only the first time, in whatever process."""

    path: Path  # is made then

    def __call__(self) -> None:
        if not self.path.exists():
            self.path.touch()
            sleep()
