"""Rewrites a recorded graph so that operations depend on exactly their arguments, and it can be cut."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piper.capture.trace.effects import name_of, store, writes
from piper.capture.trace.left_state import left_behind
from piper.capture.trace.recording import FromBuffer, FromParameter, Origin, Recording, marker
from piper.capture.trace_errors import node_line
from piper.errors import CaptureError
from piper.ir.chunk import Batch, Constant

_FILLS = {
    name: fill
    for kind, fill in (("zeros", torch.zeros), ("ones", torch.ones), ("empty", torch.empty))
    for name in (f"new_{kind}", f"{kind}_like")
}
_RESHAPES = {  # methods that change the shape by which a tensor is read, and no element: views, once explicit
    f"{name}_": name
    for name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entangled:
    """A write that other names of the same memory see: all of `nodes` must stay in one chunk."""

    write: fx.Node
    nodes: frozenset[fx.Node]


def value(node: fx.Node) -> object:
    """Return the fake result of a node."""
    return node.meta.get("example_value")


def simplify(recording: Recording) -> Sequence[Entangled]:
    """Make dependencies through memory explicit, in place. Return the writes for which that fails."""
    _fill_by_size(recording)
    _merge_results(recording)
    return _explicit_writes(recording)


def _fill_by_size(recording: Recording) -> None:
    """Make tensors of a known size from that size, not from a tensor that happens to have it.

    x.new_zeros(4, 8)
    -->
    torch.zeros((4, 8), ...)

    Otherwise x would travel to another chunk for its shape alone. Not inside vmap, where the new tensor
    has the samples of x beside its size.
    """
    for node in list(recording.graph.nodes):
        filled = value(node)
        if (
            node.op in ("call_function", "call_method")
            and node not in recording.bundles
            and name_of(node) in _FILLS
            and isinstance(filled, Tensor)
            and all(isinstance(size, int) for size in filled.shape)
            and not filled.requires_grad
        ):
            node.op, node.target = "call_function", _FILLS[name_of(node)]
            node.args = (tuple(filled.shape),)
            node.kwargs = {"dtype": filled.dtype, "device": filled.device}


def _merge_results(recording: Recording) -> None:
    """Read each result of a `route` through one node: a trace takes sizes off a second one."""
    first: dict[tuple[fx.Node, object], fx.Node] = {}
    for node in recording.graph.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and marker(source) == "route":
            kept = first.setdefault((source, node.args[1]), node)
            if kept is not node:
                node.replace_all_uses_with(kept)


def _explicit_writes(recording: Recording) -> list[Entangled]:
    """Make the reads of a value after a write in place depend on the write.

    y = x.add_(1); z = x * 2
    -->
    y = x.add_(1); z = y * 2
    """
    order = {node: position for position, node in enumerate(recording.graph.nodes)}
    owners = {memory_of(node): node for node in recording.origins}
    sharing: dict[int | None, list[fx.Node]] = {}  # the nodes that see the same memory
    for node in order:
        sharing.setdefault(memory_of(node), []).append(node)
    entangled = []
    for node in list(recording.graph.nodes):
        if node.op == "call_method" and node.target in _RESHAPES:
            written = node.args[0]
            assert isinstance(written, fx.Node)
            node.target = _RESHAPES[node.target]
            _replace_later(written, node, order)
        for written in writes(node):
            memory = memory_of(written)
            owner = owners.get(memory)
            _check_owner(node, written, owner, recording.origins.get(owner) if owner else None)
            if written is owner and isinstance(recording.origins[owner], FromBuffer):
                continue  # comes out of the chunk as a new value of the buffer
            if node.target is operator.setitem:
                node.target = store
                node.meta["example_value"] = value(written)
                sharing[memory].append(node)
            if isinstance(value(node), Tensor) and memory_of(node) == memory:
                _replace_later(written, node, order)
            # A view made after the write already depends on it.
            same = sharing[memory] if memory is not None else ()
            aliases = [other for other in same if order[other] < order[node]]
            seen = [user for other in aliases for user in other.users if order[user] > order[node]]
            if seen:
                entangled.append(Entangled(write=node, nodes=frozenset([node, *aliases, *seen])))
    return entangled


def _check_owner(node: fx.Node, written: fx.Node, owner: fx.Node | None, origin: Origin | None) -> None:
    """Refuse a write to a tensor that the forward must not change."""
    by = f"{node.name}{node_line(node)}"
    match origin:
        case Constant():  # it is outside the model, so a plan has it as it was when it was traced
            raise left_behind("a tensor that is no buffer of the model", by)
        case FromParameter(name=name):
            changed = f"the parameter {name}"
        case Batch(field=field) if written is not owner:
            changed = f"a part of the input {field}"
        case _:
            return
    hint = "compute a new tensor, as x = x.clone() is, or keep what changes in a buffer"
    raise CaptureError(f"the forward changes {changed} in place", by=by, hint=hint)


def _replace_later(node: fx.Node, by: fx.Node, order: Mapping[fx.Node, int]) -> None:
    node.replace_all_uses_with(by, delete_user_cb=lambda user: order[user] > order[by])


def memory_of(node: fx.Node) -> int | None:
    """Return the storage id of a node's value. None: it is no tensor, or a tensor inside vmap."""
    tensor = value(node)
    if not isinstance(tensor, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None  # inside vmap a tensor has no memory of its own to ask for
    memory: int = tensor.untyped_storage()._cdata
    return memory


def written_memory(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Return the storage ids that the nodes write in place, directly or through a view."""
    return {memory_of(target) for node in nodes for target in writes(node)}
