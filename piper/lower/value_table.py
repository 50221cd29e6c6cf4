"""The flow of values under construction: the names, the sizes and the writers of values."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from piper.ir.chunk import ROUTED, Chunk, Output, Phase, Source, TensorSpec
from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.ir.node import Add, Collect, Compute, Counts, Exchange, Transfer
from piper.ir.sharding import AxisPlacement
from piper.lower.placements import ChunkPlacement
from piper.lower.state import LoweringState
from piper.plan.plan import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A node that exists once per microbatch, with values that have no microbatch yet."""

    node: Compute | Counts | Exchange | Collect | Transfer | Add
    chunk: str  # it exists once per microbatch of this chunk
    phase: Phase | None = None  # it exists where the chunk has this phase; None: always


@dataclass(slots=True, kw_only=True)
class Flow:
    """The flow of values through a step, computed once per chunk: microbatches differ only in a suffix."""

    state: LoweringState
    placements: dict[str, ChunkPlacement]  # of the microbatches that this flow is of
    holders: dict[str, Devices]  # the devices that hold the parameters and buffers of each chunk
    chunks: dict[str, Chunk]
    templates: list[Template] = field(default_factory=list)
    values: dict[SlotId, Slot] = field(default_factory=dict)
    residents: dict[SlotId, Slot] = field(default_factory=dict)
    specs: dict[SlotId, TensorSpec] = field(default_factory=dict)  # of the gradients
    gradients: dict[tuple[str, int], list[tuple[ChunkPlacement, SlotId]]] = field(default_factory=dict)
    loads: dict[SlotId, tuple[AxisPlacement, ...]] = field(default_factory=dict)  # how each field is sharded

    @property
    def graph(self) -> Graph:
        return self.state.graph

    def passes_on(self, chunk: Chunk, *, backward: bool = False) -> bool:
        """Return whether a chunk does nothing but pass its inputs on or, with `backward`, its gradients."""
        if chunk.collective is not None:
            return (chunk.collective.back if backward else chunk.collective.op) == "none"
        return chunk.kind in ("route", "unroute") and self.graph.policy(chunk.name).ways == 1

    def is_routed(self, chunk: Chunk, source: Source) -> bool:
        """Return whether a value that a chunk reads lies in the order of its experts on the way to it."""
        kinds = [chunk.kind]
        while isinstance(source, Output):
            producer = self.chunks[source.chunk]
            kinds.append(producer.kind)
            if not self.passes_on(producer):
                break
            source = producer.inputs[source.index]
        return any(kind in ROUTED for kind in kinds)

    def resolve(self, source: Source, *, backward: bool = False) -> Source:
        """Return the source of a value, or of its gradient, past the chunks that only pass it on."""
        while isinstance(source, Output) and self.passes_on(self.chunks[source.chunk], backward=backward):
            source = self.chunks[source.chunk].inputs[source.index]
        return source


def output_slot(chunk: str, index: int) -> SlotId:
    """Return the slot of a chunk's output."""
    return SlotId("output", chunk, index)


def input_gradient(chunk: str, position: int) -> SlotId:
    """Return the slot of the gradient that a chunk computes for one of its inputs."""
    return SlotId("input_gradient", chunk, position)


def splits_slot(chunk: Chunk) -> SlotId:
    """Return the slot of the row counts that a route computes. Its unroute reads the same slot."""
    if chunk.kind == "route":
        return SlotId("splits", chunk.name)
    source = chunk.inputs[1]
    assert isinstance(source, Output), "an unroute takes the counts of its route"
    return SlotId("splits", source.chunk)


def slot_of(chunk: Chunk, specs: Iterable[TensorSpec]) -> Slot:
    """Return the slot of values held together. Its own bytes exclude those of shared storages."""
    specs = tuple(specs)
    shared = sorted({spec.storage for spec in specs if spec.storage >= 0})
    return Slot(
        nbytes=sum(spec.nbytes for spec in specs if spec.storage < 0),
        shares=tuple((SlotId("storage", chunk.name, i), chunk.storages[i]) for i in shared),
        dynamic=any(spec.dynamic_rows for spec in specs),
    )
