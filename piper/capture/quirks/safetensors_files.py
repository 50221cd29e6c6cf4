"""Lets a constructor read safetensors files into fake tensors.

Works around: torch 2.11. `torch.asarray` of a storage, by which safetensors makes tensors, fails among fake
tensors. A fake needs the length of the storage alone.
Not needed from: no version yet.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from piper.process.attributes import replaced


def reading_safetensors() -> AbstractContextManager[None]:
    """Let a storage become a tensor, which is a fake where the block makes fakes."""
    before = torch.asarray

    def asarray(obj: object, *, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        if not isinstance(obj, torch.UntypedStorage):
            return before(obj, dtype=dtype, **options)  # type: ignore[arg-type]
        kind = dtype or torch.uint8
        return torch.empty(obj.nbytes() // kind.itemsize, dtype=kind, device="cpu")

    return replaced(torch, "asarray", asarray)
