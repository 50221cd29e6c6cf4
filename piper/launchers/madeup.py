"""First values of a model that is never built whole: of the right shapes, and of the usual size."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from piper.ir.chunk import Outline
from piper.runtime.setup import Initial, JobLike, build_model

SPREAD = 0.02  # of the elements of a matrix, as most models begin
SAMPLE = 1_000_003  # numbers that are drawn; a prime, so that no two rows are alike


def synthetic_weights(job: JobLike, outline: Outline) -> Initial:
    """Values for one device: the model's own buffers, and parameters like those it would begin with."""
    shapes = {parameter.name: parameter.shape for parameter in outline.parameters}
    buffers = buffers_alone(job)
    drawn = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(job.seed)).mul_(SPREAD)

    def initial(name: str) -> Tensor:
        if name in buffers:
            return buffers[name]
        shape = shapes[name]
        if len(shape) < 2:
            return torch.ones(shape)  # scales of norms; a bias does not mind
        if len(shape) > 2:  # experts, all alike: a device copies only its own
            return spread(drawn, shape[1:]).expand(shape)
        return spread(drawn, shape)

    return initial


def spread(drawn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As many numbers as a shape has room for, the drawn ones again and again."""
    size = torch.Size(shape).numel()
    return drawn.repeat(-(-size // len(drawn)))[:size].view(shape)


def buffers_alone(job: JobLike) -> dict[str, Tensor]:
    """A model's buffers as its constructor makes them, while its parameters take no memory."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # it may return one
    try:
        model = build_model(job)
    finally:
        hook.remove()
    return {name: value.detach() for name, value in model.named_buffers()}
