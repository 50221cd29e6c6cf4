"""Finds what the values of a graph are computed from."""

from collections.abc import Callable, Iterable

from torch import fx


def upstream(roots: Iterable[fx.Node], within: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """Return the roots and the nodes that they are computed from. within: which nodes count and lead on."""
    stack, reached = list(roots), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in reached and within(node):
            reached.add(node)
            stack += node.all_input_nodes
    return reached
