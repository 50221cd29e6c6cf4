"""Lets a Hugging Face model that computes in float64 multiply expert by expert.

Works around: transformers 5.0. Its default is torch's grouped product, which has no float64.
Not needed from: no version yet.
"""

import torch
from torch import nn


def choose_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Choose the product of experts that a model's type has."""
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if dtype is torch.float64 and implementation == "grouped_mm":
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
