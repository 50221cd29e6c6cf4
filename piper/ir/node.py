"""The kinds of nodes in a training step. Frozen, closed, and named by their content.

Directives see only `Compute`. Lowering adds the rest and fills in what each node reads and writes; values are
named by content too, so errors, plans, traces and tests all say the same thing.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from piper.ir.devices import Devices
from piper.ir.ids import AGAIN, Pass, Phase, SlotId, Tags, show_part

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run one phase of one chunk on one microbatch."""

    op: ClassVar[str] = "compute"

    chunk: str
    phase: Phase
    part: Tags = ()
    devices: Devices = ()  # empty until placed
    stream: str = COMPUTE_STREAM
    origin: tuple[int, ...] = ()  # the directives that made it what it is, by number
    reads: tuple[SlotId, ...] = ()
    writes: tuple[SlotId, ...] = ()
    keeps: tuple[SlotId, ...] = ()  # values it does not read but whose storage it still uses
    again: bool = False  # a forward that is recomputed for the backwards of its region
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        name = compute_name(self.chunk, AGAIN if self.again else self.phase, self.part)
        object.__setattr__(self, "name", name)

    @property
    def run(self) -> Pass:
        return Pass(phase=self.phase, chunk=self.chunk, part=self.part, again=self.again)


def compute_name(chunk: str, phase: Phase | Literal["R"], part: Tags) -> str:
    """Return the name of a compute node. A recomputed forward has an R in place of its F."""
    return f"{phase}[{chunk}{show_part(part)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNode:
    """Run one instruction on each of some devices, given by its slots, its peers and its payload."""

    op: str  # its operation, one of `plan/ops.py`
    name: str
    devices: Devices
    reads: tuple[SlotId, ...] = ()
    writes: tuple[SlotId, ...] = ()
    stream: str = COMPUTE_STREAM
    origin: tuple[int, ...] = ()
    groups: tuple[Devices, ...] = ()  # that communicate. Empty: it has no peers
    nbytes: int = 0  # that it moves to or from the host, or to its peers
    workspace: int = 0  # bytes that it needs in addition to its slots
    payload: object = None  # what its operation needs beyond its slots, also of `plan/ops.py`


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(SlotNode):
    """Send a value from one set of devices to another. It becomes a send and a receive in the plan."""

    op: str = "transfer"
    stream: str = ""  # "pp": pp.send and pp.recv; empty: send and recv
    source: Devices
    target: Devices
    sliced: bool = True  # the first axis is the samples; else every receiver gets the whole value
    degrees: tuple[int, int] = (1, 1)  # neighbours that share their samples, at the source and the target


Node = Compute | SlotNode
