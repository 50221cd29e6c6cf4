"""Notices a model that computes something else under `torch.compile` than in plain PyTorch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from piper.check.distance import relative
from piper.check.reference import Reference


def compiled_otherwise(reference: Reference, batch: Mapping[str, Tensor], tol: float) -> list[str]:
    """Return a sentence if the model's loss is another one under `torch.compile`. Else nothing.

    Piper captures what `torch.compile` sees. Models ask whether they are compiled: some of transformers make
    a mask only then.
    """
    given = reference.on_device(reference.own_part(batch))
    plain = _loss_of(reference, given, compiled=False)
    try:
        compiled = _loss_of(reference, given, compiled=True)
    except RuntimeError:  # of Dynamo: it says nothing of a difference, which is reported in any case
        return []
    if relative(compiled, plain) <= tol:
        return []
    return [
        f"the model itself has the loss {plain:.6g} in plain PyTorch and {compiled:.6g} under torch.compile, "
        "which is what Piper captures: look for what it does only where torch.compiler.is_compiling()"
    ]


def _loss_of(reference: Reference, batch: Mapping[str, Tensor], *, compiled: bool) -> float:
    """Return the loss of a batch, with the same random numbers in every call."""
    torch.compiler.reset()  # so that no limit of recompilations makes a compiled call a plain one
    run = torch.compile(reference.job.loss, backend="eager") if compiled else reference.job.loss
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(reference.job.seed)
        result = run(reference.model, batch)
    if isinstance(result, tuple) and isinstance(result[1], Mapping):  # metrics
        result = result[0]
    return (result[0] / result[1] if isinstance(result, tuple) else result).item()
