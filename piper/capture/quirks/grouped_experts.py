"""Lets a Hugging Face model of experts compute as a plan can hold it.

Works around: transformers 5.0. Its default is torch's grouped product, which has no float64. Its "eager" is a
loop over the experts that got rows, which no graph has; the others have the same numbers.
Not needed from: no version yet.
"""

import torch
from torch import nn


def choose_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Choose the product of experts that a model's type has."""
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation in ("eager", "grouped_mm"):
        choice = "batched_mm" if dtype is torch.float64 else "grouped_mm"
        model.set_experts_implementation(choice)  # type: ignore[operator]
