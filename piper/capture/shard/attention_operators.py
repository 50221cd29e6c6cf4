"""Attention of a sharded sequence, as operators that compute only what a causal mask leaves.

The devices of a group share one program, so which queries meet which keys is decided where an operator runs,
from the place of its device in the group. The host holds that number, so nothing waits for an accelerator.

Without balance the i-th of n devices holds the i-th slice of the sequence. With zigzag it holds slices i and
2 n - 1 - i of 2 n. Under a causal mask a block of other keys is then either seen by all queries in its first
half, or seen whole by the second half of the queries: the same work on every device, in every step of a ring.

[Note: ring attention] In step s a device attends to the block that began s devices before it. `ring_attend`
computes the step and merges it with the steps before by log-sum-exp; no gradient goes through it. The
gradient of a block needs the output and the log-sum-exp of *all* steps, but no other step's values. So after
the last step there is one `ring_pass` for each block: forward it hands the output on, backward it computes
the gradients of its block. The output's gradient goes through the blocks from the last to the first, and each
block's gradient of keys and values can travel back while that of the block before is computed.

A device that holds all keys attends by `ring_attend` too, in one step that has a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_aten = torch.ops.aten
SEQUENCE = 2  # dimension of [batch, heads, sequence, head size]
ALL_KEYS = -1  # in place of the step of a ring: the device holds the keys of the whole sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """Queries of a device and the keys that they see.

    causal: the last query sees all of the keys, and every other one key less than the query after it.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False

    @property
    def pairs(self) -> int:
        """Return how many pairs of a query and a key this is."""
        rows, columns = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        return rows * columns - (rows * (rows - 1) // 2 if self.causal else 0)


class Turn(NamedTuple):
    """One step of a ring: a device holds the block that began `step` devices before it, or all keys."""

    ways: int
    step: int
    causal: int  # a truth value, as an operator takes it
    zigzag: int

    @property
    def numbers(self) -> list[int]:
        """Return the step as operators take it, and give it back: `Turn(*numbers)`."""
        return [int(number) for number in self]

    @property
    def is_last(self) -> bool:
        """Return whether a device has attended to everything then."""
        return self.step in (ALL_KEYS, self.ways - 1)

    def blocks(self, place: int, rows: int, keys: int) -> list[AttentionBlock]:
        """Return what a device's queries see of the keys that it holds. All keys are under a causal mask."""
        if self.step == ALL_KEYS:
            apart = 2 if self.zigzag else 1  # runs of queries
            size, slices = rows // apart, [place, 2 * self.ways - 1 - place][:apart]
            return [
                AttentionBlock(queries=(i * size, (i + 1) * size), keys=(0, (at + 1) * size), causal=True)
                for i, at in enumerate(slices)
            ]
        source = (place - self.step) % self.ways
        if not self.causal or source == place:
            return [AttentionBlock(queries=(0, rows), keys=(0, keys), causal=bool(self.causal))]
        if not self.zigzag:
            return [AttentionBlock(queries=(0, rows), keys=(0, keys))] if source < place else []
        if source < place:
            return [AttentionBlock(queries=(0, rows), keys=(0, keys // 2))]
        return [AttentionBlock(queries=(rows // 2, rows), keys=(0, keys))]

    def columns(self, mask: Tensor | None, place: int) -> Tensor | None:
        """Return the columns of a mask that belong to the block. mask: a device's rows, all columns."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        source = (place - self.step) % self.ways
        if not self.zigzag:
            return mask.chunk(self.ways, -1)[source]
        slices = mask.chunk(2 * self.ways, -1)
        return torch.cat([slices[source], slices[2 * self.ways - 1 - source]], -1)


def all_keys(ways: int, zigzag: bool) -> Turn:
    """Return how a device's queries meet the keys of the whole sequence, under a causal mask."""
    return Turn(ways=ways, step=ALL_KEYS, causal=True, zigzag=zigzag)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to keys, and the log-sum-exp of each query's scores.

    There may be fewer heads of keys and values than of queries; each serves neighbouring ones.
    """
    if _fast(query, key, value, mask):
        out, total, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out, total
    scores, _, wide = _scores(query, key, value, mask, scale, causal)
    total = scores.logsumexp(-1)
    return (_weights(scores, total) @ wide).to(query.dtype), total


def attend_grad(
    grad: Tensor, attended: Sequence[Tensor], mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, of which these may be a part.

    attended: these, the output and the log-sum-exp of the scores of all the keys that the queries see.
    """
    query, key, value, out, total = attended
    if _fast(query, key, value, mask):
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout
        lengths = (query.shape[SEQUENCE], key.shape[SEQUENCE])
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, total.contiguous(), None, None, *lengths, 0.0, causal,
            unused, unused, scale=scale,
        )  # fmt: skip
        return grads
    scores, keys, values = _scores(query, key, value, mask, scale, causal)
    weights = _weights(scores, total)
    given = grad.to(scores.dtype)
    inner = (given * out.to(scores.dtype)).sum(-1, keepdim=True)
    changes = weights * (given @ values.transpose(-1, -2) - inner) * scale
    return (
        (changes @ keys).to(query.dtype),
        _per_head(changes.transpose(-1, -2) @ query.to(scores.dtype), key),
        _per_head(weights.transpose(-1, -2) @ given, value),
    )


def _fast(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether the flash kernel takes these operands."""
    size = query.shape[-1]
    alike = size == key.shape[-1] == value.shape[-1] and size % 8 == 0 and size <= 256
    short = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and short and mask is None and alike


def _scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, and keys and values for every head of queries. Masked scores are minus infinity."""
    heads = query.shape[1]
    wide = width(query)
    keys, values = (x.to(wide).repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query.to(wide) @ keys.transpose(-1, -2) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores, keys, values


def _weights(scores: Tensor, total: Tensor) -> Tensor:
    """Return the weights of keys. A query that sees none of them has zeros."""
    return (scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _per_head(grad: Tensor, like: Tensor) -> Tensor:
    """Add up the gradients of the heads of queries that one head of keys serves."""
    apart: Tensor = grad.unflatten(1, (like.shape[1], -1))
    return apart.sum(2).to(like.dtype)


def rows_of(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    """Return some rows of [batch, heads, sequence, ...]."""
    return tensor.narrow(SEQUENCE, span[0], span[1] - span[0])


def width(tensor: Tensor) -> torch.dtype:
    """Return the type in which scores and their sums are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge(out: Tensor, total: Tensor, new: Tensor, sums: Tensor) -> None:
    """Merge an attention over other keys into `out` and `total`, in place."""
    merged = torch.logaddexp(total, sums)
    base = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_((total - base).exp().unsqueeze(-1)).add_(new * (sums - base).exp().unsqueeze(-1))
    total.copy_(merged)


@torch.library.custom_op("piper::ring_attend", mutates_args=())
def ring_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    before: Sequence[Tensor],
    place: Tensor,
    scale: float,
    turn: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Attend to all keys, or to the block of a step, merged with those before; see [Note: ring attention].

    before: output and log-sum-exp so far; none in the first step, whose blocks have all queries. mask: a
    device's own rows, all columns. The output is as wide as sums are until the last step.
    """
    here, how = int(place), Turn(*turn)
    columns, blocks = how.columns(mask, here), how.blocks(here, query.shape[SEQUENCE], key.shape[SEQUENCE])
    parts = []
    for block in blocks:
        keys, values = rows_of(key, block.keys), rows_of(value, block.keys)
        parts.append(attend(rows_of(query, block.queries), keys, values, columns, scale, block.causal))
    if before:
        out, total = before[0].clone(), before[1].clone()
        for block, (new, sums) in zip(blocks, parts, strict=True):
            merge(rows_of(out, block.queries), rows_of(total, block.queries), new, sums)
    else:
        out, total = (torch.cat(each, SEQUENCE).contiguous() for each in zip(*parts, strict=True))
    return out.to(query.dtype if how.is_last else width(query)), total


@ring_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    dtype = query.dtype if Turn(*rest[-1]).is_last else width(query)
    out = query.new_empty([*query.shape[:3], value.shape[3]], dtype=dtype)
    return out, query.new_empty(query.shape[:3], dtype=width(query))


def _attend_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 (the signature is torch's)
    *tensors, _, place, ctx.scale, ctx.turn = inputs
    ctx.save_for_backward(*tensors, *output, place)
    ctx.mark_non_differentiable(output[1])


def _attend_backward(ctx: Any, grad: Tensor, _: object) -> tuple[Any, ...]:  # noqa: ANN401
    assert Turn(*ctx.turn).step == ALL_KEYS, "the gradient of a step is that of its pass"
    return (*ring_grad(grad, *ctx.saved_tensors, ctx.scale, ctx.turn), None, [], None, None, None)


ring_attend.register_autograd(_attend_backward, setup_context=_attend_context)


_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor total"
_TURN = "Tensor place, float scale, SymInt[] turn"


@torch.library.custom_op(
    "piper::ring_pass", mutates_args=(), schema=f"(Tensor passed, {_OPERANDS}, {_TURN}) -> Tensor"
)
def ring_pass(passed: Tensor, *_: object) -> Tensor:
    """Hand the output on. Backward, compute the gradients of one block; see [Note: ring attention]."""
    return passed.clone(memory_format=torch.contiguous_format)


@ring_pass.register_fake
def _(passed: Tensor, *_: object) -> Tensor:
    return passed.new_empty(passed.shape)


@torch.library.custom_op(
    "piper::ring_grad",
    mutates_args=(),
    schema=f"(Tensor grad, {_OPERANDS}, {_TURN}) -> (Tensor, Tensor, Tensor)",
)
def ring_grad(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    """Return the share that the keys of a device have in the gradients of queries, keys and values."""
    query, key, value, mask, out, total, place, scale, turn = operands
    here, how, attended = int(place), Turn(*turn), (query, key, value, out, total)
    blocks, columns = how.blocks(here, query.shape[SEQUENCE], key.shape[SEQUENCE]), how.columns(mask, here)
    whole = (0, query.shape[SEQUENCE]), (0, key.shape[SEQUENCE])
    if len(blocks) == 1 and (blocks[0].queries, blocks[0].keys) == whole:
        dq, dk, dv = attend_grad(grad, attended, columns, scale, blocks[0].causal)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    sums = query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    for block in blocks:  # no two of them share queries
        own, q, o, lse = (rows_of(x, block.queries) for x in (grad, query, out, total))
        k, v = (rows_of(x, block.keys) for x in (key, value))
        dq, dk, dv = attend_grad(own, (q, k, v, o, lse), columns, scale, block.causal)
        rows_of(sums[0], block.queries).copy_(dq)
        rows_of(sums[1], block.keys).add_(dk)
        rows_of(sums[2], block.keys).add_(dv)
    return sums


@ring_grad.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _pass_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 (the signature is torch's)
    _, *tensors, ctx.scale, ctx.turn = inputs
    ctx.save_for_backward(*tensors)


def _pass_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    grads = ring_grad(grad, *ctx.saved_tensors, ctx.scale, ctx.turn)
    return (grad, *grads, None, None, None, None, None, None)


ring_pass.register_autograd(_pass_backward, setup_context=_pass_context)


def _flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], turn: Turn, *, backward: bool
) -> int:
    """Return the floating-point operations of attention, for the device that has most to do."""
    of_devices = (turn.blocks(place, query[SEQUENCE], key[SEQUENCE]) for place in range(turn.ways))
    each = 2 * query[0] * query[1] * max(sum(block.pairs for block in blocks) for blocks in of_devices)
    return each * (3 * query[3] + 2 * value[3] if backward else query[3] + value[3])


@register_flop_formula(torch.ops.piper.ring_attend)
def _(query: Any, key: Any, value: Any, *rest: Any, **_: object) -> int:  # noqa: ANN401
    return _flops(query, key, value, Turn(*rest[-1]), backward=False)


@register_flop_formula(torch.ops.piper.ring_grad)
def _(_: object, query: Any, key: Any, value: Any, *rest: Any, **__: object) -> int:  # noqa: ANN401
    return _flops(query, key, value, Turn(*rest[-1]), backward=True)
