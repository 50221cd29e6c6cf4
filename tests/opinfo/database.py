"""The samples of torch's own tests: of every operation, and of every module."""

import sys
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.opinfo.sample import Sample

_TYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)
_UNDEFINED = ("empty", "new_empty")


def operations() -> Sequence[Any]:
    """Return torch's database of operations. It takes seconds to import."""
    _stand_in()
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def modules() -> Sequence[Any]:
    """Return torch's database of modules."""
    _stand_in()
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def _stand_in() -> None:
    if "expecttest" not in sys.modules:  # torch's tests import it, and its samples do not use it
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def name_of(operation: Any) -> str:  # noqa: ANN401  an OpInfo
    variant = operation.variant_test_name
    return f"{operation.name}.{variant}" if variant else str(operation.name)


def samples(operation: Any) -> Iterator[Sample]:  # noqa: ANN401
    """Return the samples of an operation as a function, then those of the method that writes in place."""
    supported = operation.supported_dtypes("cpu")
    dtype = next((dtype for dtype in _TYPES if dtype in supported), None)
    if dtype is None:
        return
    name, trains = name_of(operation), dtype.is_floating_point or dtype.is_complex
    in_place = operation.inplace_variant
    for given in operation.sample_inputs("cpu", dtype, requires_grad=trains and operation.supports_autograd):
        args = (given.input, *given.args)
        if any(_strange(leaf) for leaf in pytree.tree_leaves((args, given.kwargs))):
            continue
        made = Sample(
            name=name,
            call=_plain(operation.get_op()),
            args=args,
            kwargs=given.kwargs,
            differentiable=trains,
            values=not operation.name.startswith(_UNDEFINED),
            marked=True,
        )
        yield made
        if in_place is not None and not given.broadcasts_input:
            yield replace(made, name=f"{name} in place", call=_plain(in_place), inside=True)


def module_samples(info: Any) -> Iterator[Sample]:  # noqa: ANN401  a ModuleInfo
    """Return the samples of a module as it trains."""
    given = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=True)
    for each in given:
        made, called = each.constructor_input, each.forward_input
        if called is None or any(_strange(leaf) for leaf in pytree.tree_leaves((called.args, called.kwargs))):
            continue
        yield Sample(
            name=info.name,
            call=partial(_built, info.module_cls, made.args, made.kwargs),
            args=called.args,
            kwargs=called.kwargs,
            marked=True,
            is_module=True,
        )


def _built(kind: Any, args: Sequence[Any], kwargs: Any) -> nn.Module:  # noqa: ANN401
    made: nn.Module = kind(*args, **kwargs).to(torch.float64)
    return made


def _strange(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.layout != torch.strided or type(leaf) is not Tensor)


def _plain(call: Any) -> Any:  # noqa: ANN401
    """Return the function that draws where the database wraps it to set a seed, which no trace can do."""
    code = getattr(call, "__code__", None)
    if code is None or not {"wrapper_set_seed", "torch"} <= set(code.co_names):
        return call
    found: Any = torch
    for part in code.co_names[code.co_names.index("torch") + 1 :]:
        found = getattr(found, part)
    return partial(found, inplace=True) if True in code.co_consts else found
