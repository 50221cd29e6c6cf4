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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CellType, ModuleType
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from piper.capture.quirks.side_effects import MISSING, Left, Place
from piper.errors import CaptureError

_IMPORTED = r"^G\['__import_(.+?)'\]"  # a module, as Dynamo names it


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
    reread = [left for left in changes if inputs & {id(leaf) for leaf in tree_leaves(left.value)}]
    blamed = [left for left in reread if inputs & left.computed]
    if reread and not blamed:
        return False
    raise left_behind(blamed or changes, step)


def left_behind(changes: Iterable[Left], step: nn.Module) -> CaptureError:
    """Return the error of a forward that computes with what its last call left. step: what was traced."""
    return CaptureError(
        "the forward computes with what its last call left behind",
        by="model or loss",
        facts={"changed": ", ".join(_described(left, step) for left in changes)},
        hint="keep it in a buffer of the model, and change that in place: self.steps.add_(1)",
    )


def _described(left: Left, step: nn.Module) -> str:
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(left.value)):
        return f"{_named(left, step)} (a tensor)"
    shown = [reprlib.repr(state) for state in (left.before, left.value) if state is not MISSING]
    return f"{_named(left, step)} ({', then '.join(shown)})"


def _named(left: Left, step: nn.Module) -> str:
    """Return the name of what was changed, as its owner would write it."""
    if left.name is not None and not isinstance(left.holder, CellType):
        kind = left.holder if isinstance(left.holder, type | ModuleType) else type(left.holder)
        names = {id(module): path for path, module in step.named_modules()}
        path = names.get(id(left.holder), "model").removeprefix("model.")
        return f"{kind.__name__ if path == 'model' else path}.{left.name}"
    if cell := re.fullmatch(r"(.+)\.__closure__\[(\d+)\](\.cell_contents)?", left.source):
        function = _object_at(cell[1], step)
        return f"{function.__code__.co_freevars[int(cell[2])]} of {function.__name__}"
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", left.source)
    path = re.sub(_IMPORTED, lambda cell: cell[1].replace("_dot_", "."), path)
    return re.sub(r"^L\['self'\]\.(model\.|(loss)\[0\])", r"\2", path)


def _object_at(source: str, step: nn.Module) -> Any:  # noqa: ANN401  a function of the user
    """Return what Dynamo found at a source. Only a function knows the names of its closure's variables."""
    imported = re.match(_IMPORTED, source)
    value: Any = sys.modules[imported[1].replace("_dot_", ".")] if imported else {"L": {"self": step}}
    path = source[imported.end() :] if imported else f"['L']{source[1:]}"
    for attribute, key in re.findall(r"\.(\w+)|\[([^\]]+)\]", path):
        value = getattr(value, attribute) if attribute else value[ast.literal_eval(key)]
    return value
