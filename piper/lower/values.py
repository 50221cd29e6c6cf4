"""The flow of values under construction: what values are called, how large they are, and who makes them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from piper.ids import SlotId
from piper.ir.chunk import Chunk, Output, Phase, Source, TensorSpec
from piper.ir.graph import Graph
from piper.ir.node import Add, Collect, Compute, Counts, Exchange, Transfer
from piper.lower.buckets import Home
from piper.lower.work import Work
from piper.plan.plan import Slot

SEED = SlotId("seed")  # the gradient that each part's loss starts from


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A node of every microbatch, with its values still those of none."""

    node: Compute | Counts | Exchange | Collect | Transfer | Add
    chunk: str  # whose parts it follows
    phase: Phase | None = None  # it exists where the chunk has this phase; none: always


@dataclass(slots=True, kw_only=True)
class Flow:
    """The flow of values through a step, worked out once per chunk: parts differ only in a suffix."""

    work: Work
    homes: dict[str, Home]
    chunks: dict[str, Chunk]
    templates: list[Template] = field(default_factory=list)
    values: dict[SlotId, Slot] = field(default_factory=dict)
    residents: dict[SlotId, Slot] = field(default_factory=dict)
    specs: dict[SlotId, TensorSpec] = field(default_factory=dict)  # of the gradients
    gradients: dict[tuple[str, int], list[tuple[Home, SlotId]]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.work.graph

    def passes_on(self, chunk: Chunk, *, backward: bool = False) -> bool:
        """Return whether a chunk moves nothing: its outputs are its inputs; backward, its gradients."""
        if chunk.collective is not None:
            return (chunk.collective.back if backward else chunk.collective.op) == "none"
        return chunk.kind in ("route", "unroute") and self.graph.policy(chunk.name).ways == 1

    def resolve(self, source: Source, *, backward: bool = False) -> Source:
        """Return the chunk that makes a value, or gets its gradient, past the chunks that only pass it on."""
        while isinstance(source, Output) and self.passes_on(self.chunks[source.chunk], backward=backward):
            source = self.chunks[source.chunk].inputs[source.index]
        return source


def output_slot(chunk: str, index: int) -> SlotId:
    """The slot of a chunk's output."""
    return SlotId("output", chunk, index)


def input_gradient(chunk: str, position: int) -> SlotId:
    """The slot of the gradient that a chunk gives for one of its inputs."""
    return SlotId("input_gradient", chunk, position)


def buffer_slot(name: str) -> SlotId:
    """The slot of a buffer of the model."""
    return SlotId("buffer", name)


def gradient_slot(bucket: str, readers: tuple[str, ...], chunk: str) -> SlotId:
    """The slot of the gradients that one backward of a chunk gives for a bucket."""
    return SlotId("gradient", bucket, reader=chunk if len(readers) > 1 else "")


def splits_slot(chunk: Chunk) -> SlotId:
    """The slot that says how many rows go where: made by the route, used by its unroute too."""
    if chunk.kind == "route":
        return SlotId("splits", chunk.name)
    source = chunk.inputs[1]
    assert isinstance(source, Output), "an unroute takes the counts of its route"
    return SlotId("splits", source.chunk)


def slot_of(chunk: Chunk, specs: Iterable[TensorSpec]) -> Slot:
    """The bytes of values held together, those of shared storages apart."""
    specs = tuple(specs)
    shared = sorted({spec.storage for spec in specs if spec.storage >= 0})
    return Slot(
        nbytes=sum(spec.nbytes for spec in specs if spec.storage < 0),
        shares=tuple((SlotId("storage", chunk.name, i), chunk.storages[i]) for i in shared),
        dynamic=any(spec.dynamic_rows for spec in specs),
    )
