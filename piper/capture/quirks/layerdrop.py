"""Refuses LayerDrop, which skips layers by chance: a plan runs the same layers in every step.

Works around: transformers 5.0. Its models draw a number before each layer and compare it even where the
probability to skip the layer is 0, and one graph cannot branch on a number that is drawn. There the number
does not matter: no draw is below 0.
Not needed from: no version yet.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from piper.errors import CaptureError
from piper.process.attributes import replaced

DRAW = "torch.rand([])"  # as Hugging Face writes it
PROBABILITY = "layerdrop"  # of a module, or of its configuration


@contextmanager
def no_layer_dropped(model: nn.Module) -> Iterator[None]:
    """Let a model whose LayerDrop has the probability 0 be traced: its draws are 1, and never below 0."""
    drawing = [module for module in model.modules() if module.training and draws(type(module))]
    chances = [chance(module) for module in drawing]
    if not drawing or None in chances:
        yield  # nothing is drawn, or for something else
        return
    for module, probability in zip(drawing, chances, strict=True):
        if probability:
            raise CaptureError(
                "LayerDrop skips layers by chance",
                by="model",
                facts={"module": type(module).__name__, PROBABILITY: f"{probability:g}"},
                hint=f"set its probability to 0 in the model's configuration ({PROBABILITY}=0.0): "
                "a plan runs the same layers in every step",
            )
    draw = torch.rand

    def rand(*size: object, **options: object) -> object:
        return 1.0 if size == ([],) and not options else draw(*size, **options)  # type: ignore[call-overload]

    with replaced(torch, "rand", rand):
        yield


def draws(kind: type[nn.Module]) -> bool:
    """Return whether a module's forward draws one number, as LayerDrop does."""
    try:
        return DRAW in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # it has no source: made in an interpreter, or in C
        return False


def chance(module: nn.Module) -> float | None:
    """Return the probability that a module skips a layer. None: it has no LayerDrop."""
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, PROBABILITY, None)
        if isinstance(value, int | float):
            return float(value)
    return None
