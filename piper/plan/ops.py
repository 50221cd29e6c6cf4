"""The operations of plans, a record each, for the compiler, the proof, runtimes, the simulator and pages."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

from piper.ir.devices import Devices
from piper.ir.ids import Pass, Tags
from piper.ir.mesh import Axis
from piper.ir.sharding import Collective, CollectiveOp, Sharding

Op = Literal[
    "load",  # a field of the batch into a slot
    "compute",  # one phase of a chunk
    "send",
    "recv",
    "copy",  # a value under another name, where a transfer begins and ends on one device
    "concat",  # pieces of a value, joined along the samples
    "add",
    "counts",  # how many rows go where
    "exchange",  # an all-to-all of rows
    "collect",  # a collective inside a sharded region
    "shift",  # as which a collective travels that gives a value to the next device of a ring
    "slice",  # a device's own part of a value that its group holds
    "gather",  # a bucket's shards into the whole
    "accumulate",
    "all_reduce",
    "reduce_scatter",
    "reshard",  # slices of gradients into full tensors on the devices that update these, or parameters back
    "norm",
    "total",
    "update",
    "average",  # what a device trains of a bucket, with its counterparts in groups that train apart
    "merge",  # an average that has travelled behind other steps, into the parameters
    "broadcast",
    "protect",  # a part of the state into memory that outlives workers
    "mirror",  # such copies to another machine or device
    "offload",  # values of a step into memory of the host
    "fetch",  # such values back to the device
]
Pattern = Literal["alone", "pair", "direct", "neighbour", "ring", "ring twice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The payload of a load: the batch field, the microbatch, and the devices that share the samples."""

    name: str = field(metadata={"key": "field"})  # as its line calls it
    part: Tags = ()
    devices: Devices = ()
    degree: int = 1  # how many neighbours share their samples
    slices: tuple[Sharding, ...] = ()  # of the field, where its other dimensions are sharded

    def slice_of(self, device: int) -> tuple[int, int]:
        """Return which slice of the samples a device loads, and of how many."""
        return self.devices.index(device) // self.degree, len(self.devices) // self.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The payload of a send or a copy of some rows: from `start` to `stop`, out of `of` equal parts."""

    start: int
    stop: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPass:
    """The payload of what is done for one pass of a chunk."""

    run: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(OfPass):
    """The payload of counts or an exchange of rows: the pass, and whether rows go to the experts or back."""

    outward: bool = True
    rows: int = 0  # that each device sends, where they travel in blocks
    block: int = 0  # rows from each device to each. 0: as many as are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting(OfPass):
    """The payload of a collective inside a region: the pass, and the collective of each group."""

    how: Collective
    devices: Devices = ()  # of a slice, which has no communicator: the set, and
    stride: int = 1  # how far apart in it the devices of a group lie

    @property
    def axis(self) -> Axis:
        """Return the axis along which the groups of a slice lie."""
        return Axis(degree=self.how.degree, stride=self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfBucket:
    """The payload of a gather or a reduction: a bucket, and the first pass to read it or last to write."""

    bucket: str
    run: Pass | None = None  # None: once a step


@dataclass(frozen=True, slots=True, kw_only=True)
class OfChunk:
    """The payload of a broadcast: the chunk whose buffers are broadcast."""

    chunk: str


Payload = Pass | Field | Rows | Routing | Collecting | OfBucket | OfChunk | None


@dataclass(frozen=True, slots=True)
class Operation:
    """The properties that all instructions of one operation share."""

    op: Op
    label: str  # in words
    pattern: Pattern = "alone"  # direct: every pair by itself; neighbour: each with the next
    _: KW_ONLY
    short: str = ""  # in a narrow bar; default: the label
    payload: type | None = None  # what it needs beyond its slots. None: nothing
    may_be_alone: bool = False  # it communicates, but may have no peers
    agrees_on_size: bool = False  # members move equally many bytes
    sends: bool = True  # it communicates, and bytes leave the device
    receives: bool = True
    unchanged: bool = False  # it writes the value that it reads, or some rows of it: the proof needs no rule
    hands_on: bool = False  # it only passes values on, as far as the passes of a pipeline are concerned
    outward: bool = False  # it keeps the way out of a device busy, rather than the way in
    host: bool = False  # it copies between the device and memory of the host
    needs_nothing: bool = False  # nothing of its own device comes before it

    @property
    def communicates(self) -> bool:
        """Return whether several devices take part."""
        return self.pattern != "alone"

    @property
    def takes(self) -> Literal["device", "copy engine", "network"]:
        """Return what it keeps busy."""
        if self.communicates:
            return "network"
        return "copy engine" if self.host or self.op == "load" else "device"

    @property
    def takes_time(self) -> bool:
        """Return whether a stream that begins it has work to do meanwhile."""
        return self.takes != "device" or self.op == "compute"

    @property
    def direct(self) -> bool:
        """Return whether every pair of members communicates directly, rather than all of them in a ring."""
        return self.pattern in ("pair", "direct")

    @property
    def name(self) -> str:
        """Return the name of what the members do together: send and receive are both a transfer."""
        return "transfer" if self.pattern == "pair" else self.op

    @property
    def caption(self) -> str:
        """Return the shortest label of the operation."""
        return self.short or self.label


_ALL = (
    Operation("load", "load", payload=Field, needs_nothing=True),
    Operation("compute", "compute", payload=Pass),
    Operation("send", "send", "pair", payload=Rows, agrees_on_size=True, receives=False, outward=True),
    Operation("recv", "receive", "pair", agrees_on_size=True, sends=False, needs_nothing=True),
    Operation("copy", "copy", payload=Rows, unchanged=True, hands_on=True),
    Operation("concat", "join", hands_on=True),
    Operation("add", "add", hands_on=True),
    Operation("counts", "counts", "direct", payload=Routing, hands_on=True),
    Operation("exchange", "all-to-all", "direct", payload=Routing, hands_on=True),
    Operation("collect", "collective", "ring", payload=Collecting, agrees_on_size=True, hands_on=True),
    Operation("shift", "shift", "neighbour", agrees_on_size=True, hands_on=True, outward=True),
    Operation("slice", "slice", payload=Collecting, hands_on=True),
    Operation("gather", "gather", "ring", payload=OfBucket, agrees_on_size=True, needs_nothing=True),
    Operation("accumulate", "accumulate", short="sum", payload=Pass),
    Operation(
        "all_reduce", "all-reduce", "ring twice", short="reduce", payload=OfBucket, agrees_on_size=True
    ),
    Operation(
        "reduce_scatter", "reduce-scatter", "ring",
        short="reduce", payload=OfBucket, agrees_on_size=True, outward=True,
    ),
    Operation("reshard", "reshard", "direct", payload=OfBucket, agrees_on_size=True),
    Operation("norm", "norm"),
    Operation("total", "total", "ring twice", may_be_alone=True),
    Operation("update", "update"),
    Operation("average", "average", "ring twice", agrees_on_size=True),
    Operation("merge", "merge"),
    Operation("broadcast", "broadcast", "ring", payload=OfChunk, may_be_alone=True),
    Operation("protect", "protect", host=True, needs_nothing=True, outward=True),
    Operation("mirror", "mirror", "neighbour", outward=True),
    Operation("offload", "offload", host=True, hands_on=True, outward=True),
    Operation("fetch", "fetch", host=True, hands_on=True),
)  # fmt: skip
TRAVELS: Mapping[CollectiveOp, Op] = {  # as which operation each collective travels
    "all_gather": "gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "max": "all_reduce",
    "all_to_all": "exchange",
    "shift": "shift",
    "shift_back": "shift",
}
OPS: Mapping[Op, Operation] = {operation.op: operation for operation in _ALL}
assert tuple(OPS) == get_args(Op), "every op has its record"
PAYLOADS: Mapping[Op, type] = {op: each.payload for op, each in OPS.items() if each.payload is not None}
COMMUNICATION = frozenset(op for op, operation in OPS.items() if operation.communicates)
REDUCES = "Sum a bucket's gradients over some of its devices, each of which may keep only its shard."
DOES: Mapping[str, str] = {  # in a sentence: the operations of nodes
    "compute": "Run one phase of one chunk on one microbatch.",
    "transfer": "Send a value from one set of devices to another: a send and a receive in the plan.",
    "load": "Load one field of the batch, for one microbatch, on the devices that read it.",
    "add": "Sum two gradients of one value that came from two of its readers.",
    "counts": "Send each device of an expert group the number of rows it will get from each.",
    "exchange": "Send rows to the devices of their experts, or back: an all-to-all with uneven counts.",
    "collect": "Run a collective that changes the layout of a sharded value, or of its gradient.",
    "slice": "Keep a device's own slice of a value that its group holds.",
    "gather": "All-gather a bucket's sharded parameters, for a run of uses or after an update.",
    "accumulate": "Add one backward's weight gradients, or one microbatch's loss, to the sum of the step.",
    "all_reduce": REDUCES,
    "reduce_scatter": REDUCES,
    "reshard": "Give slices of gradients to devices that update parameters in full, or slices of these back.",
    "norm": "Square and sum the gradients of a device. Over all devices, each parameter counts once.",
    "total": "Sum the norms, losses and weights over all devices, so that every device has the result.",
    "update": "Step the optimizer over the parameters, or shards, that live on these devices.",
    "average": "Average what a device trains of a bucket with its counterparts in other groups, when due.",
    "merge": "Merge an average that has travelled behind other steps, and begin the next, when due.",
    "broadcast": "Broadcast the first replica's buffers to the others.",
    "protect": "Copy a part of the state into memory that outlives workers.",
    "mirror": "Give the copies of each device's state to the next device of its group, around the end.",
    "offload": "Copy values to memory of the host, which frees their memory on the device.",
    "fetch": "Copy values from memory of the host back to the device, ahead of their next use.",
}
BY_HOST: Mapping[Op, str] = {  # why the host takes part in every step, so that none with these is one graph
    "average": "the host says in every step whether groups average",
    "protect": "the host says in every step where the copies go",
    "offload": "the host lends its memory to one copy after another",
}
