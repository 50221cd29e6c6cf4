"""Refuses LayerDrop, which skips layers by chance: a plan runs the same layers in every step.

Works around: transformers 5.0. Its models draw a number before each layer and compare it even where the
probability to skip the layer is 0, and one graph cannot branch on a number that is drawn. There the number
does not matter: no draw is below 0.
Not needed from: no version yet.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from piper.errors import CaptureError
from piper.process.attributes import replaced

# As Hugging Face writes it: the probability is the module's, or its configuration's.
DRAW, COMPARED = "torch.rand([])", re.compile(r"< self\.((?:config\.)?\w*layerdrop)\b")


@contextmanager
def no_layer_dropped(model: nn.Module) -> Iterator[None]:
    """Let a model whose LayerDrop has the probability 0 be traced: its draws are 1, and never below 0."""
    found = [(module, draws(type(module))) for module in model.modules() if module.training]
    drawing = [(module, attribute) for module, attribute in found if attribute is not None]
    if not all(attribute for _, attribute in drawing):
        drawing = []  # a number is drawn for something else
    for module, attribute in drawing:
        if probability := attrgetter(attribute)(module):
            name = attribute.rpartition(".")[2]
            raise CaptureError(
                "LayerDrop skips layers by chance",
                by="model",
                facts={"module": type(module).__name__, name: f"{probability:g}"},
                hint=f"set its probability to 0 in the model's configuration ({name}=0.0): "
                "a plan runs the same layers in every step",
            )
    if not drawing:
        yield
        return
    draw = torch.rand

    def rand(*size: object, **options: object) -> object:
        return 1.0 if size == ([],) and not options else draw(*size, **options)  # type: ignore[call-overload]

    with replaced(torch, "rand", rand):
        yield


def draws(kind: type[nn.Module]) -> str | None:
    """Return the attribute that the number drawn in a forward is compared with. None: it draws none."""
    try:
        text = inspect.getsource(kind.forward)
    except (OSError, TypeError):  # it has no source: made in an interpreter, or in C
        return None
    compared = COMPARED.search(text)
    return (compared[1] if compared else "") if DRAW in text else None
