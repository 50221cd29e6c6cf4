"""LayerDrop: models that draw a number before each layer, and skip the layer if it is below a probability.

A plan runs the same layers in every step, so layers cannot be skipped by chance. But Hugging Face's models
draw and compare even where the probability is 0, and one graph cannot branch on a number that is drawn. There
the number does not matter: no draw is below 0.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from piper.errors import CaptureError

DRAW = "torch.rand([])"  # as Hugging Face writes it
PROBABILITY = "layerdrop"  # of a module, or of its configuration


@contextmanager
def no_layer_dropped(model: nn.Module) -> Iterator[None]:
    """Let a model whose LayerDrop has the probability 0 be traced: its draws are 1, and never below 0."""
    drawing = [module for module in model.modules() if module.training and draws(type(module))]
    if not drawing or any(chance(module) is None for module in drawing):
        yield  # nothing is drawn, or for something else
        return
    for module in drawing:
        if chance(module):
            raise CaptureError(
                "LayerDrop skips layers by chance",
                by="model",
                facts={"module": type(module).__name__, PROBABILITY: f"{chance(module):g}"},
                hint=f"set its probability to 0 in the model's configuration ({PROBABILITY}=0.0): "
                "a plan runs the same layers in every step",
            )
    drawn = torch.rand

    def rand(*size: object, **options: object) -> object:
        return 1.0 if size == ([],) and not options else drawn(*size, **options)  # type: ignore[call-overload]

    torch.rand = rand  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.rand = drawn


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
