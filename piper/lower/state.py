"""The state of lowering, from a graph to plans, and edits of its sequence of all nodes of a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.ir.node import Compute, Node
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


class SequenceEdit:
    """Changes to the sequence of a step, all made at once. Places are those before any of the changes."""

    def __init__(self, state: LoweringState) -> None:
        self.state = state
        self.sequence = state.sequence
        self.values = dict(state.values)  # a rewrite adds those that its nodes write
        self.why: list[str] = []
        self._before: dict[int, list[tuple[int, Node]]] = {}
        self._after: dict[int, list[tuple[int, Node]]] = {}
        self._replaced: dict[int, tuple[Node, ...]] = {}
        self._names: dict[int, dict[SlotId, SlotId]] = {}
        self._more_reads: dict[int, list[SlotId]] = {}

    def before(self, place: int, *nodes: Node, rank: int = 0) -> None:
        """Insert nodes before a place: the lowest rank first, then those that were inserted first."""
        self._before.setdefault(place, []).extend((rank, node) for node in nodes)

    def after(self, place: int, *nodes: Node, rank: int = 0) -> None:
        """Insert nodes after a place: the lowest rank first, then those that were inserted first."""
        self._after.setdefault(place, []).extend((rank, node) for node in nodes)

    def append(self, *nodes: Node) -> None:
        """Add nodes at the end of the step."""
        self.before(len(self.sequence), *nodes)

    def replace(self, place: int, *nodes: Node) -> None:
        """Put nodes in the place of one."""
        self._replaced[place] = nodes

    def rename(self, place: int, value: SlotId, slot: SlotId) -> None:
        """Let the node at a place read, keep and write a slot in place of a value."""
        self._names.setdefault(place, {})[value] = slot

    def add_to(self, place: int, value: SlotId, total: SlotId) -> None:
        """Let the node at a place add a value that it writes to a total, which it reads for that."""
        self.rename(place, value, total)
        self._more_reads.setdefault(place, []).append(total)

    def apply(self) -> LoweringState:
        """Return the state with all changes made."""
        sequence: list[Node] = []
        reached = 0
        for place in sorted({*self._before, *self._after, *self._replaced, *self._names}):
            sequence += self.sequence[reached:place]
            sequence += by_rank(self._before.get(place, ()))
            sequence += self._at(place)
            sequence += by_rank(self._after.get(place, ()))
            reached = place + 1
        sequence += self.sequence[reached:]
        why = (*self.state.why, *self.why)
        return replace(self.state, sequence=tuple(sequence), values=self.values, why=why)

    def _at(self, place: int) -> tuple[Node, ...]:
        """Return the nodes in the place of one. Behind the last there is none."""
        if place in self._replaced:
            return self._replaced[place]
        node = self.sequence[place : place + 1]
        return (self._renamed(place, *node),) if place in self._names else node

    def _renamed(self, place: int, node: Node) -> Node:
        names = self._names[place]
        reads = (*(names.get(value, value) for value in node.reads), *self._more_reads.get(place, ()))
        writes = tuple(names.get(value, value) for value in node.writes)
        if isinstance(node, Compute):
            keeps = tuple(names.get(value, value) for value in node.keeps)
            return replace(node, reads=reads, writes=writes, keeps=keeps)
        return replace(node, reads=reads, writes=writes)


def by_rank(ranked: Iterable[tuple[int, Node]]) -> Iterator[Node]:
    """Yield nodes by their ranks. Those of the same rank stay in order."""
    return map(itemgetter(1), sorted(ranked, key=itemgetter(0)))
