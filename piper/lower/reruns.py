"""Recomputed forwards: those of a region that saves only its inputs until its backwards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from piper.ir.ids import SlotId
from piper.ir.node import Compute, Node
from piper.lower.sequence import woven
from piper.lower.state import LoweringState
from piper.plan.plan import Slot


def add_reruns(work: LoweringState) -> LoweringState:
    """Recompute a region's forwards as late as its backwards allow, which then read the new results.

    F[PP=0]  F[PP=0 #1] ... B[PP=0 #1]  B[PP=0]
    -->
    F[PP=0]  F[PP=0 #1] ... R[PP=0]  R[PP=0 #1]  B[PP=0 #1]  B[PP=0]
    """
    if not work.graph.reruns:
        return work
    reruns = _Reruns(work.graph.reruns, makers_of(work))
    sequence, before = list(work.sequence), dict[int, list[Node]]()
    for place, node in enumerate(work.sequence):
        if isinstance(node, Compute) and node.phase != "F":
            before[place] = reruns.missing_for(node)
            sequence[place] = reruns.reading_recomputed(node)
    values = {**work.values, **dict(sizes_again(reruns.makers, work.values))}
    regions = dict.fromkeys(work.graph.reruns.values())
    why = [
        f"{region}: keeps what comes into it; its forwards run again before its backwards"
        for region in regions
    ]
    return replace(work, sequence=woven(sequence, before, {}), values=values, why=(*work.why, *why))


def backwards_read_what_ran_last(work: LoweringState) -> Iterator[str]:
    """Yield each value of a first run that a backward or a recomputed forward of its region reads."""
    makers = makers_of(work)
    for node in work.sequence:
        if isinstance(node, Compute) and (node.phase != "F" or node.again):
            for value in inner(node, makers, work.graph.reruns):
                yield f"{node.name} reads {value} of {makers[value][1].name}"


Makers = Mapping[SlotId, tuple[int, Compute]]


def makers_of(work: LoweringState) -> Makers:
    """Return the first forwards of recomputed regions, with their places, by the values they write."""
    return {
        value: (place, node)
        for place, node in enumerate(work.sequence)
        if isinstance(node, Compute) and node.phase == "F" and node.chunk in work.graph.reruns
        if not node.again
        for value in node.writes
    }


def inner(node: Compute, makers: Makers, regions: Mapping[str, str]) -> list[SlotId]:
    """Return the values a node uses that forwards of its own region computed.

    The inputs of the region are not among them: they are saved.
    """
    region = regions.get(node.chunk)
    used = [value for value in (*node.reads, *node.keeps) if value in makers]
    return [value for value in used if regions[makers[value][1].chunk] == region]


@dataclass(slots=True)
class _Reruns:
    """The forwards that are recomputed, for the part of the sequence walked so far."""

    regions: Mapping[str, str]
    makers: Makers
    placed: set[str] = field(default_factory=set)

    def missing_for(self, node: Compute) -> list[Node]:
        """Return the forwards to recompute before a node, in order, without those already placed."""
        found: dict[int, Compute] = {}
        stack = [node]
        while stack:
            for value in inner(stack.pop(), self.makers, self.regions):
                place, maker = self.makers[value]
                if maker.name not in self.placed:
                    self.placed.add(maker.name)
                    found[place] = maker
                    stack.append(maker)
        return [self._copy(found[place]) for place in sorted(found)]

    def reading_recomputed(self, node: Compute) -> Compute:
        """Return the node with its reads and keeps changed to the recomputed values."""
        recomputed = {value: value.made_again() for value in inner(node, self.makers, self.regions)}
        if not recomputed:
            return node
        return replace(
            node,
            reads=tuple(recomputed.get(value, value) for value in node.reads),
            keeps=tuple(recomputed.get(value, value) for value in node.keeps),
        )

    def _copy(self, maker: Compute) -> Compute:
        writes = tuple(value.made_again() for value in maker.writes)
        return replace(self.reading_recomputed(maker), again=True, writes=writes)


def sizes_again(makers: Makers, values: Mapping[SlotId, Slot]) -> Iterator[tuple[SlotId, Slot]]:
    """Yield the slots that recomputed forwards write, with sizes and storages of their own."""
    for value in dict.fromkeys(value.base for value in makers):
        if value in values:  # a buffer outlives the step
            shares = tuple((storage.made_again(), nbytes) for storage, nbytes in values[value].shares)
            yield value.made_again(), replace(values[value], shares=shares)
