"""Refuses hooks on gradients, which a capture would drop or run on other numbers.

Forward hooks and forward pre-hooks of modules are part of the traced forward and stay. A hook on the gradient
of a parameter, of a value inside the forward or of a module would run on the gradient of one slice of the
samples, before the sum over slices, replicas and shards, which is another number than in plain PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.modules import module as modules

from piper.capture.quirks.gradient_hooks import noticing_hooks
from piper.capture.trace_errors import tracing_line
from piper.errors import CaptureError
from piper.process.usercode import named_function

_ELSEWHERE = (
    "put the change into the optimizer's step, clip with clip_norm of Job, or write a "
    "torch.autograd.Function whose backward changes the gradient"
)


def check_hooks(model: nn.Module, loss: object) -> None:
    """Refuse hooks on gradients that the model's or the loss's constructor registered."""
    for where, kind, hooks in _registered(model, loss):
        for hook in (hooks or {}).values():
            raise _refused(where, kind, named_function(hook))


def _registered(
    model: nn.Module, loss: object
) -> Iterator[tuple[str, str, Mapping[int, Callable[..., object]] | None]]:
    """Yield the hooks on each gradient, with what has it and the function that registers them."""
    yield "every module", "register_module_full_backward_hook", modules._global_backward_hooks
    yield "every module", "register_module_full_backward_pre_hook", modules._global_backward_pre_hooks
    for what, root in (("model", model), ("loss", loss)):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            where = f"the module {path}" if path else f"the {what}"
            yield where, "register_full_backward_hook", module._backward_hooks
            yield where, "register_full_backward_pre_hook", module._backward_pre_hooks
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            where = f"the parameter {name}"
            yield where, "register_hook", parameter._backward_hooks
            yield where, "register_post_accumulate_grad_hook", parameter._post_accumulate_grad_hooks


def _refused(where: str, kind: str, hook: str, line: str = "") -> CaptureError:
    return CaptureError(
        f"{where} has a hook on its gradient",
        by=f"model{line}",
        facts={
            "hook": f"{kind}({hook})",
            "but": "it would see the gradient of one slice of the samples, not the sum over the batch",
        },
        hint=_ELSEWHERE,
    )


def no_tensor_hooks() -> AbstractContextManager[None]:
    """Refuse hooks on gradients that a forward or loss registers while it is traced inside the block."""
    return noticing_hooks(lambda where, kind: _refused(where, kind, "...", tracing_line()))
