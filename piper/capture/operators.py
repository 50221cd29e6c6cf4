"""Operations that compiled code calls as they are, because taking them apart costs more than it gains."""

import torch
from torch import Tensor
from torch._decomp.decompositions import embedding_dense_backward

SPARSE = 16  # rows of a table for each that is read, from which on it is mostly zeros


@torch.library.custom_op("piper::embedding_grad", mutates_args=())
def embedding_grad(grad: Tensor, rows: Tensor, length: int, padding: int, by_count: bool) -> Tensor:
    """The gradient of an embedding's table.

    Taken apart, it is added up in a float32 table and then cast: for a bf16 table of a large vocabulary that
    is three times the memory, and most of the time of its region.
    """
    made: Tensor = torch.ops.aten.embedding_dense_backward.default(grad, rows, length, padding, by_count)
    return made


@embedding_grad.register_fake
def _(grad: Tensor, rows: Tensor, length: int, padding: int, by_count: bool) -> Tensor:
    return grad.new_empty([length, *grad.shape[rows.dim() :]])


def embedding_gradient(grad: Tensor, rows: Tensor, length: int, padding: int, by_count: bool) -> Tensor:
    """The gradient of an embedding's table, taken apart where the table is not large beside what reads it.

    Whole, it sorts the rows, which takes longer than going through a small table.
    """
    sparse = length >= SPARSE * rows.numel()
    made: Tensor = (embedding_grad if sparse else embedding_dense_backward)(
        grad, rows, length, padding, by_count
    )
    return made


KEPT = {torch.ops.aten.embedding_dense_backward.default: embedding_gradient}  # instead of Inductor's own way
