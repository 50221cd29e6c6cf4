"""Writes nodes of the recorded graph into a graph of their own, with the modes they ran in."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.amp import autocast_mode

from piper.capture.trace.effects import writes
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import Mode


def emit(
    nodes: Sequence[fx.Node],
    reads: Sequence[fx.Node],
    results: Sequence[fx.Node],
    *,
    modes: Mapping[fx.Node, Mode],
    shared: Callable[[fx.Node], bool],
) -> fx.Graph:
    """Copy nodes into a new graph. Placeholders stand for `reads`; the graph returns `results`.

    shared: returns whether other nodes still read a value. One that is written in place is then copied first.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in reads}
    current = _Modes(graph)
    for node in nodes:
        current.enter(modes[node])
        targets = [target for target in writes(node) if shared(target)]
        own = {target: graph.call_method("clone", (copies[target],)) for target in targets}

        def replaced(used: fx.Node, own: Mapping[fx.Node, fx.Node] = own) -> fx.Node:
            return own[used] if used in own else copies[used]

        copy = graph.node_copy(node, replaced)
        copy.meta = {key: node.meta.get(key) for key in ("stack_trace", WEIGHT) if key in node.meta}
        if _is_strict_view(copy):
            copy.target = "reshape"
        copies[node] = copy
    current.enter(Mode())
    graph.output(tuple(copies[node] for node in results))
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
