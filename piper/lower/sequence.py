"""Inserts nodes into the sequence of all nodes of a step."""

from collections.abc import Iterable, Iterator, Sequence

from piper.devices import Devices
from piper.ir.node import Compute, Node


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
