"""Refuses hooks on gradients, which a capture would drop or run on other numbers.

Forward hooks and forward pre-hooks of modules are part of the traced forward and stay. A hook on the gradient
of a parameter, of a value inside the forward or of a module would run on the gradient of one slice of the
samples, before the sum over slices, replicas and shards, which is another number than in plain PyTorch.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable
from torch.nn.modules import module as modules

from piper.capture.trace_errors import tracing_line
from piper.errors import CaptureError
from piper.process.attributes import replaced

_INTERCEPTED = ("method_register_hook", "method_register_post_accumulate_grad_hook")
_ELSEWHERE = (
    "put the change into the optimizer's step, clip with clip_norm of Job, or write a "
    "torch.autograd.Function whose backward changes the gradient"
)


def check_hooks(model: nn.Module, loss: object) -> None:
    """Refuse hooks on gradients that the model's or the loss's constructor registered."""
    for kind, hooks in (
        ("register_module_full_backward_hook", modules._global_backward_hooks),
        ("register_module_full_backward_pre_hook", modules._global_backward_pre_hooks),
    ):
        for hook in hooks.values():
            raise _refused("every module", kind, hook)
    for what, root in (("model", model), ("loss", loss)):
        if isinstance(root, nn.Module):
            _check_modules(what, root)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_tensor(f"the parameter {name}", parameter)


def _check_modules(what: str, root: nn.Module) -> None:
    for path, module in root.named_modules():
        where = f"the module {path}" if path else f"the {what}"
        for kind, hooks in (
            ("register_full_backward_hook", module._backward_hooks),
            ("register_full_backward_pre_hook", module._backward_pre_hooks),
        ):
            for hook in hooks.values():
                raise _refused(where, kind, hook)


def _check_tensor(where: str, tensor: torch.Tensor) -> None:
    found: tuple[tuple[str, Mapping[int, Callable[..., object]] | None], ...] = (
        ("register_hook", tensor._backward_hooks),
        ("register_post_accumulate_grad_hook", tensor._post_accumulate_grad_hooks),
    )
    for kind, hooks in found:
        for hook in (hooks or {}).values():
            raise _refused(where, kind, hook)


def _refused(where: str, kind: str, hook: object, line: str = "") -> CaptureError:
    return CaptureError(
        f"{where} has a hook on its gradient",
        by=f"model{line}",
        facts={
            "hook": f"{kind}({_shown(hook)})",
            "but": "it would see the gradient of one slice of the samples, not the sum over the batch",
        },
        hint=_ELSEWHERE,
    )


def _shown(hook: object) -> str:
    """Return a hook's name and the line that defines it."""
    if isinstance(hook, str):
        return hook
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", None) or type(hook).__name__
    return f"{name}, line {code.co_firstlineno}" if code is not None else str(name)


def _traced(variable: object) -> str:
    """Return what a traced tensor is: `the parameter layers.0.weight`, or a value of the forward."""
    name = getattr(getattr(variable, "source", None), "name", "")
    source = str(name() if callable(name) else name)  # a method in some versions of torch
    path = re.findall(r"\._(?:modules|parameters)\['(.*?)'\]", source)
    return f"the parameter {'.'.join(path[1:])}" if "._parameters[" in source else "a value of the forward"


@contextmanager
def no_tensor_hooks() -> Iterator[None]:
    """Refuse hooks on gradients that a traced forward or loss registers.

    Dynamo silently drops a hook on a parameter. It applies a hook on another value to only a part of the
    gradient if several regions read that value. This replaces the methods of Dynamo that handle both during
    one trace, because Dynamo offers no other way to notice them.
    """
    seen: list[CaptureError] = []

    def refuse(kind: str) -> Callable[..., Any]:
        def method(variable: Any, *_: object, **__: object) -> None:  # noqa: ANN401  Dynamo's own protocol
            seen.append(_refused(_traced(variable), kind, "...", tracing_line()))
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
