"""Putting nodes into the line, before or after those already there."""

from collections.abc import Iterable, Iterator, Sequence

from piper.devices import Devices
from piper.ir.node import Compute, Node


def woven(
    line: Sequence[Node], before: dict[int, list[Node]], after: dict[int, list[Node]]
) -> tuple[Node, ...]:
    """The line with some nodes put before and after certain places."""
    result: list[Node] = []
    for place, node in enumerate(line):
        result += before.get(place, ())
        result.append(node)
        result += after.get(place, ())
    return tuple(result)


def computes_by_set(line: Sequence[Node], sets: Iterable[Devices]) -> dict[Devices, list[int]]:
    """For each set of devices, the places in line of the compute nodes that touch any of them."""
    found: dict[Devices, list[int]] = {devices: [] for devices in sets}
    touching: dict[Devices, list[list[int]]] = {}
    for place, node in enumerate(line):
        if not isinstance(node, Compute):
            continue
        if node.devices not in touching:
            mine = set(node.devices)
            touching[node.devices] = [places for home, places in found.items() if not mine.isdisjoint(home)]
        for places in touching[node.devices]:
            places.append(place)
    return found


def runs(uses: Sequence[bool]) -> Iterator[list[int]]:
    """Maximal runs of neighbouring uses, by their positions."""
    current: list[int] = []
    for i, use in enumerate(uses):
        if use:
            current.append(i)
        elif current:
            yield current
            current = []
    if current:
        yield current
