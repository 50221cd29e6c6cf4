"""Reads what a traced forward changes outside itself: attributes, containers, globals, variables of closures.

Works around: torch 2.11. Dynamo keeps a record of such changes, to repeat them after each call of what it
compiles, and offers no way to read it.
Not needed from: no version yet.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._dynamo.side_effects import SideEffects
from torch.utils._pytree import tree_leaves

from piper.process.attributes import replaced

Number = bool | int | float | str | None
Place = tuple[int, str | None]  # the id of what is changed, and the name of an attribute
MISSING = object()
_CONTAINERS = (list, dict, set, deque)
# The values of these depend on no operand, or on the first one alone
_NEW = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
_CAST = ("to", "type_as")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One attribute, variable or container as the forward leaves it."""

    holder: object
    name: str | None  # of an attribute; None: the holder is a container, and this is all that it holds
    source: str  # where Dynamo found the holder: L['self'].model.history
    value: (
        object  # numbers, strings, None and fake tensors, or containers of such; or an object that was there
    )
    computed: frozenset[int]  # the ids of tensors in it that depend on parameters, buffers or the batch

    @property
    def before(self) -> object:
        if self.name is None:
            return self.holder.copy() if isinstance(self.holder, _CONTAINERS) else self.holder
        if hasattr(self.holder, "__dict__"):
            return vars(self.holder).get(self.name, MISSING)
        return getattr(self.holder, self.name, MISSING)

    @property
    def same(self) -> bool:
        """Return whether these numbers, strings and objects are there already."""
        new, old = tree_leaves(self.value), tree_leaves(self.before)
        return len(new) == len(old) and all(
            a is b or (isinstance(a, Number) and type(a) is type(b) and a == b)
            for a, b in zip(new, old, strict=True)
        )

    def assign(self, value: object) -> None:
        """Put a value there, past any `__setattr__` of the holder; a missing value deletes what is there."""
        holder, name = self.holder, self.name
        if isinstance(holder, list | deque) and name is None:
            holder.clear()
            holder.extend(value)  # type: ignore[arg-type]
        elif isinstance(holder, dict | set) and name is None:
            holder.clear()
            holder.update(value)  # type: ignore[arg-type, call-overload]
        elif name is not None and (isinstance(holder, type) or not hasattr(holder, "__dict__")):
            delattr(holder, name) if value is MISSING else setattr(holder, name, value)
        elif name is not None:
            vars(holder).pop(name, None) if value is MISSING else vars(holder).update({name: value})


@contextmanager
def noting_changes() -> Iterator[dict[Place, Left]]:
    """Yield what the trace inside the block has changed, once Dynamo has traced everything."""
    changes: dict[Place, Left] = {}
    reading = SideEffects.codegen_update_mutated

    def read(effects: Any, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401  Dynamo's own protocol
        found = [*_changes(effects)]
        filled = {id(left.holder) for left in found if left.name is None}
        # A new container in place of one that the call has filled is a change, equal or not.
        kept = (left for left in found if not left.same or id(left.before) in filled)
        changes.update({(id(left.holder), left.name): left for left in kept})
        return reading(effects, *args, **kwargs)

    with replaced(SideEffects, "codegen_update_mutated", read):
        yield changes


def _changes(effects: Any) -> Iterator[Left]:  # noqa: ANN401
    """Go through all that was there before the trace and is changed now."""
    existing = {id(item): item for item in effects.keepalive}
    for key, variable in effects.id_to_variable.items():
        if variable.source is None or key not in existing or not effects.is_modified(variable):
            continue
        holder = existing[key]
        changed: dict[str | None, Any] = dict(effects.store_attr_mutations.get(variable, {}))
        if isinstance(holder, (*_CONTAINERS, Iterator)):
            changed[None] = getattr(variable, "_base_vt", None) or variable
        for attribute, value in changed.items():
            state = {**holder._buffers, **holder._parameters} if isinstance(holder, nn.Module) else ()
            if attribute not in state:
                computed = set[int]()
                yield Left(
                    holder=holder,
                    name=attribute,
                    source=source_name(variable.source),
                    value=MISSING if isinstance(holder, Iterator) else _plain(value, computed),
                    computed=frozenset(computed),
                )


def _plain(variable: Any, computed: set[int]) -> object:  # noqa: ANN401  variables of Dynamo
    """Return what a variable of Dynamo stands for, with fakes for tensors. Note those that are computed."""
    if variable.is_tensor():
        node = _unmoved(variable.as_proxy().node)
        argument = node.meta.get("grapharg")  # of a tensor that was there before the trace
        tensor = argument.example if argument else node.meta["example_value"].detach()
        computed.update([id(tensor)] if _computed(node) else [])
        return tensor
    if variable.is_python_constant():
        return variable.as_python_constant()
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        pairs = {key.vt.as_python_constant(): _plain(value, computed) for key, value in items.items()}
        return set(pairs) if issubclass(variable.python_type(), set) else pairs
    if isinstance(items, Sequence | deque):
        values = [_plain(item, computed) for item in items]
        return tuple(values) if issubclass(variable.python_type(), tuple) else values
    return getattr(variable, "value", None)


def _unmoved(node: fx.Node) -> fx.Node:
    """Return what `.to(device)` took, if a node is such a call: a plan moves what it reads by itself."""
    value = node.meta["example_value"]
    called = node.target in _CAST and not value._version  # written in place, it is no longer what was moved
    source = node.all_input_nodes[0] if called else node
    return _unmoved(source) if called and source.meta["example_value"].dtype == value.dtype else node


def _computed(node: fx.Node) -> bool:
    """Return whether a node's value depends on an input of the trace. Tables of positions do not."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            return True
        called = getattr(node.target, "__name__", str(node.target))
        if not called.startswith(_NEW):
            waiting += node.all_input_nodes[:1] if called in _CAST else node.all_input_nodes
    return False


def source_name(source: Any) -> str:  # noqa: ANN401  a source of Dynamo
    """Return where Dynamo found a value: `L['self'].model.history`; empty where it made the value itself.

    In torch 2.11 the name of a source is a method, from torch 2.13 on a property.
    """
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)
