"""Inserts nodes into the sequence of all nodes of a step."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.ir.devices import Devices
from piper.ir.node import Compute, Node

PATIENCE = 1  # compute nodes of a set while it waits for another one to join a communication


def woven(
    sequence: Sequence[Node], before: dict[int, list[Node]], after: dict[int, list[Node]]
) -> tuple[Node, ...]:
    """Return the sequence with nodes inserted before and after the given places."""
    result: list[Node] = []
    for place, node in enumerate(sequence):
        result += before.get(place, ())
        result.append(node)
        result += after.get(place, ())
    return tuple(result)


def computes_by_set(sequence: Sequence[Node], sets: Iterable[Devices]) -> dict[Devices, list[int]]:
    """Return, for each set of devices, the places of the compute nodes that run on any of them."""
    found: dict[Devices, list[int]] = {devices: [] for devices in sets}
    touching: dict[Devices, list[list[int]]] = {}
    for place, node in enumerate(sequence):
        if not isinstance(node, Compute):
            continue
        if node.devices not in touching:
            mine = set(node.devices)
            touching[node.devices] = [
                places for placement, places in found.items() if not mine.isdisjoint(placement)
            ]
        for places in touching[node.devices]:
            places.append(place)
    return found


def same_members(sets: Iterable[Devices]) -> list[list[Devices]]:
    """Return sets of devices together that have the same members, in whatever order."""
    found: dict[tuple[int, ...], list[Devices]] = {}
    for devices in sets:
        found.setdefault(tuple(sorted(devices)), []).append(devices)
    return list(found.values())


def runs(uses: Sequence[bool]) -> Iterator[list[int]]:
    """Yield the maximal runs of neighbouring uses, each as a list of positions."""
    current: list[int] = []
    for i, use in enumerate(uses):
        if use:
            current.append(i)
        elif current:
            yield current
            current = []
    if current:
        yield current


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRun:
    """Neighbouring uses of a bucket on one set of devices, by their places in the sequence."""

    devices: Devices
    places: tuple[int, ...]
    beside: int  # the compute node that a communication for this run may overlap


def meetings(
    found: Iterable[UseRun], by: Callable[[UseRun], int], places: Mapping[Devices, list[int]]
) -> Iterator[list[UseRun]]:
    """Yield the runs that one communication over all their devices serves: one of each set, in order.

    Where microbatches run on several sets of devices, all hold the same bucket and must take part. A run
    joins the runs of other sets that come shortly before it; then each set gives and gets something. Else the
    sets that have no run add nothing to the communication, so that no set holds a whole bucket for long.
    """
    current: list[UseRun] = []
    for run in sorted(found, key=by):
        for other in current:
            between = (between_places(places[each.devices], by(other), by(run)) for each in (other, run))
            if run.devices == other.devices or max(between) > PATIENCE:
                yield current
                current = []
                break
        current.append(run)
    if current:
        yield current


def between_places(places: list[int], low: int, high: int) -> int:
    """Return how many of some places, in order, lie between two."""
    return bisect_left(places, high) - bisect_right(places, low)
