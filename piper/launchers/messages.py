"""The messages between a driver and its workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from piper.launchers.base import Resumed, StepResult
from piper.launchers.excerpt import BatchSlice
from piper.launchers.persist import Done
from piper.launchers.processes import SharedFile
from piper.launchers.transport.serialize import Codec
from piper.launchers.transport.shared_memory import TensorEntry
from piper.launchers.watch import Failure
from piper.plan.divided import Share
from piper.runtime.record import Clock, Recording
from piper.runtime.worker import Options, Sums

PATIENCE = 120.0  # seconds that workers may take to find each other: some start late
Asked = Literal["owned", "gradients", "reached", "buffers", "trail", "record", "clock"]
Call = Literal["step", "save", "load", "poll"] | Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the workers of a job find each other."""

    host: str  # of the store
    port: int
    address: str  # that this worker listens on


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is given at its start."""

    device: int
    local: int  # which of its machine's accelerators it uses, where the job uses any
    meeting: StoreAddress
    options: Options
    setup: bytes
    shares: bool = False  # its accelerator serves other workers too


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """Where a worker of this machine finds what is shared."""

    values: Mapping[str, TensorEntry]
    devices: tuple[int, ...]
    width: int
    path: tuple[str, ...]  # where modules are imported from


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a rank says of itself when it comes in."""

    process: int
    address: str
    local: int
    marks: SharedFile
    listens: bool  # it wants to know what the run gives


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """What a rank is given: its device, and the first values of all parameters."""

    order: Assignment
    values: Mapping[str, TensorEntry]
    shared: SharedFile | None  # where they lie on this machine
    memory: Tensor | None  # or they themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZeroResult:
    """What a method of the run gave on rank 0, so that it gives the same on the others."""

    method: str
    value: object = None
    error: str | None = None  # the class of what it raised instead, its text, and what was noted of it
    text: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign that a worker which is still at work on a call lives."""


CODEC = Codec(
    (
        Heartbeat,
        Clock,
        Done,
        BatchSlice,
        Failure,
        RankInfo,
        Assignment,
        SharedState,
        Recording,
        Resumed,
        Share,
        StepResult,
        Sums,
        RankZeroResult,
        RankAssignment,
    )
)
