"""What a forward changes outside itself, such as a plain number in `self.steps += 1`, or a list that grows.

A trace sees one call of the forward, and a plan runs the traced operations in every step. A forward that
computes with what its last call left, in an attribute, a container, a global or a closure's variable, would
compute with the state of the first call for ever, so it is refused. A forward may leave what only the same
call reads, such as a router's loss for the job's loss. To tell them apart, a forward that changes something
is traced a second time with the new values, and must give the same graph.
"""

import ast
import re
import reprlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CellType, ModuleType
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo.side_effects import SideEffects
from torch.utils._pytree import tree_leaves

from piper.errors import CaptureError
from piper.process.attributes import replaced

Number = bool | int | float | str | None
_CONTAINERS = (list, dict, set, deque)
Place = tuple[int, str | None]  # the id of what is changed, and the name of an attribute
_MISSING = object()
# The values of these depend on no operand, or on the first one alone
_NEW = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
_CAST = ("to", "type_as")
_IMPORTED = r"^G\['__import_(.+?)'\]"  # a module, as Dynamo names it


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
            return vars(self.holder).get(self.name, _MISSING)
        return getattr(self.holder, self.name, _MISSING)

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
            delattr(holder, name) if value is _MISSING else setattr(holder, name, value)
        elif name is not None:
            vars(holder).pop(name, None) if value is _MISSING else vars(holder).update({name: value})


@contextmanager
def noting_changes() -> Iterator[dict[Place, Left]]:
    """Yield what the trace inside the block has changed, once it is over.

    Dynamo keeps a record of it, to repeat the changes after each call of what it compiles. It reads that
    record when it has traced everything.
    """
    found: dict[Place, Left] = {}
    reading = SideEffects.codegen_update_mutated

    def read(effects: Any, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401  Dynamo's own protocol
        found.update({(id(left.holder), left.name): left for left in _changes(effects) if not left.same})
        return reading(effects, *args, **kwargs)

    with replaced(SideEffects, "codegen_update_mutated", read):
        yield found


def _changes(effects: Any) -> Iterator[Left]:  # noqa: ANN401
    """Go through all that was there before the trace and is changed now."""
    existing = {id(item): item for item in effects.keepalive}
    for key, variable in effects.id_to_variable.items():
        if variable.source is None or key not in existing or not effects.is_modified(variable):
            continue
        holder, name = existing[key], variable.source.name
        changed: dict[str | None, Any] = dict(effects.store_attr_mutations.get(variable, {}))
        if isinstance(holder, (*_CONTAINERS, Iterator)):
            changed[None] = getattr(variable, "_base_vt", None) or variable
        for attribute, value in changed.items():
            if not _is_state(holder, attribute):
                computed = set[int]()
                yield Left(
                    holder=holder,
                    name=attribute,
                    source=name() if callable(name) else name,  # a method in torch 2.11
                    value=_MISSING if isinstance(holder, Iterator) else _plain(value, computed),
                    computed=frozenset(computed),
                )


def _is_state(holder: object, name: str | None) -> bool:
    return isinstance(holder, nn.Module) and name in {**holder._buffers, **holder._parameters}


def _plain(variable: Any, computed: set[int]) -> object:  # noqa: ANN401  variables of Dynamo
    """Return what a variable of Dynamo stands for, with fakes for tensors. Note those that are computed."""
    if variable.is_tensor():
        node = variable.as_proxy().node
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
        found = [_plain(item, computed) for item in items]
        return tuple(found) if issubclass(variable.python_type(), tuple) else found
    return getattr(variable, "value", None)


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


def after_another(earlier: Mapping[Place, Left], later: Mapping[Place, Left]) -> dict[Place, Left]:
    """Return what two calls leave, one after the other. Tables of the first are no inputs of the second."""
    tensors = {id(leaf) for left in earlier.values() for leaf in tree_leaves(left.value)}
    tables = tensors.difference(*(left.computed for left in earlier.values()))
    return {
        **earlier,
        **{place: replace(left, computed=left.computed - tables) for place, left in later.items()},
    }


@contextmanager
def as_left(changes: Iterable[Left]) -> Iterator[None]:
    """Put what a forward left in its places, inside the block."""
    before = [(left, left.before) for left in changes]
    try:
        for left, _ in before:
            left.assign(left.value)
        yield
    finally:
        for left, value in before:
            left.assign(value)


def same_calls(
    first: fx.Graph,
    second: fx.Graph,
    read: Sequence[Sequence[object]],
    changes: Sequence[Left],
    step: nn.Module,
) -> bool:
    """Return whether two calls compute the same. Refuse a second that reads the first one's state.

    read: the tensors that each call reads. If the calls differ only by tables that the first made and the
    second finds, of the same values, this returns False, and a third call decides.
    """
    if advanced := [left for left in changes if isinstance(left.holder, Iterator)]:
        raise left_behind(advanced, step)
    before, after = ([tensor for tensor in each if isinstance(tensor, Tensor)] for each in read)
    if str(first) == str(second) and list(map(id, before)) == list(map(id, after)):
        return True
    inputs = {id(tensor) for tensor in after}
    found = [left for left in changes if inputs & {id(leaf) for leaf in tree_leaves(left.value)}]
    blamed = [left for left in found if inputs & left.computed]
    if found and not blamed:
        return False
    raise left_behind(blamed or changes, step)


def left_behind(changes: Iterable[Left], step: nn.Module) -> CaptureError:
    """Return the error of a forward that computes with what its last call left. step: what was traced."""
    return CaptureError(
        "the forward computes with what its last call left behind",
        by="model or loss",
        facts={"changed": ", ".join(_described(left, step) for left in changes)},
        hint="keep it in a buffer, and change that in place: self.steps.add_(1)",
    )


def _described(left: Left, step: nn.Module) -> str:
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(left.value)):
        return f"{_named(left, step)} (a tensor)"
    shown = [reprlib.repr(state) for state in (left.before, left.value) if state is not _MISSING]
    return f"{_named(left, step)} ({', then '.join(shown)})"


def _named(left: Left, step: nn.Module) -> str:
    """Return the name of what was changed, as its owner would write it."""
    if left.name is not None and not isinstance(left.holder, CellType):
        kind = left.holder if isinstance(left.holder, type | ModuleType) else type(left.holder)
        names = {id(module): path for path, module in step.named_modules()}
        path = names.get(id(left.holder), "model").removeprefix("model.")
        return f"{kind.__name__ if path == 'model' else path}.{left.name}"
    if found := re.fullmatch(r"(.+)\.__closure__\[(\d+)\](\.cell_contents)?", left.source):
        function = _found(found[1], step)
        return f"{function.__code__.co_freevars[int(found[2])]} of {function.__name__}"
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", left.source)
    path = re.sub(_IMPORTED, lambda found: found[1].replace("_dot_", "."), path)
    return re.sub(r"^L\['self'\]\.(model\.|(loss)\[0\])", r"\2", path)


def _found(source: str, step: nn.Module) -> Any:  # noqa: ANN401  a function of the user
    """Return what Dynamo found at a source. Only a function knows the names of its closure's variables."""
    imported = re.match(_IMPORTED, source)
    value: Any = sys.modules[imported[1].replace("_dot_", ".")] if imported else {"L": {"self": step}}
    path = source[imported.end() :] if imported else f"['L']{source[1:]}"
    for attribute, key in re.findall(r"\.(\w+)|\[([^\]]+)\]", path):
        value = getattr(value, attribute) if attribute else value[ast.literal_eval(key)]
    return value
