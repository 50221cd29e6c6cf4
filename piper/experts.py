"""The marker operations of an expert region: `route`, `grouped_mm` and `unroute`.

On one device `route` and `unroute` only copy, and `grouped_mm` multiplies each expert's rows by that expert's
weight. Capture sees the two markers and knows that the number of rows between them depends on the data; a
sharded region then puts its exchange in their place.

[Note: unknown sizes] `route` returns new symbolic sizes, for rows and for experts, because on several
devices neither equals what went in. A check that compares a size with one of these two cannot be made while
tracing, so it is made where the operation runs.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from piper.errors import ConfigError

_INTEGERS = (torch.int32, torch.int64)
_ALIGNED = 16  # bytes: what the grouped kernel asks of every row


def route(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Send rows to their experts. Return `rows, counts` that this device's experts receive.

    x: rows grouped by expert, on the first axis; counts[e]: how many of them are for expert e.
    """
    _check_rows("route", x, counts)
    rows, received = _route(x, counts)
    return rows, received


def unroute(y: Tensor, counts: Tensor, n: int) -> Tensor:
    """Send rows back to where `route` took them from: the caller's n rows, in the caller's order.

    counts: what `route` returned.
    """
    _check_rows("unroute", y, counts)
    result: Tensor = _unroute(y, counts, n)
    return result


def grouped_mm(rows: Tensor, w: Tensor, counts: Tensor, transpose: bool = False) -> Tensor:
    """Multiply each expert's rows by that expert's weight: [n, d] x [experts, d, f] -> [n, f].

    transpose: w is [experts, f, d].
    """
    fits = rows.dim() == 2 and w.dim() == 3 and rows.shape[1] == w.shape[2 if transpose else 1]
    hint = f"give rows [n, d] and w [experts, {'f, d' if transpose else 'd, f'}] of one type; transpose="
    hint += f"{not transpose} takes w as it is stored the other way round"
    need(fits and rows.dtype == w.dtype, "rows and w do not fit together", "grouped_mm", hint, rows=rows, w=w)
    _check_rows("grouped_mm", rows, counts)
    result: Tensor = _grouped_mm(rows, w, counts, transpose)
    return result


def need(fits: bool, what: str, by: str, hint: str, **given: object) -> None:
    """Refuse what an operation is given if it does not fit."""
    if not fits:
        facts = {
            name: f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else str(x)
            for name, x in given.items()
        }
        raise ConfigError(what, by=by, facts=facts, hint=hint)


def _check_rows(by: str, rows: Tensor, counts: Tensor) -> None:
    """Refuse what cannot be rows and how many of them each expert has."""
    right = rows.dim() > 0 and counts.dim() == 1 and counts.dtype in _INTEGERS
    hint = "rows lie along the first axis, [n, ...]; counts is [experts] of torch.int64 or torch.int32"
    need(right, "these are not rows and a whole number for each expert", by, hint, rows=rows, counts=counts)


def _spans(counts: Tensor, experts: int, rows: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, last row + 1) for each expert that has rows."""
    sizes: list[int] = counts.tolist()
    right = len(sizes) == experts and sum(sizes) == rows and min(sizes, default=0) >= 0
    hint = f"pass the counts that route returned together with these rows: {experts} that add up to {rows}"
    need(right, "counts does not describe these rows", "grouped_mm", hint, counts=sizes)
    ends = [0, *accumulate(sizes)]
    return [(expert, start, end) for expert, (start, end) in enumerate(pairwise(ends)) if start < end]


def _fast(*operands: Tensor) -> bool:
    """Return whether the grouped kernel takes these operands: bf16 on a GPU, with aligned rows."""
    return all(
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.numel() > 0
        and all(stride == 1 or stride * x.element_size() % _ALIGNED == 0 for stride in x.stride())
        for x in operands
    )


@torch.library.custom_op("piper::route", mutates_args=())
def _route(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), counts.clone()  # a custom operation may not return its inputs


@_route.register_fake
def _(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size  # see [Note: unknown sizes]
    return x.new_empty([size(min=0), *x.shape[1:]]), counts.new_empty([size(min=0)])


@torch.library.custom_op("piper::unroute", mutates_args=())
def _unroute(y: Tensor, counts: Tensor, n: int) -> Tensor:
    hint = "pass one row for each row that route returned, and n = the rows that went into route"
    need(y.shape[0] == n, "these are not the rows that were routed", "unroute", hint, y=y, n=n)
    return y.clone()


@_unroute.register_fake
def _(y: Tensor, counts: Tensor, n: int) -> Tensor:
    return y.new_empty([n, *y.shape[1:]])


@torch.library.custom_op("piper::grouped_mm", mutates_args=())
def _grouped_mm(rows: Tensor, w: Tensor, counts: Tensor, transpose: bool) -> Tensor:
    w = w.transpose(1, 2) if transpose else w
    if _fast(rows, w):
        return torch._grouped_mm(rows, w, offs=counts.cumsum(0).to(torch.int32))
    out = rows.new_empty(rows.shape[0], w.shape[2])
    for expert, start, end in _spans(counts, w.shape[0], rows.shape[0]):
        torch.mm(rows[start:end], w[expert], out=out[start:end])
    return out


@_grouped_mm.register_fake
def _(rows: Tensor, w: Tensor, counts: Tensor, transpose: bool) -> Tensor:
    return rows.new_empty([rows.shape[0], w.shape[1 if transpose else 2]])


@torch.library.custom_op("piper::grouped_mm_weight", mutates_args=())
def _grouped_mm_weight(left: Tensor, right: Tensor, counts: Tensor, experts: int) -> Tensor:
    """Compute left.T @ right of each expert: [n, d], [n, f] -> [experts, d, f]. Without rows it is zero."""
    if _fast(left, right):
        return torch._grouped_mm(left.t(), right, offs=counts.cumsum(0).to(torch.int32))
    out = left.new_zeros(experts, left.shape[1], right.shape[1])
    for expert, start, end in _spans(counts, experts, left.shape[0]):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
    return out


@_grouped_mm_weight.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor, experts: int) -> Tensor:
    return left.new_empty([experts, left.shape[1], right.shape[1]])


def _save_counts(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401  autograd's protocol
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _send_back(ctx: Any, grad: Tensor, *_counts: None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    # The way back of `unroute` is `route`, but its number of rows is known here, so `unroute` says it.
    return _unroute(grad, *ctx.saved_tensors, ctx.rows), *(None for _ in ctx.needs_input_grad[1:])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    rows, w, counts, ctx.transpose = inputs
    ctx.save_for_backward(rows, w, counts)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN401
    rows, w, counts = ctx.saved_tensors
    grad = grad.contiguous()  # an expanded gradient has strides no kernel takes
    left, right = (grad, rows) if ctx.transpose else (rows, grad)
    return (
        _grouped_mm(grad, w, counts, not ctx.transpose) if ctx.needs_input_grad[0] else None,
        _grouped_mm_weight(left, right, counts, w.shape[0]) if ctx.needs_input_grad[1] else None,
        None,
        None,
    )


_route.register_autograd(_send_back, setup_context=_save_counts)
_unroute.register_autograd(_send_back, setup_context=_save_counts)
_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_operands)
