"""Recomputed forwards: those of a region that saves only its inputs until its backwards."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from piper.ir.ids import SlotId
from piper.ir.node import Compute
from piper.lower.state import LoweringState, SequenceEdit


def add_reruns(state: LoweringState) -> LoweringState:
    """Recompute a region's forwards as late as its backwards allow, which then read the new results.

    F[PP=0]  F[PP=0 #1] ... B[PP=0 #1]  B[PP=0]
    -->
    F[PP=0]  F[PP=0 #1] ... R[PP=0]  R[PP=0 #1]  B[PP=0 #1]  B[PP=0]
    """
    regions = state.graph.chosen(lambda options: options.rerun)
    if not regions:
        return state
    makers = makers_of(state)
    edit = SequenceEdit(state)
    placed: set[str] = set()
    for place, node in enumerate(state.sequence):
        if isinstance(node, Compute) and node.phase != "F":
            edit.before(place, *forwards_before(node, makers, regions, placed))
            for value in inner(node, makers, regions):
                edit.rename(place, value, value.made_again())
    for value in dict.fromkeys(value.base for value in makers):
        if value in state.values:  # a buffer outlives the step. Others get storages of their own
            shares = tuple((storage.made_again(), size) for storage, size in state.values[value].shares)
            edit.values[value.made_again()] = replace(state.values[value], shares=shares)
    edit.why += [
        f"{region}: keeps what comes into it; its forwards run again before its backwards"
        for region in dict.fromkeys(regions.values())
    ]
    return edit.apply()


def backwards_read_what_ran_last(state: LoweringState) -> Iterator[str]:
    """Yield each value of a first run that a backward or a recomputed forward of its region reads."""
    makers, regions = makers_of(state), state.graph.chosen(lambda options: options.rerun)
    for node in state.sequence:
        if isinstance(node, Compute) and (node.phase != "F" or node.again):
            for value in inner(node, makers, regions):
                yield f"{node.name} reads {value} of {makers[value][1].name}"


Makers = Mapping[SlotId, tuple[int, Compute]]


def makers_of(state: LoweringState) -> Makers:
    """Return the first forwards of recomputed regions, with their places, by the values they write."""
    options = state.graph.options
    return {
        value: (place, node)
        for place, node in enumerate(state.sequence)
        if isinstance(node, Compute) and node.phase == "F" and options[node.chunk].rerun is not None
        if not node.again
        for value in node.writes
    }


def inner(node: Compute, makers: Makers, regions: Mapping[str, str]) -> list[SlotId]:
    """Return the values a node uses that forwards of its own region computed."""
    # The inputs of the region are not among them: they are saved.
    region = regions.get(node.chunk)
    used = [value for value in (*node.reads, *node.keeps) if value in makers]
    return [value for value in used if regions[makers[value][1].chunk] == region]


def forwards_before(
    node: Compute, makers: Makers, regions: Mapping[str, str], placed: set[str]
) -> list[Compute]:
    """Return the forwards to recompute before a node, in order. Those in `placed` ran again before."""
    missing: dict[int, Compute] = {}
    stack = [node]
    while stack:
        for value in inner(stack.pop(), makers, regions):
            place, maker = makers[value]
            if maker.name not in placed:
                placed.add(maker.name)
                missing[place] = maker
                stack.append(maker)
    return [run_again(missing[place], makers, regions) for place in sorted(missing)]


def run_again(maker: Compute, makers: Makers, regions: Mapping[str, str]) -> Compute:
    """Return a forward that is recomputed from recomputed values of its region."""
    again = {value: value.made_again() for value in inner(maker, makers, regions)}
    return replace(
        maker,
        again=True,
        reads=tuple(again.get(value, value) for value in maker.reads),
        keeps=tuple(again.get(value, value) for value in maker.keeps),
        writes=tuple(value.made_again() for value in maker.writes),
    )
