"""Adapters that peft puts around a Hugging Face model: merged into their base, or saved by themselves."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piper.checkpoint.huggingface import write_export


def is_adapted(model: nn.Module) -> bool:
    """Return whether peft has wrapped a model, without importing peft."""
    peft = sys.modules.get("peft")  # a model of peft has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def merged(model: Any) -> Any:  # noqa: ANN401  peft has no types for it
    """Return the base of a model that peft has wrapped, with its adapters added to the base's weights."""
    return model.merge_and_unload()


def export_adapter(model: Any, folder: Path | str, dtype: torch.dtype | None = None) -> None:  # noqa: ANN401
    """Write the adapter of a model alone, as `PeftModel.from_pretrained` reads it.

    dtype: what to write it as; None: as it is.
    """
    made = model if dtype is None else model.to(dtype)
    write_export(folder, made.save_pretrained)
