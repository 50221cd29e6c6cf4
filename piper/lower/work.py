"""What a graph is on its way to plans."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.graph import Graph
from piper.ir.node import Node
from piper.plan.plan import Bucket, Slot

Temporal = tuple[str, str, int]  # this node, before that one, said by this directive (-1: our own choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What lowering needs to know of a job beyond its graph."""

    samples: int | None = None  # in the global batch; None: whatever divides
    clip: bool = False  # updates wait for the norm over all parameters
    state_bytes: int = 8  # optimizer state per parameter, in bytes (AdamW: two float32)
    master_bytes: int = 0  # a master copy of each parameter, where compute uses a shorter type


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A graph, its values and buckets, and the line: every node of the step in one global order."""

    graph: Graph
    settings: Settings
    buckets: Mapping[str, Bucket] = field(default_factory=dict)
    chunk_buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[str, Slot] = field(default_factory=dict)  # by the value's name without its part
    residents: Mapping[str, Slot] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()  # with what they read and write, not yet in order
    temporal: tuple[Temporal, ...] = ()
    line: tuple[Node, ...] = ()
    why: tuple[str, ...] = ()


Rewrite = Callable[[Work], Work]
Property = Callable[[Work], Iterator[str]]


def prefix_of(value: str) -> str:
    """A value's name without its part, where its size is known: `PP=0.out0` of `PP=0.out0[MB=1]`."""
    if value[-1] != "]":
        return value
    if value.find("]", 0, -1) < 0:
        return value[: value.rfind("[")]
    open_brackets = 0
    for place in range(
        len(value) - 1, 0, -1
    ):  # from the end: names of fields and parameters may hold brackets
        if value[place] == "]":
            open_brackets += 1
        elif value[place] == "[":
            open_brackets -= 1
            if not open_brackets:
                return value[:place]
    return value
