"""Makes a recorded graph fit to be cut: what an operation depends on is exactly what its arguments say."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piper.capture.effects import name_of, store, writes
from piper.capture.record import FromBuffer, Recording

_FILLS = {
    "new_zeros": torch.zeros,
    "zeros_like": torch.zeros,
    "new_ones": torch.ones,
    "ones_like": torch.ones,
    "new_empty": torch.empty,
    "empty_like": torch.empty,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entangled:
    """A write that other names of the same memory see: all of `nodes` must stay in one chunk."""

    write: fx.Node
    nodes: frozenset[fx.Node]


def value(node: fx.Node) -> object:
    """What a node computes, as a fake."""
    return node.meta.get("example_value")


def simplify(recording: Recording) -> Sequence[Entangled]:
    """Rewrite the graph in place; returns the writes that could not be made explicit."""
    _fill_by_size(recording)
    return _explicit_writes(recording)


def _fill_by_size(recording: Recording) -> None:
    """Make tensors of a known size from that size, not from a tensor that happens to have it.

    x.new_zeros(4, 8)
    -->
    torch.zeros((4, 8), ...)

    Otherwise x would travel to another chunk for its shape alone.
    """
    for node in list(recording.graph.nodes):
        made = value(node)
        if (
            node.op in ("call_function", "call_method")
            and name_of(node) in _FILLS
            and isinstance(made, Tensor)
            and all(isinstance(size, int) for size in made.shape)
            and not made.requires_grad
        ):
            node.op, node.target = "call_function", _FILLS[name_of(node)]
            node.args = (tuple(made.shape),)
            node.kwargs = {"dtype": made.dtype, "device": made.device}


def _explicit_writes(recording: Recording) -> list[Entangled]:
    """Let what reads a value after a write in place depend on the write.

    y = x.add_(1); z = x * 2
    -->
    y = x.add_(1); z = y * 2
    """
    order = {node: position for position, node in enumerate(recording.graph.nodes)}
    entangled = []
    for node in list(recording.graph.nodes):
        for written in writes(node):
            if isinstance(recording.origins.get(written), FromBuffer):
                continue  # comes out of the chunk as a new value of the buffer
            if node.target is operator.setitem:
                node.target = store
                node.meta["example_value"] = value(written)
            written.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: order[user] > order[node])
            # A name made after the write was made from what was written.
            aliases = [other for other in _aliases(recording.graph, written) if order[other] < order[node]]
            seen = [user for other in aliases for user in other.users if order[user] > order[node]]
            if seen:
                entangled.append(Entangled(write=node, nodes=frozenset([node, *aliases, *seen])))
    return entangled


def storage_of(fake: object) -> int | None:
    """The identity of a fake tensor's memory."""
    return fake.untyped_storage()._cdata if isinstance(fake, Tensor) else None


def _aliases(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    storage = storage_of(value(node))
    return [other for other in graph.nodes if storage is not None and storage_of(value(other)) == storage]


def relaxed_view(node: fx.Node) -> bool:
    """Whether a node is a `view` that must become a `reshape`: between chunks values lose odd strides."""
    return (
        node.op == "call_method"
        and node.target == "view"
        and not any(isinstance(argument, torch.dtype) for argument in [*node.args, *node.kwargs.values()])
    )
