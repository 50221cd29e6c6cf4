"""`order`: which nodes run before which on a device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from piper.directives.base import (
    Directive,
    argument,
    check_tags,
    given_filter,
    registered,
    selected,
    touched,
)
from piper.errors import ScheduleError
from piper.ir.graph import Graph, Ordering, has_backward
from piper.ir.ids import Pass
from piper.ir.node import Compute, compute_name
from piper.ir.select import At

USAGE = "order([[at(...)], [at(...), at(...)]])"


def given_groups(key: str, groups: object) -> tuple[tuple[At, ...], ...]:
    """Return the groups that an order is given, as tuples of filters. A filter alone is a group."""
    if isinstance(groups, At | str | dict) or not isinstance(groups, Iterable):
        raise ScheduleError(f"{groups!r} is not a list of groups", hint=USAGE)
    found = [(group,) if isinstance(group, At) else group for group in groups]
    for group in found:
        if isinstance(group, str | dict) or not isinstance(group, Iterable):
            raise ScheduleError(f"{group!r} is not a group of filters", hint=USAGE)
    return tuple(tuple(given_filter(key, at) for at in group) for group in found)


@registered(4)
@dataclass(frozen=True, slots=True, repr=False)
class Order(Directive):
    """Run the groups one after another on each device; members of one group may interleave.

    F[PP=0 MB=0]   B[PP=0 MB=0]
    -->
    F[PP=0 MB=0] ..> BI[PP=0 MB=0] ..> BW[PP=0 MB=0]      (naming BI or BW splits that backward)
    """

    groups: tuple[tuple[At, ...], ...] = argument(key="filters", given=given_groups)

    def apply(self, graph: Graph, number: int) -> Graph:
        if not self.groups or not all(self.groups):
            raise ScheduleError(
                "an order needs groups, each with at least one filter",
                facts={"groups": ", ".join(str(len(group)) for group in self.groups) or "none"},
                hint=USAGE,
            )
        graph = self._split_backwards(graph, number)
        groups: list[tuple[Pass, ...]] = []
        position: dict[str, int] = {}
        members: list[Compute] = []
        for place, ats in enumerate(self.groups):
            group: list[Pass] = []
            for at in ats:
                for node in ordered(graph, at):
                    if position.setdefault(node.name, place) != place:
                        raise ScheduleError(
                            "a node is in two groups",
                            facts={"node": node.name, "groups": f"{position[node.name]} and {place}"},
                            hint="name each node once: it runs once a step",
                        )
                    group.append(node.run)
                    members.append(node)
            groups.append(tuple(dict.fromkeys(group)))
        marked = (replace(node, origin=touched(node, number)) for node in members)
        ordering = Ordering(by=number, groups=tuple(groups))
        return replace(graph.update(marked), orderings=(*graph.orderings, ordering))

    def _split_backwards(self, graph: Graph, number: int) -> Graph:
        """Split each backward that this order names by its halves."""
        halves: dict[str, tuple[Compute, ...]] = {}
        for ats in self.groups:
            for at in ats:
                if at.phase not in ("BI", "BW"):
                    continue
                check_tags(graph, at)
                for cell in graph.index.find(at):
                    node = graph.nodes.get(compute_name(cell.chunk, "B", cell.part))
                    if node is not None:
                        node = replace(node, origin=touched(node, number))
                        halves[node.name] = (replace(node, phase="BI"), replace(node, phase="BW"))
        return graph.splice(halves) if halves else graph


def order(groups: Sequence[Sequence[At] | At]) -> Order:
    """Run groups of nodes in sequence: `order([[at(...)], [at(...), at(...)]])`."""
    return Order(cast(tuple[tuple[At, ...], ...], groups))


def ordered(graph: Graph, at: At) -> list[Compute]:
    """Return the nodes that a filter puts in order: none where it names a backward and nothing trains."""
    check_tags(graph, at)
    nodes = graph.select(at)
    if nodes:
        return nodes
    chunks = graph.chunks
    cells = graph.index.find(at)
    if at.phase is not None and cells and not any(has_backward(chunks[cell.chunk]) for cell in cells):
        return []
    return selected(graph, at)
