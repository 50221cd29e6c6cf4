"""Refuses hooks on gradients, which a capture would drop or run on other numbers.

Forward hooks and forward pre-hooks of modules are part of the traced forward and stay. A hook on the gradient
of a parameter, of a value inside the forward or of a module would run on the gradient of one slice of the
samples, before the sum over slices, replicas and shards, which is another number than in plain PyTorch.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules import module as modules

from piper.capture.quirks.gradient_hooks import noticing_hooks
from piper.capture.trace_errors import tracing_line
from piper.errors import CaptureError

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
    registered: tuple[tuple[str, Mapping[int, Callable[..., object]] | None], ...] = (
        ("register_hook", tensor._backward_hooks),
        ("register_post_accumulate_grad_hook", tensor._post_accumulate_grad_hooks),
    )
    for kind, hooks in registered:
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


def no_tensor_hooks() -> AbstractContextManager[None]:
    """Refuse hooks on gradients that a forward or loss registers while it is traced inside the block."""
    return noticing_hooks(lambda where, kind: _refused(where, kind, "...", tracing_line()))
