"""The overlapped groups that a strategy's orders ask for, such as the pairs of DualPipe-V."""

from piper.ir.graph import Graph
from piper.ir.node import compute_name


def overlapped(graph: Graph) -> list[tuple[str, ...]]:
    """The names of the nodes of every ordered group that has more than one."""
    return [
        tuple(compute_name(step.chunk, step.phase, step.part) for step in group)
        for ordering in graph.orderings
        for group in ordering.groups
        if len(group) > 1
    ]
