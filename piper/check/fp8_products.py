"""Products in fp8 as the docs define them (docs/directives/precision.md), in plain PyTorch.

The reference of `piper check` uses this module. It shares no code with the captured products: a mode watches
the calls that the model makes, and rounded values are turned back into wide ones before they are multiplied.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from piper.check.slicing import BatchSlicing
from piper.directives import Directive, ShardAxis
from piper.ir.chunk import Parameter
from piper.ir.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionCut:
    """How an axis cuts a dimension of a weight, or of its rows, over devices."""

    dim: int
    degree: int
    blocks: int = 1
    zigzag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShards:
    """How the products of a weight are cut over devices, from the documented rules alone.

    A product takes its scales from the rows and slices that a device has, and so does the reference.
    """

    slices: Sequence[DimensionCut] = ()  # of the weight
    rows: Sequence[DimensionCut] = ()  # an inner axis cuts what those before it leave


def pieces_of(cuts: Sequence[DimensionCut], dim: int, size: int, device: torch.device) -> list[Tensor]:
    """Return which indices of a dimension each device has."""
    pieces = [torch.arange(size, device=device)]
    for cut in (cut for cut in cuts if cut.dim == dim):
        if cut.zigzag:
            halves = [piece.view(2 * cut.degree, -1) for piece in pieces]
            pieces = [torch.cat([each[i], each[-1 - i]]) for each in halves for i in range(cut.degree)]
        else:  # each of some equal blocks is cut into as many slices
            slices = [piece.view(cut.blocks, cut.degree, -1) for piece in pieces]
            pieces = [each[:, i].flatten() for each in slices for i in range(cut.degree)]
    return pieces


def shards_of(param: Parameter, strategy: Iterable[Directive]) -> ProductShards:
    """Return how products of a parameter are cut by a strategy.

    A weight that is whole, and whose gradient is a sum along an axis, meets the rows of each device alone.
    """
    held = {each.axis: each for each in param.placements}
    slices, rows = list[DimensionCut](), list[DimensionCut]()
    for axis in {each.axis: each for each in strategy if isinstance(each, ShardAxis)}.values():
        own = held.get(axis.axis)
        dim = axis.batch[0][1] if axis.batch else axis.between  # None: it cuts no rows
        if own is not None and isinstance(own.placement, Shard):
            cut = own.placement
            slices.append(DimensionCut(dim=cut.dim, blocks=cut.blocks, degree=own.degree))
        elif own is not None and own.partial and dim is not None:
            rows.append(DimensionCut(dim=dim, zigzag=axis.balance == "zigzag", degree=own.degree))
    return ProductShards(slices=slices, rows=rows[::-1])


Cut = tuple[Tensor | slice, Tensor | slice]  # the outputs and inputs of a slice of a weight
Groups = list[Tensor] | None  # rows whose terms of a gradient are rounded by a scale each. None: no rounding
WHOLE: Sequence[Cut] = ((slice(None), slice(None)),)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class Fp8Products(TorchFunctionMode):
    """Runs the products with some weights in fp8.

    chunks: by weight, the chunks that read it, in order. The gradient of a weight is the sum over the slices
    of the samples that a chunk's devices see at a time, and each of them is rounded by its own scales. Where
    several chunks read a tied weight, each is taken to multiply by it once.
    shards: by weight, how its products are cut over devices; each cut is rounded by its own scales.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        chunks: Mapping[str, Sequence[str]],
        shards: Mapping[str, ProductShards],
        slicing: BatchSlicing,
    ) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self.stored = {name: weight.stride() for name, weight in weights.items()}
        self.chunks, self.shards, self.slicing = chunks, shards, slicing
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
        if str(func) == "piper.grouped_mm.default" and args[1].untyped_storage().data_ptr() in self.weights:
            rows, weight, counts, transpose = args
            matrices = weight if transpose else weight.transpose(1, 2)
            parts = rows.split(counts.tolist())
            pairs = zip(parts, matrices, strict=True)
            return torch.cat([_Rounded.apply(*pair, None, WHOLE) for pair in pairs])  # type: ignore[no-untyped-call]
        operands = factors(func, args, kwargs or {})
        if operands is not None:
            x, weight, bias = operands
            name = self.weights.get(weight.untyped_storage().data_ptr())
            if name is not None:
                chunks = self.chunks[name]
                chunk = chunks[min(self.calls[name], len(chunks) - 1)]
                self.calls[name] += 1
                groups, cuts = self.groups(chunk, x, self.shards[name]), self.cuts(name, weight)
                y: Tensor = _Rounded.apply(x, weight, groups, cuts)  # type: ignore[no-untyped-call]
                return y if bias is None else y + bias
        return func(*args, **(kwargs or {}))

    def cuts(self, name: str, weight: Tensor) -> list[Cut]:
        """Return the outputs and inputs of each slice of a weight, which is given as [out, in]."""
        swapped, slices = weight.stride() != self.stored[name], self.shards[name].slices
        dims = zip((1, 0) if swapped else (0, 1), weight.shape, strict=True)
        outputs, inputs = (pieces_of(slices, dim, size, weight.device) for dim, size in dims)
        return [*product(outputs, inputs)]

    def groups(self, chunk: str, x: Tensor, shards: ProductShards) -> list[Tensor]:
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
        rows = [torch.isin(sample, part) for part in wanted]
        for dim in {cut.dim for cut in shards.rows}:  # of the axes that cut the sequence
            flat = len(shape) <= dim  # samples and places in one dimension
            length = shape.numel() // count if flat else shape[dim]
            inner = 1 if flat else shape[dim + 1 :].numel()
            place = torch.arange(shape.numel(), device=x.device) // inner % length
            own = [torch.isin(place, piece) for piece in pieces_of(shards.rows, dim, length, x.device)]
            rows = [part & each for part in rows for each in own]
        groups = [part.nonzero().squeeze(1) for part in rows]
        return [group for group in groups if len(group)]


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups, cuts: Sequence[Cut]) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.cuts = groups, cuts
        wide = widened(x)
        y = wide.new_zeros(*x.shape[:-1], weight.shape[0])
        for outputs, inputs in cuts:
            values, scale = nearest(wide[..., inputs], E4M3, dim=-1)
            matrix, rows = nearest(widened(weight)[outputs][:, inputs], E4M3, dim=-1)
            y[..., outputs] += (values * scale) @ (matrix * rows).T
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.zeros_like(widened(x)), torch.zeros_like(widened(weight))
        flat, given = widened(x).flatten(0, -2), widened(grad).flatten(0, -2)
        for outputs, inputs in ctx.cuts:
            matrix, rows = nearest(widened(weight)[outputs][:, inputs], E4M3, dim=-1)
            values, scale = nearest(widened(grad)[..., outputs] * rows.squeeze(-1), E4M3, dim=-1)
            of_x[..., inputs] += (values * scale) @ matrix
            for group in ctx.groups or ():
                left, left_scale = nearest(given[group][:, outputs], E5M2)
                right, right_scale = nearest(flat[group][:, inputs], E4M3)
                cut = (left * left_scale).T @ (right * right_scale)
                of_weight[outputs[:, None], inputs] += cut
        if ctx.groups is None:
            of_weight = grad.T @ x
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None


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
