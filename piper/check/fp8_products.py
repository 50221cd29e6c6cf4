"""Products in fp8 as the docs define them (docs/directives/precision.md), in plain PyTorch.

The reference of `piper check` uses this module. It shares no code with the captured products: a mode watches
the calls that the model makes, and rounded values are turned back into wide ones before they are multiplied.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from piper.check.slicing import BatchSlicing

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class Fp8Products(TorchFunctionMode):
    """Runs the products with some weights in fp8.

    chunks: by weight, the chunks that read it, in order. The gradient of a weight is the sum over the slices
    of the samples that a chunk's devices see at a time, and each of them is rounded by its own scales. Where
    several chunks read a tied weight, each is taken to multiply by it once.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], chunks: Mapping[str, Sequence[str]], slicing: BatchSlicing
    ) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self.chunks, self.slicing = chunks, slicing
        self.total = 0  # samples of the global batch
        self.samples: Sequence[int] = ()  # those of the forward that is watched
        self.calls: Counter[str] = Counter()  # its products so far, by weight
        self.unsure = False  # rows had two axes as long as there are samples: the first was taken

    @contextmanager
    def on(self, samples: Sequence[int]) -> Iterator[None]:
        """Watch a forward of these samples of the global batch."""
        self.samples = samples
        self.calls.clear()
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        operands = factors(func, args, kwargs or {})
        if operands is not None:
            x, weight, bias = operands
            name = self.weights.get(weight.untyped_storage().data_ptr())
            if name is not None:
                chunks = self.chunks[name]
                chunk = chunks[min(self.calls[name], len(chunks) - 1)]
                self.calls[name] += 1
                y: Tensor = _Rounded.apply(x, weight, self.groups(chunk, x))  # type: ignore[no-untyped-call]
                return y if bias is None else y + bias
        return func(*args, **(kwargs or {}))

    def groups(self, chunk: str, x: Tensor) -> list[Tensor]:
        """Return the rows of x that belong to each slice of the samples, by a chunk's devices."""
        shape, count = x.shape[:-1], len(self.samples)
        fitting = [axis for axis, size in enumerate(shape) if size == count]
        axis = fitting[0] if fitting else 0
        self.unsure |= len(fitting) > 1
        if shape[axis] % count:  # rows that are no longer the samples': all are one slice
            return [torch.arange(shape.numel(), device=x.device)]
        sizes = [-1 if i == axis else 1 for i in range(len(shape))]
        numbers = torch.tensor(self.samples, device=x.device).repeat_interleave(shape[axis] // count)
        sample = numbers.reshape(sizes).expand(shape).reshape(-1)
        parts = self.slicing.slices(chunk, self.total)
        wanted = (torch.tensor(part.samples, device=x.device) for part in parts)
        rows = [torch.isin(sample, part).nonzero().squeeze(1) for part in wanted]
        return [group for group in rows if len(group)]


def factors(func: object, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:  # noqa: ANN401
    """Return x, a weight [out, in] and the bias of a call that multiplies rows by a matrix; else None."""
    if func is linear:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias")
    matrices = all(isinstance(each, Tensor) for each in args) and args and args[-1].dim() == 2
    if func in MATMULS and len(args) == 2 and matrices and args[0].dim() > 1:
        return args[0], args[1].t(), None
    if func is torch.addmm and len(args) == 3 and not kwargs:
        return args[1], args[2].t(), args[0]
    return None


class _Rounded(torch.autograd.Function):
    """A linear layer whose operands are rounded to fp8 and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: list[Tensor]) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        values, scale = nearest(widened(x), E4M3, dim=-1)
        matrix, rows = nearest(widened(weight), E4M3, dim=-1)
        y = (values * scale) @ (matrix * rows).T
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        matrix, rows = nearest(widened(weight), E4M3, dim=-1)
        values, scale = nearest(widened(grad) * rows.squeeze(-1), E4M3, dim=-1)
        of_x = (values * scale) @ matrix
        flat, given = widened(x).flatten(0, -2), widened(grad).flatten(0, -2)
        of_weight = torch.zeros_like(widened(weight))
        for group in ctx.groups:
            left, left_scale = nearest(given[group], E5M2)
            right, right_scale = nearest(flat[group], E4M3)
            of_weight += (left * left_scale).T @ (right * right_scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def widened(values: Tensor) -> Tensor:
    """Return values in the type of sums."""
    return values if values.dtype is torch.float64 else values.float()


def nearest(values: Tensor, kind: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return values in units of their scale, at the nearest fp8 numbers, and the scale.

    dim: the dimension along which values share a scale. None: all do.
    """
    most = torch.finfo(kind).max
    size = values.abs().max() if dim is None else values.abs().max(dim, keepdim=True).values
    size = torch.where(size > 0, size, torch.ones_like(size))
    return (values * (most / size)).clamp(-most, most).to(kind).to(values.dtype), size / most
