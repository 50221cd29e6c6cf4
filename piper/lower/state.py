"""The state of lowering, from a graph to plans."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.ir.node import Node
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans, Slot

Temporal = tuple[str, str, int]  # (first node, second node, number of the directive or -1: our own choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The facts of a job, beyond its graph, that lowering needs."""

    clip: bool = False  # updates wait for the norm over all parameters
    state_bytes: int = 8  # optimizer state per parameter, in bytes (AdamW: two float32)
    whole: bool = False  # the optimizer needs whole parameters: under ZeRO each has one owner
    trains: bool = True  # the program updates parameters. An evaluation only reads those of another


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringState:
    """The state of lowering: a graph, its values, its buckets, and all nodes of the step in one sequence."""

    graph: Graph
    settings: Settings
    buckets: Mapping[str, Bucket]  # that chunks of the program read
    held_buckets: Mapping[str, Bucket]  # and those of which it holds the state for another program
    chunk_buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Mapping[SlotId, Slot] = field(default_factory=dict)  # by `SlotId.base`
    residents: Mapping[SlotId, Slot] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()  # with what they read and write, not yet in order
    temporal: tuple[Temporal, ...] = ()
    sequence: tuple[Node, ...] = ()
    why: tuple[str, ...] = ()
    plans: Plans | None = None  # at the end


Rewrite = Callable[[LoweringState], LoweringState]
Property = Callable[[LoweringState], Iterator[str]]
