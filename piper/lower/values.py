"""The flow of values under construction: what values are called, how large they are, and who makes them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from piper.devices import Devices
from piper.ir.chunk import Chunk, Output, Phase, Source, TensorSpec
from piper.ir.graph import Graph
from piper.ir.node import Add, Compute, Counts, Exchange, Transfer
from piper.lower.buckets import Home
from piper.lower.work import Work
from piper.plan.plan import Slot

SEED = "seed"  # the gradient that each part's loss starts from


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A node of every part, with the names of its values still without a part."""

    node: Compute | Counts | Exchange | Transfer | Add
    chunk: str  # whose parts it follows
    phase: Phase | None = None  # it exists where the chunk has this phase; none: always


@dataclass(slots=True, kw_only=True)
class Flow:
    """The flow of values through a step, worked out once per chunk: parts differ only in a suffix."""

    work: Work
    homes: dict[str, Home]
    chunks: dict[str, Chunk]
    templates: list[Template] = field(default_factory=list)
    values: dict[str, Slot] = field(default_factory=dict)
    residents: dict[str, Slot] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)  # of the gradients
    gradients: dict[tuple[str, int], list[tuple[Devices, str]]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.work.graph

    def is_marker(self, chunk: Chunk) -> bool:
        """A route or unroute that moves nothing: its outputs are its inputs."""
        return chunk.kind in ("route", "unroute") and self.graph.policy(chunk.name).ways == 1

    def resolve(self, source: Source) -> Source:
        """Where a value really comes from, seen through markers."""
        while isinstance(source, Output) and self.is_marker(self.chunks[source.chunk]):
            source = self.chunks[source.chunk].inputs[source.index]
        return source


def output_slot(chunk: str, index: int) -> str:
    """The slot of a chunk's output."""
    return f"{chunk}.out{index}"


def input_gradient(chunk: str, position: int) -> str:
    """The slot of the gradient that a chunk gives for one of its inputs."""
    return f"{chunk}.din{position}"


def buffer_slot(name: str) -> str:
    """The slot of a buffer of the model."""
    return f"buffer.{name}"


def gradient_slot(bucket: str, readers: tuple[str, ...], chunk: str) -> str:
    """The slot of the gradients that one backward of a chunk gives for a bucket."""
    return f"{bucket}.g" if len(readers) == 1 else f"{bucket}.g<{chunk}>"


def splits_slot(chunk: Chunk) -> str:
    """The slot that says how many rows go where: made by the route, used by its unroute too."""
    if chunk.kind == "route":
        return f"{chunk.name}.splits"
    source = chunk.inputs[1]
    assert isinstance(source, Output), "an unroute takes the counts of its route"
    return f"{source.chunk}.splits"


def slot_of(chunk: Chunk, specs: Iterable[TensorSpec]) -> Slot:
    """The bytes of values held together, those of shared storages apart."""
    specs = tuple(specs)
    shared = sorted({spec.storage for spec in specs if spec.storage >= 0})
    return Slot(
        nbytes=sum(spec.nbytes for spec in specs if spec.storage < 0),
        shares=tuple((f"{chunk.name}.storage{i}", chunk.storages[i]) for i in shared),
        dynamic=any(spec.dynamic_rows for spec in specs),
    )
