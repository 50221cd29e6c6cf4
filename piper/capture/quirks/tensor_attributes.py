"""Leaves assignments to tensors that change no value out of a trace.

Checkpointed models let their inputs require a gradient, which nothing reads. `self.steps += 1` changes a
buffer in place, and then assigns it to itself, which does nothing.

Works around: torch 2.11. Dynamo refuses the first, and records the second as a new buffer.
Not needed from: no version yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables import TensorVariable, builtin

from piper.process.attributes import replaced

# Where Dynamo handles `setattr`: torch 2.13 has a class for it, torch 2.11 has none.
SETATTR: tuple[Any, str] = (
    (builtin.SetAttrBuiltinVariable, "_call_setattr")
    if hasattr(builtin, "SetAttrBuiltinVariable")
    else (builtin.BuiltinVariable, "call_setattr")
)


@contextmanager
def leaving_out_assignments() -> Iterator[None]:
    """Leave assignments that change no value out of the traces inside the block."""
    setting, requiring = getattr(*SETATTR), TensorVariable.method_requires_grad_

    def set_attribute(variable: Any, tx: Any, value: Any, name: Any, to: Any) -> object:  # noqa: ANN401
        if value.is_tensor() and _constant(name) == "requires_grad" and _constant(to) is True:
            return to
        if _is_buffer(value, tx, _constant(name), to):
            return to
        return setting(variable, tx, value, name, to)

    def require(value: Any, tx: Any, requires_grad: Any = True) -> object:  # noqa: ANN401
        wanted = requires_grad is True or _constant(requires_grad) is True
        return value if wanted else requiring(value, tx, requires_grad)

    with replaced(*SETATTR, set_attribute), replaced(TensorVariable, "method_requires_grad_", require):
        yield


def _is_buffer(module: Any, tx: Any, name: object, tensor: Any) -> bool:  # noqa: ANN401
    """Return whether a tensor is the buffer that a module has by this name, perhaps changed in place."""
    if not tensor.is_tensor() or name not in getattr(getattr(module, "value", None), "_buffers", ()):
        return False
    buffer = module.var_getattr(tx, name)
    return buffer.is_tensor() and _traced_value(buffer) is _traced_value(tensor)


def _traced_value(tensor: Any) -> object:  # noqa: ANN401
    """Return the fake tensor behind a variable of Dynamo: in-place calls return the one they are given."""
    return tensor.as_proxy().node.meta["example_value"]


def _constant(variable: Any) -> object:  # noqa: ANN401
    """Return the constant behind a variable of Dynamo. None: it has none."""
    return variable.as_python_constant() if variable.is_python_constant() else None
