"""Installs the hooks by which a Hugging Face model records hidden states and router logits.

Works around: transformers 5.0. A model installs them in its first forward, under a lock, which no trace can
follow. A backbone has installed them in its constructor; the model around it would install them again, and
each layer's output would be recorded twice. A hook of a layer that is called outside of such a model asks a
context variable whether to record, which no trace can follow; what a trace records is in an attribute.
Not needed from: no version yet.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from piper.process.attributes import replaced


def install_recorders(model: nn.Module) -> None:
    """Install the hooks of a model and its submodules, if they are Hugging Face's."""
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return
    install = capturing.install_all_output_capturing_hooks

    def install_once(module: nn.Module, prefix: str | None = None) -> None:
        if not getattr(module, "_output_capturing_hooks_installed", False):
            install(module, prefix)

    with replaced(capturing, "install_all_output_capturing_hooks", install_once):  # which calls itself
        for module in model.modules():
            if hasattr(module, "_can_record_outputs"):
                install_once(module)


@contextmanager
def asking_no_context() -> Iterator[None]:
    """Let recorders ask only for what the traces inside the block record."""
    variable = getattr(sys.modules.get("transformers.utils.output_capturing"), "CompileableContextVar", None)
    if variable is None:
        yield
        return
    with replaced(variable, "get", lambda recorder: recorder.global_var):
        yield
