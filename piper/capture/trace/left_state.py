"""Attributes that a forward changes, such as a plain number in `self.steps += 1`.

A trace sees one call of the forward, and a plan runs the traced operations in every step. A forward that
computes with what its last call left in an attribute would compute with the state of the first call for ever,
so it is refused. A forward may leave what only the same call reads, such as a router's loss for the job's
loss. To tell them apart, a forward that changes attributes is traced a second time with the new
values, and must give the same graph.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from piper.errors import CaptureError

Number = bool | int | float | str | None
_MISSING = object()
# The values of these depend on no operand, or on the first one alone
_NEW = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
_CAST = ("to", "type_as")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One attribute as the forward leaves it."""

    holder: object
    name: str
    value: object  # a number, a string or None; or a fake tensor
    computed: bool  # a tensor that depends on parameters, buffers or the batch

    @property
    def before(self) -> object:
        return vars(self.holder).get(self.name, _MISSING)

    @property
    def same(self) -> bool:
        """Return whether the attribute has this number, string or None already."""
        number = isinstance(self.value, Number) and type(self.value) is type(self.before)
        return number and self.value == self.before


@dataclass(frozen=True, slots=True)
class LeftState:
    """Collects the attributes that a trace changes; a later change of one replaces the earlier."""

    changes: dict[tuple[int, str], Left]

    def note(self, owner: Any, name: object, value: Any) -> None:  # noqa: ANN401  variables of Dynamo
        """Note that the forward assigns to an attribute of an object that is older than the call."""
        holder = getattr(owner, "value", None)
        if owner.source is None or not isinstance(name, str) or not hasattr(holder, "__dict__"):
            return
        if isinstance(holder, nn.Module) and name in {**holder._buffers, **holder._parameters}:
            return
        self.changes.pop((id(holder), name), None)
        if (left := _left(holder, name, value)) and not left.same:
            self.changes[id(holder), name] = left


def _left(holder: object, name: str, value: Any) -> Left | None:  # noqa: ANN401
    """Return what is left in an attribute. None: neither a number nor a tensor, so it is not followed."""
    if value.is_tensor():
        node = value.as_proxy().node
        tensor = node.meta["example_value"].detach()
        return Left(holder=holder, name=name, value=tensor, computed=_computed(node))
    if value.is_python_constant() and isinstance(found := value.as_python_constant(), Number):
        return Left(holder=holder, name=name, value=found, computed=False)
    return None


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


@contextmanager
def as_left(changes: Iterable[Left]) -> Iterator[None]:
    """Give attributes the values that a forward left, inside the block."""
    before = [(left, left.before) for left in changes]
    try:
        for left, _ in before:
            _assign(left.holder, left.name, left.value)
        yield
    finally:
        for left, value in before:
            _assign(left.holder, left.name, value)


def _assign(holder: object, name: str, value: object) -> None:
    """Set an attribute past any `__setattr__` of its own; a missing value deletes it."""
    if isinstance(holder, type):
        delattr(holder, name) if value is _MISSING else setattr(holder, name, value)
    elif value is _MISSING:
        vars(holder).pop(name, None)
    else:
        vars(holder)[name] = value


def check_same(
    first: fx.Graph, second: fx.Graph, read: Sequence[object], changes: Sequence[Left], model: nn.Module
) -> None:
    """Refuse a forward whose second call computes something else.

    read: the tensors that the second call reads.
    """
    inputs = {id(tensor) for tensor in read if isinstance(tensor, Tensor)}
    found = [left for left in changes if id(left.value) in inputs]
    if found and not any(left.computed for left in found):
        return  # tables that the first call made, and the second finds: the values are the same
    if not found and str(first) == str(second):
        return
    blamed = [left for left in found if left.computed] or changes
    names = {id(module): path for path, module in model.named_modules()}
    raise CaptureError(
        "the forward computes with what its last call left in an attribute",
        by="model",
        facts={"changed": ", ".join(_described(left, names) for left in blamed)},
        hint="keep it in a buffer, and change that in place: self.steps.add_(1)",
    )


def _described(left: Left, names: Mapping[int, str]) -> str:
    kind = left.holder if isinstance(left.holder, type) else type(left.holder)
    owner = names.get(id(left.holder)) or kind.__name__
    if isinstance(left.value, Tensor):
        return f"{owner}.{left.name} (a tensor)"
    was = "" if left.before is _MISSING else f"{left.before!r}, then "
    return f"{owner}.{left.name} ({was}{left.value!r})"
