"""Notices hooks on gradients that a traced forward registers.

Works around: torch 2.11. Dynamo silently drops a hook on a parameter. It applies a hook on another value to
only a part of the gradient if several regions read that value. It offers no way to notice either, so the
methods that handle them are replaced during one trace. torch 2.15 drops them elsewhere, without an error.
Not needed from: no version yet.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._dynamo.variables.tensor import TensorVariable

from piper.capture.quirks.side_effects import source_name
from piper.process.attributes import replaced

_INTERCEPTED = ("method_register_hook", "method_register_post_accumulate_grad_hook")


@contextmanager
def noticing_hooks(refused: Callable[[str, str], Exception]) -> Iterator[None]:
    """Raise an error where a forward that is traced inside the block registers a hook on a gradient.

    refused: makes the error from what the tensor is, and the name of the method that registers the hook.
    """
    seen: list[Exception] = []

    def refuse(kind: str) -> Callable[..., Any]:
        def method(variable: Any, *_: object, **__: object) -> None:  # noqa: ANN401  Dynamo's own protocol
            seen.append(refused(_described(variable), kind))
            raise seen[0]

        return method

    with ExitStack() as stack:
        for name in _INTERCEPTED:
            stack.enter_context(replaced(TensorVariable, name, refuse(name.removeprefix("method_"))))
        try:
            yield
        except Exception as error:
            if seen:  # Dynamo wraps what is raised while it traces
                raise seen[0] from error
            raise


def _described(variable: object) -> str:
    """Return what a traced tensor is: `the parameter layers.0.weight`, or a value of the forward."""
    source = source_name(getattr(variable, "source", None))
    path = re.findall(r"\._(?:modules|parameters)\['(.*?)'\]", source)
    return f"the parameter {'.'.join(path[1:])}" if "._parameters[" in source else "a value of the forward"
