"""Operators that compiled code calls whole or decomposes otherwise than Inductor, because that is faster."""

from collections.abc import Callable

import torch
from torch import Tensor

SPARSE = 16  # rows of a table for each that is read, from which on it is mostly zeros


@torch.library.custom_op("piper::embedding_grad", mutates_args=())
def embedding_grad(grad: Tensor, rows: Tensor, length: int, padding: int, by_count: bool) -> Tensor:
    """Compute the gradient of an embedding's table."""
    # Inductor's decomposition adds up in a float32 table that is then cast. For a bf16 table of a large
    # vocabulary that takes three times the memory, and most of the time of its region. Sorting the rows
    # first, as eager code does, needs no such table, but takes longer than a small table does.
    small = length < SPARSE * rows.numel() and grad.dtype is not torch.float64 and not by_count
    if small and grad.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return through_table(grad, rows, length, padding)
    table: Tensor = torch.ops.aten.embedding_dense_backward.default(grad, rows, length, padding, by_count)
    return table


EMBEDDING_GRAD = torch.ops.piper.embedding_grad.default


@embedding_grad.register_fake
def _(grad: Tensor, rows: Tensor, length: int, padding: int, by_count: bool) -> Tensor:
    return grad.new_empty([length, *grad.shape[rows.dim() :]])


def through_table(grad: Tensor, rows: Tensor, length: int, padding: int) -> Tensor:
    """Add up gradient rows in single precision, in any order, and cast at the end."""
    width = grad.shape[rows.dim() :]
    table = grad.new_zeros([length, *width], dtype=torch.float32)
    table.index_add_(0, rows.reshape(-1), grad.reshape(-1, *width).float())
    if padding >= 0:
        table[padding] = 0.0
    return table.to(grad.dtype)


def silu(x: Tensor) -> Tensor:
    """Compute silu from the sigmoid that its gradient reads too."""
    # Inductor's own divides where this multiplies, and by an exact exponential. Where a kernel rounds what
    # it computes to fp8 as well, these two are most of its time.
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide * wide.sigmoid()).to(x.dtype)


def silu_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of silu."""
    wide = x if x.dtype is torch.float64 else x.float()
    share = wide.sigmoid()
    return (grad.to(wide.dtype) * share * (1 + wide * (1 - share))).to(x.dtype)


# In place of Inductor's own.
DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Tensor]] = {
    torch.ops.aten.embedding_dense_backward.default: embedding_grad,
    torch.ops.aten.silu.default: silu,
    torch.ops.aten.silu_backward.default: silu_grad,
}


# Through `Library`: `custom_op` takes several times as long to call, and there is a call for each product.
_library = torch.library.Library("piper", "FRAGMENT")
_library.define("mm_into(Tensor left, Tensor right, Tensor(a!) out, Tensor add) -> ()")
mm_into = torch.ops.piper.mm_into.default
_library.define(
    "embedding_grad_into(Tensor grad, Tensor rows, Tensor(a!) out, Tensor add, int padding) -> ()"
)
embedding_grad_into = torch.ops.piper.embedding_grad_into.default


def _mm_into(left: Tensor, right: Tensor, out: Tensor, add: Tensor) -> None:
    """Write left^T right into given memory, or add it. Inductor would copy that of `aten.mm.out`."""
    # Both have rows in their last axis. They become matrices here, because for a view of a fused result
    # Inductor computes that result once more. `add` is on the host, so that one compiled graph does both and
    # no device is waited for.
    columns, rows = left.flatten(0, -2).t(), right.flatten(0, -2)
    if out.dtype is columns.dtype:
        out.addmm_(columns, rows) if add.item() else torch.mm(columns, rows, out=out)
    elif not out.is_cuda:
        product = torch.mm(columns, rows)
        out.add_(product) if add.item() else out.copy_(product)
    elif add.item():  # a sum in float32: a GPU adds the product to it before it is rounded
        torch.ops.aten.addmm.dtype_out(out, columns, rows, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(columns, rows, out.dtype, out=out)


def _embedding_grad_into(grad: Tensor, rows: Tensor, out: Tensor, add: Tensor, padding: int) -> None:
    """Write the gradient of an embedding's table into given memory, or add the rows that were read."""
    # In the same order each time: on a GPU `index_put_` sorts rows, where `index_add_` takes any order.
    places, given = rows.reshape(-1), grad.reshape(-1, *grad.shape[rows.dim() :]).to(out.dtype)
    if padding >= 0:
        given = given.masked_fill((places == padding).unsqueeze(-1), 0.0)
    if not add.item():
        out.zero_()
    if out.is_cuda:
        out.index_put_((places,), given, accumulate=True)
    else:
        out.index_add_(0, places, given)


for _name, _kernel in (("mm_into", _mm_into), ("embedding_grad_into", _embedding_grad_into)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piper::{_name}", lambda *arguments: None, lib=_library)
