"""What a forward changes outside itself, such as a plain number in `self.steps += 1`, or a list that grows.

A trace sees one call of the forward, and a plan runs the traced operations in every step. A forward that
computes with what its last call left, in an attribute, a container, a global or a closure's variable, would
compute with the state of the first call for ever, so it is refused. A forward may leave what only the same
call reads, such as a router's loss for the job's loss. To tell them apart, a forward that changes something
is traced a second time with the new values, and must give the same graph.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, fx
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
    first: fx.Graph, second: fx.Graph, read: Sequence[Sequence[object]], changes: Sequence[Left]
) -> bool:
    """Return whether two calls compute the same. Refuse a second that reads the first one's state.

    read: the tensors that each call reads. If the calls differ only by tables that the first made and the
    second finds, of the same values, this returns False, and a third call decides.
    """
    if advanced := [left for left in changes if isinstance(left.holder, Iterator)]:
        raise left_behind(described(advanced))
    before, after = ([tensor for tensor in each if isinstance(tensor, Tensor)] for each in read)
    if str(first) == str(second) and list(map(id, before)) == list(map(id, after)):
        return True
    inputs = {id(tensor) for tensor in after}
    reread = [left for left in changes if inputs & {id(leaf) for leaf in tree_leaves(left.value)}]
    blamed = [left for left in reread if inputs & left.computed]
    if reread and not blamed:
        return False
    raise left_behind(described(blamed or changes))


def left_behind(changed: str, by: str = "model or loss") -> CaptureError:
    """Return the error of a forward that computes with what its last call left."""
    return CaptureError(
        "the forward computes with what its last call left behind",
        by=by,
        facts={"changed": changed},
        hint="keep it in a buffer of the model, and change that in place: self.steps.add_(1)",
    )


def described(changes: Iterable[Left]) -> str:
    """Return where a forward left something, as paths from the model, the loss or a module, and what."""
    return ", ".join(map(_described, changes))


def _described(left: Left) -> str:
    holder = left.holder.__name__ if isinstance(left.holder, type) else left.source
    path = holder if left.name is None else f"{holder}.{left.name}"
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(_IMPORTED, lambda module: module[1].replace("_dot_", "."), path)
    path = re.sub(r"^L\['self'\]\.(model\.|(loss)\[0\])", r"\2", path)
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(left.value)):
        return f"{path} (a tensor)"
    shown = [reprlib.repr(state) for state in (left.before, left.value) if state is not MISSING]
    return f"{path} ({', then '.join(shown)})"
