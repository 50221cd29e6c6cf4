"""The kinds of nodes in a training step. Frozen, closed, and named by their content.

Directives see only `Compute`. Lowering adds the rest and fills in what each node reads and writes; values are
named by content too, so errors, plans, traces and tests all say the same thing.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from piper.ir.devices import Devices, show
from piper.ir.ids import AGAIN, Pass, Phase, SlotId, Tags, show_part
from piper.ir.mesh import Axis
from piper.ir.sharding import Collective

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run one phase of one chunk on one microbatch."""

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
        """Return the pass of this node."""
        return Pass(phase=self.phase, chunk=self.chunk, part=self.part, again=self.again)


def compute_name(chunk: str, phase: Phase | Literal["R"], part: Tags) -> str:
    """Return the name of a compute node. A recomputed forward has an R in place of its F."""
    return f"{phase}[{chunk}{show_part(part)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNode:
    """The fields of every node but `Compute`, which directives place, and `Transfer`, which has two sets."""

    devices: Devices
    reads: tuple[SlotId, ...] = ()
    writes: tuple[SlotId, ...] = ()
    stream: str = COMPUTE_STREAM
    origin: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Send a value from one set of devices to another. It becomes a send and a receive in the plan."""

    value: SlotId
    source: Devices
    target: Devices
    reads: tuple[SlotId, ...]
    writes: tuple[SlotId, ...]
    stream: str = ""  # "pp": pp.send and pp.recv; empty: send and recv
    sliced: bool = True  # the first axis is the samples; else every receiver gets the whole value
    degrees: tuple[int, int] = (1, 1)  # neighbours that share their samples, at the source and the target
    origin: tuple[int, ...] = ()
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        name = f"transfer[{self.value} @{show(self.source)} -> @{show(self.target)}]"
        object.__setattr__(self, "name", name)

    @property
    def devices(self) -> Devices:
        return tuple(dict.fromkeys((*self.source, *self.target)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNode(StepNode):
    """A node that is one instruction on each of its devices, given by its slots, its peers and its payload.

    A rewrite that adds its own kind of node derives the class next to itself, and lowering takes it as it is.
    """

    op: ClassVar[str]  # its operation, one of `plan/ops.py`

    about: str = ""  # a bucket, or what else it is about
    groups: tuple[Devices, ...] = ()  # that communicate. Empty: it has no peers
    nbytes: int = 0  # that it moves to or from the host, or to its peers
    workspace: int = 0  # bytes that it needs in addition to its slots
    payload: object = None  # what its operation needs beyond its slots, also of `plan/ops.py`

    @property
    def name(self) -> str:
        return f"{self.op}[{self.about}{self.about and ' '}@{show(self.devices)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(SlotNode):
    """Load one field of the batch, for one microbatch, on the devices that read it."""

    op = "load"

    stream: str = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(SlotNode):
    """Sum two gradients of one value that came from two of its readers."""

    op = "add"

    value: SlotId

    @property
    def name(self) -> str:
        return f"add[{self.writes[0]}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionNode(StepNode):
    """A node that communicates inside a region, within groups of its devices along an axis."""

    run: Pass  # of a route, an unroute or a collective: F, B or BI
    axis: Axis
    stream: str

    @property
    def name(self) -> str:
        return compute_name(self.run.chunk, self.run.phase, self.run.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts(RegionNode):
    """Send each device of an expert group the number of rows it will get from each. The host waits for it."""

    @property
    def name(self) -> str:
        return f"counts[{self.run.chunk}{show_part(self.run.part)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(RegionNode):
    """Send rows to the devices of their experts, or back: an all-to-all with uneven counts."""

    outward: bool  # to the experts; else back to the rows' owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(RegionNode):
    """Run a collective that changes the layout of a sharded value, or of its gradient, within each group."""

    how: Collective  # of this phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(SlotNode):
    """All-gather a bucket's sharded parameters, for a run of uses or after an update."""

    op = "gather"

    @property
    def name(self) -> str:
        return f"gather[{self.about}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(StepNode):
    """Add one backward's weight gradients, or one microbatch's loss, to the sum of the step."""

    run: Pass  # whose results are added
    some: bool = False  # other devices begin the sum where these add to it, or the other way round

    @property
    def name(self) -> str:
        some = f" @{show(self.devices)}" if self.some else ""
        return f"accumulate[{self.run} into {self.writes[0]}{some}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(StepNode):
    """Sum a bucket's gradients over some of its devices, each of which may keep only its shard of the sum."""

    bucket: str
    run: Pass | None  # the last backward it covers; None: it sums the copies of a tied parameter
    among: str = ""  # which of the bucket's reductions
    stream: str

    @property
    def name(self) -> str:
        return f"reduce[{self.bucket}{self.among and ' '}{self.among} after {self.run or 'tied'}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(SlotNode):
    """Square and sum the gradients of a device. Over all devices, each parameter counts once."""

    op = "norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Total(SlotNode):
    """Sum the norms, losses and weights over all devices, so that every device has the step's result."""

    op = "total"

    stream: str = "reduce"

    @property
    def name(self) -> str:
        return "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(SlotNode):
    """Step the optimizer over the parameters, or shards, that live on these devices.

    It is about a bucket where others of these devices are updated by themselves.
    """

    op = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(SlotNode):
    """Broadcast the first replica's buffers to the others. Buffers of sharded experts are never written."""

    op = "broadcast"

    stream: str = "reduce"

    @property
    def name(self) -> str:
        return f"broadcast[{self.about}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror(StepNode):
    """Give the copies of each device's state to the next device of its group, around the end."""

    groups: tuple[Devices, ...]
    reads: tuple[SlotId, ...]  # of which a device has some
    stream: str

    @property
    def name(self) -> str:
        return f"mirror[@{show(self.devices)}]"


Node = Compute | Transfer | SlotNode | Counts | Exchange | Collect | Accumulate | Reduce | Mirror
