"""The sums over a vocabulary that a cross entropy needs, computed with the head in pieces of the vocabulary.

A loss of a label reads three numbers of a row of logits: the logarithm of the sum of exponentials, the logit
of the label, and with label smoothing the weighted sum of all logits. `head_sums` computes these from hidden
rows and the head's weight, one piece of the vocabulary after another. `head_sums_grad` computes each piece of
the logits again, and from it the gradients. So the logits of one piece are alive at a time, and under
tensor parallelism devices exchange one number for each row and sum.

Pieces of the vocabulary, not of the rows: the gradient of the weight is then written piece by piece and never
added up, and what is added up in a wider type is the gradient of the hidden rows, which is small.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

Sums = tuple[Tensor, Tensor, Tensor]
_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? scales"


def _wide(hidden: Tensor) -> torch.dtype:
    """Return the type of the sums: float32 or wider."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _parts(classes: int, pieces: int) -> list[slice]:
    """Return pieces of the vocabulary."""
    size = -(-classes // pieces)
    return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: slice) -> Tensor:
    """Return the logits of a piece of the vocabulary in the type of the sums."""
    added = bias[part] if bias is not None else None
    return torch.nn.functional.linear(hidden, weight[part], added).to(_wide(hidden))


def _own(labels: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Return labels as columns of a piece, of size [rows, 1], and which of them lie outside."""
    outside = (labels < part.start) | (labels >= part.stop)
    return (labels - part.start).masked_fill(outside, 0).unsqueeze(1), outside


@torch.library.custom_op(
    "piper::head_sums", mutates_args=(), schema=f"({_OPERANDS}, SymInt pieces) -> (Tensor, Tensor, Tensor)"
)
def head_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scales: Tensor | None, pieces: int
) -> Sums:
    """Return three sums over the logits of each row, hidden @ weight.T + bias.

    The logarithm of the sum of their exponentials; the logit of the row's label, 0 where no class has that
    number; the sum of the logits times `scales`, one for each class, 0 without them.
    """
    parts = _parts(weight.shape[0], pieces)
    with torch.autocast(hidden.device.type, enabled=False):  # the caller has cast
        sums = [_piece(_logits(hidden, weight, bias, part), labels, scales, part) for part in parts]
    logs, picked, spread = map(torch.stack, zip(*sums, strict=True))
    return logs.logsumexp(0), picked.sum(0), spread.sum(0)


def _piece(logits: Tensor, labels: Tensor, scales: Tensor | None, part: slice) -> Sums:
    """Return the sums over a piece of the logits, which it overwrites."""
    columns, outside = _own(labels, part)
    picked = logits.gather(1, columns).squeeze(1).masked_fill_(outside, 0.0)
    spread = logits @ scales[part].to(logits.dtype) if scales is not None else torch.zeros_like(picked)
    largest = logits.amax(1)
    return logits.sub_(largest.unsqueeze(1)).exp_().sum(1).log_().add_(largest), picked, spread


@head_sums.register_fake
def _(hidden: Tensor, *_: object) -> Sums:
    rows = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
    return rows, torch.empty_like(rows), torch.empty_like(rows)


@torch.library.custom_op(
    "piper::head_sums_grad",
    mutates_args=(),
    schema=f"(Tensor[] grads, {_OPERANDS}, Tensor total, SymInt pieces, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
)
def head_sums_grad(grads: Sequence[Tensor], *operands: Any) -> Sums:  # noqa: ANN401 (as the schema says)
    """Return the gradients of hidden rows, weight and bias. wanted: which; of others it returns no elements.

    grads: of the three sums. total: the first of them, for the shares of the classes.
    """
    hidden, weight, bias, labels, scales, total, pieces, wanted = operands
    rows, table, offsets = _gradients(hidden, weight, bias, wanted)
    for part in _parts(weight.shape[0], pieces):
        with torch.autocast(hidden.device.type, enabled=False):
            logits = _piece_grad(_logits(hidden, weight, bias, part), grads, labels, scales, total, part)
            if wanted[2]:
                offsets[part] = logits.sum(0)
            narrow = logits.to(hidden.dtype)
            del logits
            if wanted[0]:
                rows += narrow @ weight[part]
            if wanted[1]:
                torch.mm(narrow.t(), hidden, out=table[part])
            del narrow  # before the next piece
    return rows.to(hidden.dtype), table, offsets


def _piece_grad(
    logits: Tensor, grads: Sequence[Tensor], labels: Tensor, scales: Tensor | None, total: Tensor, part: slice
) -> Tensor:
    """Return the gradient of a piece of the logits, in their place."""
    of_total, of_picked, of_spread = (grad.to(total.dtype) for grad in grads)
    columns, outside = _own(labels, part)
    shares = logits.sub_(total.unsqueeze(1)).exp_().mul_(of_total.unsqueeze(1))
    shares.scatter_add_(1, columns, of_picked.masked_fill(outside, 0.0).unsqueeze(1))
    return shares.addr_(of_spread, scales[part].to(shares.dtype)) if scales is not None else shares


def _gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> Sums:
    """Return memory for the gradients: zeros of the type of sums for hidden rows, which are added up."""
    rows = hidden.new_zeros(hidden.shape if wanted[0] else 0, dtype=_wide(hidden))
    table = weight.new_empty(weight.shape if wanted[1] else 0)
    return rows, table, (weight if bias is None else bias).new_empty(weight.shape[0] if wanted[2] else 0)


@head_sums_grad.register_fake
def _(grads: Sequence[Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Sums:  # noqa: ANN401
    rows, table, offsets = _gradients(hidden, weight, bias, rest[-1])
    return rows.to(hidden.dtype), table, offsets


def _context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 (the signature is torch's)
    *tensors, ctx.pieces = inputs
    ctx.save_for_backward(*tensors, output[0])


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    wanted = [bool(need) for need in ctx.needs_input_grad[:3]]
    results = head_sums_grad(list(grads), *ctx.saved_tensors, ctx.pieces, wanted)
    given = (result if want else None for result, want in zip(results, wanted, strict=True))
    return (*given, None, None, None)


head_sums.register_autograd(_backward, setup_context=_context)


@register_flop_formula(torch.ops.piper.head_sums)
def _(hidden: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.piper.head_sums_grad)
def _(_: object, hidden: Sequence[int], weight: Sequence[int], *rest: Any, **__: object) -> int:  # noqa: ANN401
    products: int = 1 + sum(rest[-1][:2])  # the logits again, and a gradient each
    return 2 * products * hidden[0] * weight[0] * weight[1]
