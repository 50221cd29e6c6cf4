"""The samples of torch's own database of operations, as functions of tensors, at sizes that divide."""

import sys
import unittest
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.capture.shard.verdict import Sample

INVALID = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)  # at a size, eager raises these
SIZE, TORCH_SIZE = 12, 5  # the first divides by 2, 3 and 4


def operations() -> dict[str, Any]:
    """Return torch's database of operations by name. It takes seconds to import."""
    if "expecttest" not in sys.modules:  # torch's tests import it, and its samples do not use it
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    names = {}
    for op in op_db:
        names[f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name] = op
    return names


@contextmanager
def _sized(size: int) -> Iterator[None]:
    """Let torch make samples of another size than its own."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.testing._internal") and getattr(module, "S", None) == TORCH_SIZE:
                stack.enter_context(patch.multiple(module, S=size, M=2 * size, create=True))
        yield


def samples(name: str, op: Any, limit: int) -> Iterator[Sample]:  # noqa: ANN401  an OpInfo
    """Return samples of an operation that differ in shapes or arguments, and some with an operand repeated.

    Operations whose samples are valid at torch's own size alone have that size.
    """
    distinct = _distinct(name, op, SIZE) or _distinct(name, op, TORCH_SIZE)
    step = max(1, -(-len(distinct) // limit))
    for sample in distinct[::step]:
        yield sample
        alike = len(sample.tensors) > 1 and sample.tensors[0].shape == sample.tensors[1].shape
        if alike and sample.tensors[0].dtype is sample.tensors[1].dtype:
            repeated = _repeated(sample)
            if repeated is not None:
                yield repeated


def _distinct(name: str, op: Any, size: int) -> list[Sample]:  # noqa: ANN401
    supported = op.supported_dtypes("cpu")
    dtype = next((t for t in (torch.float64, torch.int64, torch.bool) if t in supported), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    by_shape: dict[str, Sample] = {}
    trained = dtype.is_floating_point and op.supports_autograd
    try:
        with _sized(size):
            every = list(op.sample_inputs("cpu", dtype, requires_grad=trained))
    except INVALID:
        return []
    for given in every:
        if size != TORCH_SIZE and {"lengths", "offsets"} & given.kwargs.keys():
            continue  # of segments that fit torch's size alone: unchecked, torch would read past its memory
        sample = _sample(f"{name} {len(by_shape)}", op, given)
        if sample is not None:
            key = pytree.tree_map(
                lambda x: tuple(x.shape) if isinstance(x, Tensor) else x, (given.args, given.kwargs)
            )
            by_shape.setdefault(repr((key, [tuple(t.shape) for t in sample.tensors])), sample)
    return list(by_shape.values())


def _sample(name: str, op: Any, given: Any) -> Sample | None:  # noqa: ANN401
    leaves, spec = pytree.tree_flatten(((given.input, *given.args), given.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = tuple(leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in where)
    if not tensors or any(_strange(leaves[i]) for i in where) or sum(t.numel() for t in tensors) > 200_000:
        return None

    def call(*values: Tensor) -> Sequence[Tensor]:
        filled = list(leaves)
        for i, value in zip(where, values, strict=True):
            filled[i] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        made = op.get_op()(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]

    return _valid(Sample(name=name, call=call, tensors=tensors))


def _valid(sample: Sample) -> Sample | None:
    """Return a sample unless eager PyTorch refuses it, or makes something else than plain real tensors."""
    try:
        results = sample.call(*(tensor.clone() for tensor in sample.tensors))
    except INVALID:
        return None
    return None if not results or any(_strange(result) for result in results) else sample


def _strange(value: Tensor) -> bool:
    return value.layout != torch.strided or value.is_complex() or type(value) is not Tensor


def _repeated(sample: Sample) -> Sample | None:
    """Return a sample whose second operand is its first."""

    def call(first: Tensor, *others: Tensor) -> Sequence[Tensor]:
        return sample.call(first, first, *others)

    tensors = (sample.tensors[0], *sample.tensors[2:])
    return _valid(Sample(name=f"{sample.name} repeated", call=call, tensors=tensors))
