"""Samples of operations that DTensor's rules shard, at sizes that divide where torch's own samples have none that do."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.shard.verdict import Sample


def values(*shape: int) -> Tensor:
    """Return a leaf of random numbers, always the same for a shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    """Return positive definite matrices."""
    x = values(*shape).detach()
    return (x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)).requires_grad_()


ROWS, IMAGES, VOLUMES = values(12, 6, 8), values(12, 6, 8, 8), values(12, 6, 4, 4, 4)
MATRICES, SIDES, SPD = values(12, 4, 4), values(12, 4, 6), positive(12, 4, 4)
LOWER = SPD.detach().tril().requires_grad_()
PLACES = torch.tensor([2, 0, 3])
CLASSES = torch.arange(12 * 6).view(12, 6).remainder(5)
GRID = values(12, 3, 3, 3, 3).detach().tanh().requires_grad_()
Call = Callable[..., list[Tensor]]

CALLS: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
    "conv1d": (lambda x, w: [F.conv1d(x, w)], (ROWS, values(4, 6, 3))),
    "conv2d in groups": (
        lambda x, w, b: [F.conv2d(x, w, b, 2, 1, 1, 2)],
        (IMAGES, values(4, 3, 3, 3), values(4)),
    ),
    "conv3d": (lambda x, w: [F.conv3d(x, w)], (VOLUMES, values(4, 6, 3, 3, 3))),
    "transposed conv2d": (lambda x, w: [F.conv_transpose2d(x, w)], (IMAGES, values(6, 4, 3, 3))),
    "avg_pool1d": (lambda x: [F.avg_pool1d(x, 2)], (ROWS,)),
    "avg_pool2d": (lambda x: [F.avg_pool2d(x, 2)], (IMAGES,)),
    "avg_pool3d": (lambda x: [F.avg_pool3d(x, 2)], (VOLUMES,)),
    "max_pool2d": (lambda x: [F.max_pool2d(x, 2)], (IMAGES,)),
    "bicubic antialiased": (lambda x: [F.interpolate(x, (6, 6), mode="bicubic", antialias=True)], (IMAGES,)),
    "bilinear antialiased": (
        lambda x: [F.interpolate(x, (6, 6), mode="bilinear", antialias=True)],
        (IMAGES,),
    ),
    "sampled volumes": (lambda x, g: [F.grid_sample(x, g)], (VOLUMES, GRID)),
    "group norm": (lambda x, w, b: [F.group_norm(x, 3, w, b)], (IMAGES, values(6), values(6))),
    "native layer norm": (lambda x, w: [*torch.native_layer_norm(x, [8], w, None, 1e-5)], (ROWS, values(8))),
    "det": (lambda x: [torch.linalg.det(x)], (SPD,)),
    "slogdet": (lambda x: [*torch.linalg.slogdet(x)], (SPD,)),
    "inverse": (lambda x: [torch.linalg.inv(x)], (SPD,)),
    "solve": (lambda x, y: [torch.linalg.solve(x, y)], (SPD, SIDES)),
    "triangular solve": (lambda x, y: [torch.linalg.solve_triangular(x, y, upper=False)], (LOWER, SIDES)),
    "cholesky": (lambda x: [torch.linalg.cholesky(x)], (SPD,)),
    "cholesky solve": (lambda y, x: [torch.cholesky_solve(y, x)], (SIDES, LOWER)),
    "cholesky inverse": (lambda x: [torch.cholesky_inverse(x)], (LOWER,)),
    "lu": (lambda x: [*torch.linalg.lu(x)], (SPD,)),
    "lu factor": (lambda x: [torch.linalg.lu_factor(x)[0]], (SPD,)),
    "pinv": (lambda x: [torch.linalg.pinv(x)], (SPD,)),
    "diagonal scatter": (lambda x, y: [torch.diagonal_scatter(x, y, 0, 1, 2)], (MATRICES, values(12, 4))),
    "variance and mean": (lambda x: [*torch.var_mean(x, 1)], (ROWS,)),
    "deviation and mean": (lambda x: [*torch.std_mean(x, 1)], (ROWS,)),
    "median of numbers": (lambda x: [x.nanmedian(1).values], (ROWS,)),
    "filled places": (lambda x: [x.index_fill(1, PLACES, 0.5)], (ROWS,)),
    "scattered number": (lambda x: [x.scatter(1, CLASSES[:, :, None], 0.5)], (ROWS,)),
    "sum of numbers": (lambda x: [x.nansum(1)], (ROWS,)),
    "real and imaginary": (lambda x: [torch.fft.rfft(x).abs()], (ROWS,)),
    "filtered": (lambda x: [torch.fft.irfft(torch.fft.rfft(x), 8)], (ROWS,)),
    "running sums of logs": (lambda x: [x.cummin(1).values, x.cummax(1).values], (ROWS,)),
    "weights of a norm": (lambda x, g: [torch._weight_norm(x, g, 0)], (ROWS, values(12, 1, 1))),
}


def dtensor_samples() -> Iterator[Sample]:
    """Return them by name."""
    for name, (call, tensors) in CALLS.items():
        yield Sample(name=name, call=call, tensors=tensors)
