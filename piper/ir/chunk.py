"""The captured model as the compiler sees it: chunks, their values, and what each phase reads and writes.

Pure data. A chunk is a piece of the captured graph that runs as a unit; its code stays with capture and is
found by `Chunk.key` at run time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from piper.ir.ids import PHASES as PHASES
from piper.ir.ids import Phase as Phase
from piper.ir.ids import SlotKind
from piper.ir.ids import Tags as Tags
from piper.ir.sharding import AxisPlacement, Shard
from piper.ir.sharding import Collective as Collective
from piper.ir.sharding import CollectiveOp as CollectiveOp

KernelKind = Literal["product", "attention", "traffic"]  # traffic: all that only moves memory
ChunkKind = Literal["compute", "expert", "route", "unroute", "collective"]
ROUTED: tuple[ChunkKind, ...] = ("route", "expert", "unroute")  # chunks of an expert region


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One value: its shape, its type and the storage it lives in."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without the module: "float32", "bfloat16", "int64"
    nbytes: int
    storage: int = -1  # index into the chunk's storages; -1: a storage of its own
    dynamic_rows: bool = False  # the first axis depends on routing; `shape` then holds the balanced size


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """An input that comes from the batch."""

    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An input that another chunk produced."""

    chunk: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """An input that never changes: a tensor the trace created or lifted."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPosition:
    """An input that is the position of a device in its group along an axis, from 0."""

    axis: str
    on_host: bool = False  # in memory of the host: it decides what runs


Source = Batch | Output | Constant | AxisPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An operation of a phase, or several that a compiler fuses: what it computes and moves.

    Capture lists them in the order in which they run, so those of two microbatch sizes pair up. Where order
    does not matter, equal ones are listed once with their `count`.
    """

    kind: KernelKind
    dtype: str  # of the values that it computes with
    flops: int = 0
    nbytes: int = 0  # read from memory and written to it
    count: int = 1
    shape: tuple[int, ...] = ()
    # ^ of a product: how many, rows, columns, depth; of attention: heads, queries, keys, width


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpec:
    """The values that one phase of a chunk reads and writes: the arguments and results of its code, in order.

    Reads: inputs, params, buffers, saved, carried, tangents.
    Writes: F: outputs, saved, mutated buffers. B: grad_inputs, grad_params. BI: grad_inputs, all of
    Chunk.carried. BW: grad_params.
    """

    inputs: tuple[int, ...] = ()  # indices into Chunk.inputs
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()  # indices into Chunk.saved
    carried: tuple[int, ...] = ()  # indices into Chunk.carried: what BW reads of it
    tangents: tuple[int, ...] = ()  # indices into Chunk.outputs: whose gradient is read
    grad_inputs: tuple[int, ...] = ()  # indices into Chunk.inputs: whose gradient is written
    grad_params: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()  # of grad_params: those that are written into memory the caller gives
    flops: int = 0
    bytes_moved: int = 0  # memory traffic, for the cost estimate
    workspace: int = 0  # bytes live only while the phase runs, less what it frees before its last results
    kernels: tuple[Kernel, ...] = field(default=(), compare=False)  # an estimate of what it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A captured piece of the model that runs as a unit."""

    name: str  # "PP=0", "PP=0 #1" for a second piece of the same region, "PP=0 EP=2"
    tags: Tags
    kind: ChunkKind = "compute"
    key: str = ""  # structural hash: chunks with one key share their code
    inputs: tuple[Source, ...] = ()
    input_specs: tuple[TensorSpec, ...] = ()
    params: tuple[str, ...] = ()  # what F reads, in call order
    buffers: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()  # buffers F writes back
    fixed: tuple[int, ...] = ()  # outputs that are the same for all samples
    outputs: tuple[TensorSpec, ...] = ()
    saved: tuple[TensorSpec, ...] = ()  # F writes, B / BI / BW read; never parameters or inputs
    carried: tuple[TensorSpec, ...] = ()
    storages: tuple[int, ...] = ()  # bytes of each storage that several of outputs and saved share
    kept_inputs: Mapping[Phase, tuple[int, ...]] = field(default_factory=dict)
    # ^ inputs whose storage a backward phase still uses through a saved view, though it does not read them
    phases: Mapping[Phase, PhaseSpec] = field(default_factory=dict)  # no "B": nothing to differentiate
    random: bool = False  # F draws random numbers
    products: tuple[str, ...] = ()  # weights of linear layers whose products may run in a narrower type
    rowwise: tuple[str, ...] = ()  # those among them that are stored [out, in] and multiplied as they are
    precision: str = ""  # of these products: "fp8", or empty for the job's
    experts: int = 0  # expert, route and unroute: how many experts in all, before sharding
    own_rows: tuple[str, ...] = ()  # of a route: axes along which each device routes rows of its own
    collective: Collective | None = None  # of a chunk of that kind

    @property
    def has_code(self) -> bool:
        """Return whether this chunk computes anything; others only send values."""
        return self.kind in ("compute", "expert")

    @property
    def sources(self) -> list[Output]:
        """Return the inputs that other chunks produce."""
        return [source for source in self.inputs if isinstance(source, Output)]

    @property
    def drawer(self) -> str:
        """Return who draws its random numbers: a region, whose pieces run in order, or a chunk of experts."""
        return f"{self.name} expert" if self.kind == "expert" else region_name(self.tags)


def region_name(tags: Tags) -> str:
    """Return how names of chunks begin."""
    return " ".join(f"{tag}={index}" for tag, index in tags) or "all"


def bundles(chunk: Chunk) -> dict[SlotKind, list[int]]:
    """Return the saved values in two bundles. Those that the weight gradients need live longer."""
    late = set(chunk.phases["BW"].saved) if "BW" in chunk.phases else set()
    early = [i for i in range(len(chunk.saved)) if i not in late]
    both: tuple[tuple[SlotKind, list[int]], ...] = (("saved", early), ("kept", sorted(late)))
    return {kind: members for kind, members in both if members}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the model. A tied parameter occurs once."""

    name: str  # its first fully qualified name
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # the other names of a tied parameter
    placements: tuple[AxisPlacement, ...] = ()  # by axis, the innermost first

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the slice of this parameter that one device holds, before ZeRO."""
        sizes = list(self.shape)
        for held in self.placements:
            if isinstance(held.placement, Shard):
                sizes[held.placement.dim] //= held.degree
        return tuple(sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    persistent: bool = True  # a state_dict has it, under at least one name
    names: tuple[str, ...] = ()  # of a tied one: every name that a state_dict has

    @property
    def saved_as(self) -> tuple[str, ...]:
        """Return every name of this buffer in the model's own state_dict."""
        return self.names or ((self.name,) if self.persistent else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A captured model: chunks in a topological order, and the state they use."""

    chunks: tuple[Chunk, ...]
    loss: Output
    weight: Output | None = None  # of a (sum, weight) loss
    metrics: Output | None = None  # the sum and the weight of each metric, one after another in one tensor
    metric_names: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    batch: Mapping[str, TensorSpec] = field(default_factory=dict)  # one slice, as captured
    rows: int = 1  # samples in the captured slice
    degrees: Mapping[Tags, int] = field(default_factory=dict)  # of regions: devices that share samples
    empty: Mapping[tuple[str, int], str] = field(default_factory=dict)  # regions without operations: lines

    @property
    def reached(self) -> set[str]:
        """Return the parameters that a backward reaches; before differentiation, all that are trained."""
        if not any(chunk.phases for chunk in self.chunks):
            return {parameter.name for parameter in self.parameters if parameter.trainable}
        backwards = (chunk.phases["B"] for chunk in self.chunks if "B" in chunk.phases)
        return {name for phase in backwards for name in phase.grad_params}

    def degree(self, chunk: Chunk) -> int:
        """Return the number of neighbouring devices that share the samples of a chunk."""
        return self.degrees.get(chunk.tags, 1)
