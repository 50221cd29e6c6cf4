"""The state of lowering, edits of its sequence of all nodes of a step, and runs of nodes in the sequence."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.grouping import grouped
from piper.ir.ids import Pass, SlotId, Tags
from piper.ir.node import Compute, Node
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans, Slot

PATIENCE = 1  # compute nodes of a set while it waits for another one to join a communication
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


def computes_by_set(sequence: Sequence[Node], sets: Iterable[Devices]) -> dict[Devices, list[int]]:
    """Return, for each set of devices, the places of the compute nodes that run on any of them."""
    computes: dict[Devices, list[int]] = {devices: [] for devices in sets}
    overlapping: dict[Devices, list[list[int]]] = {}
    for place, node in enumerate(sequence):
        if not isinstance(node, Compute):
            continue
        if node.devices not in overlapping:
            mine = set(node.devices)
            overlapping[node.devices] = [
                places for devices, places in computes.items() if not mine.isdisjoint(devices)
            ]
        for places in overlapping[node.devices]:
            places.append(place)
    return computes


def pass_at(sequence: Sequence[Node], place: int) -> Pass:
    """Return the pass of the compute node at a place."""
    node = sequence[place]
    assert isinstance(node, Compute), f"{node.name} computes nothing"
    return node.run


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRun:
    """Compute nodes of a set of devices that use a bucket without a new gather or reduction between them."""

    devices: Devices
    computes: Sequence[int]  # the places of all compute nodes of these devices
    users: Sequence[int]  # the numbers among them of the nodes of the run

    @property
    def places(self) -> Sequence[int]:
        """Return the places of the nodes of the run."""
        return [self.computes[number] for number in self.users]


def use_runs(
    users: Iterable[int],
    sequence: Sequence[Node],
    computes: Mapping[Devices, list[int]],
    regions: Mapping[str, Tags],
    *,
    whole_step: bool = False,
) -> Iterator[UseRun]:
    """Yield the runs of neighbouring compute nodes, on the same devices in any order, that use a bucket.

    users: the places of the nodes that use it. whole_step: all uses of a set of devices are one run.
    regions: of chunks. Where collectives cut a region into pieces, one pass is one run.
    """

    def one_pass(place: int) -> tuple[object, ...]:
        """Return what pieces of one pass of a region over a microbatch have in common."""
        node = sequence[place]
        assert isinstance(node, Compute), "buckets are used by compute nodes"
        return node.phase, node.again, node.part, regions[node.chunk]

    devices_of = {place: sequence[place].devices for place in users}
    same_members = grouped((tuple(sorted(each)), each) for each in dict.fromkeys(devices_of.values()))
    for sets in same_members.values():
        places = computes[sets[0]]
        run: list[int] = []
        for number, place in enumerate(places):
            if devices_of.get(place) not in sets:
                continue
            apart = run and one_pass(places[run[-1]]) != one_pass(place)
            if apart and number > run[-1] + 1 and not whole_step:
                yield UseRun(devices=sets[0], computes=places, users=run)
                run = []
            run.append(number)
        if run:
            yield UseRun(devices=sets[0], computes=places, users=run)


def joint_runs(runs: Iterable[UseRun], by: Callable[[UseRun], int]) -> Iterator[list[UseRun]]:
    """Yield the runs that one communication over all their devices serves: one of each set, in order.

    Where microbatches run on several sets of devices, all hold the same bucket and must take part. A run
    joins the runs of other sets that come shortly before it; then each set gives and gets something. Else the
    sets that have no run add nothing to the communication, so that no set holds a whole bucket for long.
    """
    current: list[UseRun] = []
    for run in sorted(runs, key=by):
        for other in current:
            places = (other.computes, run.computes)
            between = (bisect_left(each, by(run)) - bisect_right(each, by(other)) for each in places)
            if run.devices == other.devices or max(between) > PATIENCE:
                yield current
                current = []
                break
        current.append(run)
    if current:
        yield current
