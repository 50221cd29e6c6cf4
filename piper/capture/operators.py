"""Operations that compiled code calls as they are, because taking them apart costs more than it gains."""

import torch
from torch import Tensor


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


KEPT = {torch.ops.aten.embedding_dense_backward.default: embedding_grad}  # what each is called as instead
