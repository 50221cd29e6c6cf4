"""Installs the hooks by which a Hugging Face model records hidden states and router logits.

Works around: transformers 5.0. A model installs them in its first forward, under a lock, which no trace can
follow.
Not needed from: no version yet.
"""

import sys

from torch import nn


def install_recorders(model: nn.Module) -> None:
    """Install the hooks of a model and its submodules, if they are Hugging Face's."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    for module in model.modules():
        if capturing is not None and hasattr(module, "_can_record_outputs"):
            capturing.maybe_install_capturing_hooks(module)
