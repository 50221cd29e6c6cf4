"""Lets a forward ask what a class is called and where it is, as peft asks of weights that may be quantized.

Works around: torch 2.11. Dynamo knows no method of the text `type(weight).__module__`.
Not needed from: no version yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables import ConstantVariable, GetAttrVariable

from piper.process.attributes import replaced


@contextmanager
def reading_class_texts() -> Iterator[None]:
    """Call methods of a text that a class has as those of a constant, in the traces inside the block."""
    calling: Any = GetAttrVariable.call_method

    def call(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> object:  # noqa: ANN401
        if variable.name in ("__module__", "__name__", "__qualname__"):
            return ConstantVariable.create(variable.as_python_constant()).call_method(tx, name, args, kwargs)
        return calling(variable, tx, name, args, kwargs)

    with replaced(GetAttrVariable, "call_method", call):
        yield
