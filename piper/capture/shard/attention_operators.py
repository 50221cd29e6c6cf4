"""Attention of a sharded sequence, as operators that compute only what a causal mask leaves.

The devices of a group share one program, so which queries meet which keys is decided where an operator runs,
from the place of its device in the group. The host holds that number, so nothing waits for an accelerator.

[Note: ring attention] In step s a device attends to the block that began s devices before it. `ring_attend`
computes the step and merges it with the steps before by log-sum-exp; no gradient goes through it. The
gradient of a block needs the output and the log-sum-exp of *all* steps, but no other step's values. So after
the last step there is one `ring_pass` for each block: forward it hands the output on, backward it computes
the gradients of its block. The output's gradient goes through the blocks from the last to the first, and each
block's gradient of keys and values can travel back while that of the block before is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piper.capture.shard.block_attention import (
    SEQUENCE,
    Attended,
    AttentionBlock,
    Turn,
    attend,
    attend_grad,
    merge,
    prefix_blocks,
    rows_of,
    width,
)


@torch.library.custom_op("piper::attend_prefix", mutates_args=())
def attend_prefix(
    query: Tensor, key: Tensor, value: Tensor, place: Tensor, scale: float, ways: int, zigzag: bool
) -> tuple[Tensor, Tensor]:
    """Attend causally from a device's own queries to all keys, which are in the order of the sequence."""
    parts = [
        attend(rows_of(query, b.queries), rows_of(key, b.keys), rows_of(value, b.keys), None, scale, b.causal)
        for b in prefix_blocks(int(place), ways, zigzag, query.shape[SEQUENCE])
    ]
    outs, totals = zip(*parts, strict=True)
    return torch.cat(outs, SEQUENCE).contiguous(), torch.cat(totals, SEQUENCE).contiguous()


@attend_prefix.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = query.new_empty([*query.shape[:3], value.shape[3]])
    return out, query.new_empty(query.shape[:3], dtype=width(query))


@torch.library.custom_op("piper::attend_prefix_grad", mutates_args=())
def attend_prefix_grad(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    place: Tensor,
    scale: float,
    ways: int,
    zigzag: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_prefix`."""
    blocks = prefix_blocks(int(place), ways, zigzag, query.shape[SEQUENCE])
    return _grads(grad, Attended(query, key, value, out, total, None, scale), blocks)


def _grads(
    grad: Tensor, attended: Attended, blocks: Sequence[AttentionBlock]
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the gradients of blocks; no two of them share queries."""
    query, key, value, *_ = attended
    whole = (0, query.shape[SEQUENCE]), (0, key.shape[SEQUENCE])
    if len(blocks) == 1 and (blocks[0].queries, blocks[0].keys) == whole:
        dq, dk, dv = attend_grad(grad, attended, blocks[0].causal)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    sums = query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    for block in blocks:
        dq, dk, dv = attend_grad(rows_of(grad, block.queries), attended.part(block), block.causal)
        rows_of(sums[0], block.queries).copy_(dq)
        rows_of(sums[1], block.keys).add_(dk)
        rows_of(sums[2], block.keys).add_(dv)
    return sums


def _prefix_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401 (the signature is torch's)
    query, key, value, place, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, *output, place)
    ctx.mark_non_differentiable(output[1])


def _prefix_backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    return (*attend_prefix_grad(grad, *ctx.saved_tensors, *ctx.how), None, None, None, None)


attend_prefix.register_autograd(_prefix_backward, setup_context=_prefix_context)


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
    """Attend to the block of a step, merged with the steps before; see [Note: ring attention].

    before: output and log-sum-exp so far; none in the first step. mask: a device's own rows, all columns.
    The output is as wide as sums are until the last step.
    """
    here, how, wide = int(place), Turn.of(turn), width(query)
    if before:
        out, total = before[0].clone(), before[1].clone()
    else:
        out = query.new_zeros([*query.shape[:3], value.shape[3]], dtype=wide)
        total = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    columns = how.columns(mask, here)
    for block in how.blocks(here, query.shape[SEQUENCE], key.shape[SEQUENCE]):
        keys, values = rows_of(key, block.keys), rows_of(value, block.keys)
        new, sums = attend(rows_of(query, block.queries), keys, values, columns, scale, block.causal)
        merge(rows_of(out, block.queries), rows_of(total, block.queries), new, sums)
    return out.to(query.dtype) if how.step == how.ways - 1 else out, total


@ring_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    how = Turn.of(rest[-1])
    dtype = query.dtype if how.step == how.ways - 1 else width(query)
    out = query.new_empty([*query.shape[:3], value.shape[3]], dtype=dtype)
    return out, query.new_empty(query.shape[:3], dtype=width(query))


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
    """Return one block's share of the gradients of queries, keys and values."""
    query, key, value, mask, out, total, place, scale, turn = operands
    here, how = int(place), Turn.of(turn)
    blocks = how.blocks(here, query.shape[SEQUENCE], key.shape[SEQUENCE])
    return _grads(grad, Attended(query, key, value, out, total, how.columns(mask, here), scale), blocks)


@attend_prefix_grad.register_fake
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


@torch.library.custom_op("piper::own_blocks", mutates_args=())
def own_blocks(blocks: Sequence[Tensor], places: Tensor, size: int) -> list[Tensor]:
    """Return the blocks of a sparse mask for some queries: by blocks of queries, then by those of keys.

    blocks: the count and the indices of the blocks of keys that each block of queries sees in part; then, if
    the mask knows them, of those that it sees whole. places: of the queries in the whole sequence. size: of a
    block of queries. Queries from several blocks see the keys that any of those sees.
    """
    partial, *full = (_dense_blocks(*blocks[i : i + 2]) for i in range(0, len(blocks), 2))
    seen = partial | full[0] if full else partial
    number = torch.arange(len(places), device=places.device) // size
    source = places.long() // size

    def counted(dense: Tensor) -> Tensor:
        """Count the queries of each new block whose old block sees a block of keys."""
        shape = [*dense.shape[:2], -(-len(places) // size), dense.shape[3]]
        rows = dense.index_select(2, source).int()
        return rows.new_zeros(shape).index_add_(2, number, rows)

    in_any = counted(seen) > 0
    queries = torch.bincount(number).view(1, 1, -1, 1)
    dense = [in_any]
    if full:
        in_all = (counted(full[0]) == queries) & (queries == size)
        dense = [in_any & ~in_all, in_all]
    apart = [*dense, *(each.transpose(-1, -2) for each in dense)]
    return [tensor for each in apart for tensor in _sparse_blocks(each)]


def _dense_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which blocks of keys each block of queries sees."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return dense.scatter_add_(-1, indices.long(), listed.int()) > 0


def _sparse_blocks(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row sees, and their indices, before those of all others."""
    order = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.int().contiguous()


@own_blocks.register_fake
def _(blocks: Sequence[Tensor], places: Tensor, size: int) -> list[Tensor]:
    batch, columns = blocks[1].shape[:2], blocks[1].shape[3]
    rows = -(-places.shape[0] // size)
    by_queries = ((*batch, rows), (*batch, rows, columns))
    by_keys = ((*batch, columns), (*batch, columns, rows))
    shapes = [shape for each in (by_queries, by_keys) for _ in blocks[::2] for shape in each]
    return [blocks[0].new_empty(shape) for shape in shapes]


Shape = Sequence[int]


def _flops(query: Shape, value: Shape, blocks: Sequence[Sequence[AttentionBlock]], *, backward: bool) -> int:
    """Return the floating-point operations of attention, for the device that has most to do."""
    pairs = max(sum(block.pairs for block in of_device) for of_device in blocks)
    each = 2 * query[0] * query[1] * pairs
    return each * (3 * query[3] + 2 * value[3] if backward else query[3] + value[3])


def _of_prefix(query: Shape, key: Shape, value: Shape, *rest: Any, backward: bool) -> int:  # noqa: ANN401
    ways, zigzag = rest[-2:]
    blocks = [prefix_blocks(place, ways, zigzag, query[SEQUENCE]) for place in range(ways)]
    return _flops(query, value, blocks, backward=backward)


def _of_turn(query: Shape, key: Shape, value: Shape, *rest: Any, backward: bool) -> int:  # noqa: ANN401
    how = Turn.of(rest[-1])
    blocks = [how.blocks(place, query[SEQUENCE], key[SEQUENCE]) for place in range(how.ways)]
    return _flops(query, value, blocks, backward=backward)


def _register_flops(attention: object, gradient: object, count: Callable[..., int]) -> None:
    register_flop_formula(attention)(lambda *given, **_: count(*given, backward=False))
    register_flop_formula(gradient)(lambda grad, *given, **_: count(*given, backward=True))


_register_flops(torch.ops.piper.attend_prefix, torch.ops.piper.attend_prefix_grad, _of_prefix)
_register_flops(torch.ops.piper.ring_attend, torch.ops.piper.ring_grad, _of_turn)
