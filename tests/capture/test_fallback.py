"""A chunk that cannot be traced backward runs under eager autograd, behind the same interface."""

from typing import Any

import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.ir.chunk import PhaseSpec, TensorSpec
from tests import zoo
from tests.capture.capturing import check


@torch.library.custom_op("piper_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


@square.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401  autograd's protocol
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
    (x,) = ctx.saved_tensors
    result: Tensor = grad * x * (2.0 if float(x.sum()) < 1e9 else 0.0)  # reads a value: no trace can follow
    return result


square.register_autograd(_backward, setup_context=_save)


class Stubborn(nn.Module):
    """The middle stage cannot be traced; it has a buffer that changes and a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
        with annotate("PP"):
            x = self.norm(square(self.b(x)))
        with annotate("PP"):
            result: Tensor = self.c(x)
        return result


def test_an_untraceable_chunk_falls_back_to_eager_autograd() -> None:
    code = check(Stubborn, zoo.regression, zoo.vectors(4, 0))
    assert list(code.fallbacks) == ["PP=1"]
    assert "data-dependent" in code.fallbacks["PP=1"]
    chunk = code.outline.chunks[1]
    trained = ("b.weight", "norm.weight", "norm.bias")
    assert chunk.saved == (TensorSpec(shape=(), dtype="object", nbytes=0),)
    assert chunk.mutated == ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert [spec.shape for spec in chunk.carried] == [(16, 16), (16,), (16,)]
    assert chunk.kept_inputs == {"B": (0,), "BI": (0,)}
    assert chunk.phases == {
        "F": PhaseSpec(inputs=(0,), params=chunk.params, buffers=chunk.buffers),
        "B": PhaseSpec(saved=(0,), tangents=(0,), grad_inputs=(0,), grad_params=trained),
        "BI": PhaseSpec(saved=(0,), tangents=(0,), grad_inputs=(0,)),
        "BW": PhaseSpec(carried=(0, 1, 2), grad_params=trained),
    }
