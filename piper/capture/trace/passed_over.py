"""Calls that a trace passes over: prints, logs, warnings, checkpoints, attributes of tensors, kinds of masks.

Printing and logging happen in no step: a plan runs only what computes. A checkpoint of `torch.utils` says
what to save, not what to compute, and in Piper a strategy says that: its function is traced as if called
directly, so that regions inside it are seen. Checkpointed models let their inputs require a gradient, which
nothing reads. torch's Transformer compares a mask with a causal one, to choose a faster kernel for the same
values: no trace can branch on that. `self.steps += 1` changes a buffer in place, and then assigns it to
itself, which does nothing.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pprint import pprint
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.nn.modules import transformer

from piper.capture.trace.left_state import Left, Place, noting_changes
from piper.capture.trace_errors import tracing_line
from piper.process.attributes import replaced

# Where Dynamo handles `setattr`: torch 2.13 has a class for it, torch 2.11 has none.
SETATTR: tuple[Any, str] = (
    (builtin.SetAttrBuiltinVariable, "_call_setattr")
    if hasattr(builtin, "SetAttrBuiltinVariable")
    else (builtin.BuiltinVariable, "call_setattr")
)
SILENT: tuple[Callable[..., object], ...] = (
    print,
    pprint,
    warnings.warn,
    logging.debug,
    logging.info,
    logging.warning,
    logging.error,
    logging.critical,
    logging.exception,
    logging.log,
)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """What a trace passed over that matters all the same."""

    checkpoints: list[str]  # the lines that call them
    left: Mapping[Place, Left]  # what the forward leaves behind


@contextmanager
def passing_over() -> Iterator[PassedOver]:
    """Pass over such calls during one trace. Yield the record of checkpoints and changed attributes.

    Dynamo has a setting for functions, and none for the others: this replaces its methods that handle them.
    """
    checkpoints: list[str] = []
    setting, requiring = getattr(*SETATTR), TensorVariable.method_requires_grad_

    def checkpointed(variable: object, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> object:  # noqa: ANN401  Dynamo's own protocol
        checkpoints.append(tracing_line().strip(" ()"))
        _, passed = TagActivationCheckpoint.divide_kwargs(kwargs)
        return args[0].call_function(tx, args[1:], passed)

    def logged(variable: object, tx: object, name: str, args: object, kwargs: object) -> ConstantVariable:
        return ConstantVariable.create(None)

    def set_attribute(variable: Any, tx: Any, value: Any, name: Any, to: Any) -> object:  # noqa: ANN401
        if value.is_tensor() and _constant(name) == "requires_grad" and _constant(to) is True:
            return to
        if _holds(value, tx, _constant(name), to):
            return to
        return setting(variable, tx, value, name, to)

    def require(value: Any, tx: Any, requires_grad: Any = True) -> object:  # noqa: ANN401
        wanted = requires_grad is True or _constant(requires_grad) is True
        return value if wanted else requiring(value, tx, requires_grad)

    with (
        noting_changes() as left,
        replaced(CheckpointHigherOrderVariable, "_call_function", checkpointed),
        replaced(LoggingLoggerVariable, "call_method", logged),
        replaced(*SETATTR, set_attribute),
        replaced(TensorVariable, "method_requires_grad_", require),
        replaced(transformer, "_detect_is_causal_mask", _known_to_be_causal),
        torch._dynamo.config.patch(ignore_logging_functions={*SILENT}),
    ):
        yield PassedOver(checkpoints, left)


def _known_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the caller says that a mask is causal. Otherwise the mask is used as it is."""
    return is_causal is True


def _holds(module: Any, tx: Any, name: object, tensor: Any) -> bool:  # noqa: ANN401
    """Return whether a tensor is the buffer that a module has by this name, perhaps changed in place."""
    if not tensor.is_tensor() or name not in getattr(getattr(module, "value", None), "_buffers", ()):
        return False
    held = module.var_getattr(tx, name)
    return held.is_tensor() and _traced_value(held) is _traced_value(tensor)


def _traced_value(tensor: Any) -> object:  # noqa: ANN401
    """Return the fake tensor behind a variable of Dynamo: in-place calls return the one they are given."""
    return tensor.as_proxy().node.meta["example_value"]


def _constant(variable: Any) -> object:  # noqa: ANN401
    """Return the constant behind a variable of Dynamo. None: it has none."""
    return variable.as_python_constant() if variable.is_python_constant() else None
