"""Writes nodes of the recorded graph into a graph of their own, with the modes they ran in."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.amp import autocast_mode

from piper.capture.trace.effects import writes
from piper.capture.trace.functionalize import memory_of
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import Mode


def emit(
    nodes: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    results: Sequence[fx.Node],
    *,
    modes: Mapping[fx.Node, Mode],
    changes: Callable[[fx.Node], bool],
) -> fx.Graph:
    """Copy nodes into a new graph. Placeholders stand for `reads`; the graph returns `results`.

    What is read is copied before anything writes into it in place, with all its views, but for what it
    `changes`. A result that is written later is returned as it was.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in reads}
    last = {memory_of(target): position for position, node in enumerate(nodes) for target in writes(node)}
    last.pop(None, None)  # what has no memory to ask for
    for node in reads:
        if memory_of(node) in last and not changes(node):
            copies[node] = graph.call_method("clone", (copies[node],))
    returned: dict[fx.Node, fx.Node] = {}
    current = _Modes(graph)
    for position, node in enumerate(nodes):
        current.enter(modes[node])
        copy = graph.node_copy(node, copies.__getitem__)
        copy.meta = {key: node.meta.get(key) for key in ("stack_trace", WEIGHT) if key in node.meta}
        if _is_strict_view(copy):
            copy.target = "reshape"
        copies[node] = copy
        if node in results and last.get(memory_of(node), -1) > position:
            returned[node] = graph.call_method("clone", (copy,))
    current.enter(Mode())
    graph.output(tuple(returned.get(node, copies[node]) for node in results))
    return graph


def _is_strict_view(node: fx.Node) -> bool:
    """Return whether a node is a `view`. It needs strides that a value may lose between chunks."""
    return (
        node.op == "call_method"
        and node.target == "view"
        and not any(isinstance(argument, torch.dtype) for argument in [*node.args, *node.kwargs.values()])
    )


class _Modes:
    """Writes the calls that change from one mode to another into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = Mode()
        self.open: list[fx.Node] = []

    def enter(self, mode: Mode) -> None:
        if mode.autocast != self.mode.autocast:
            for _ in self.mode.autocast:
                self.graph.call_function(autocast_mode._exit_autocast, (self.open.pop(),))
        if mode.grad != self.mode.grad:
            self.graph.call_function(torch._C._set_grad_enabled, (mode.grad,))
        if mode.autocast != self.mode.autocast:
            for arguments in mode.autocast:
                self.open.append(self.graph.call_function(autocast_mode._enter_autocast, arguments))
        self.mode = mode
