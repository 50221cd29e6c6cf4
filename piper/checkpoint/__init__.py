"""Checkpoints: which device or file holds which elements, on disk and as Hugging Face models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.checkpoint.folder import latest as latest
    from piper.checkpoint.huggingface import export_hf as export_hf
    from piper.checkpoint.huggingface import import_hf as import_hf

_WHERE = {
    "export_hf": "piper.checkpoint.huggingface",
    "import_hf": "piper.checkpoint.huggingface",
    "latest": "piper.checkpoint.folder",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> object:
    if name in _WHERE:  # when first used: other modules of this package need none of them
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'piper.checkpoint' has no attribute {name!r}")
