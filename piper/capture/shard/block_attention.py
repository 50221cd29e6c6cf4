"""Attention to a part of the keys: which part a device of a sharded sequence sees, and its numbers.

Without balance the i-th of n devices holds the i-th slice of the sequence. With zigzag it holds slices i and
2 n - 1 - i of 2 n. Under a causal mask a block of other keys is then either seen by all queries in its first
half, or seen whole by the second half of the queries: the same work on every device, in every step of a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_SHORT = (torch.bfloat16, torch.float16)
SEQUENCE = 2  # dimension of [batch, heads, sequence, head size]


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


def prefix_blocks(place: int, ways: int, zigzag: bool, rows: int) -> list[AttentionBlock]:
    """Return what a device's queries see of all keys, under a causal mask."""
    if not zigzag:
        return [AttentionBlock(queries=(0, rows), keys=(0, (place + 1) * rows), causal=True)]
    half = rows // 2
    first, second = place + 1, 2 * ways - place
    return [
        AttentionBlock(queries=(0, half), keys=(0, first * half), causal=True),
        AttentionBlock(queries=(half, rows), keys=(0, second * half), causal=True),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One step of a ring: a device holds the block that began `step` devices before it."""

    ways: int
    step: int
    causal: bool
    zigzag: bool

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Turn":
        """Return a step from the numbers by which operators take it."""
        ways, step, causal, zigzag = numbers
        return cls(ways=ways, step=step, causal=bool(causal), zigzag=bool(zigzag))

    @property
    def numbers(self) -> list[int]:
        """Return the step as operators take it."""
        return [self.ways, self.step, int(self.causal), int(self.zigzag)]

    def blocks(self, place: int, rows: int, keys: int) -> list[AttentionBlock]:
        """Return what a device's queries see of the block that it holds."""
        source = (place - self.step) % self.ways
        if not self.causal or source == place:
            return [AttentionBlock(queries=(0, rows), keys=(0, keys), causal=self.causal)]
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


class Attended(NamedTuple):
    """An attention that was computed: its operands, its output and the log-sum-exp of its scores.

    out, total: of all the keys that the queries see, of which these may be a part.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    total: Tensor
    mask: Tensor | None
    scale: float

    def part(self, block: AttentionBlock) -> "Attended":
        """Return the attention of the queries and keys of one block."""
        query, out, total = (rows_of(x, block.queries) for x in (self.query, self.out, self.total))
        key, value = rows_of(self.key, block.keys), rows_of(self.value, block.keys)
        return self._replace(query=query, key=key, value=value, out=out, total=total)


def attend_grad(grad: Tensor, attended: Attended, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    query, key, value, out, total, mask, scale = attended
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
    return query.is_cuda and query.dtype in _SHORT and mask is None and alike


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
    return torch.float32 if tensor.dtype in _SHORT else tensor.dtype


def merge(out: Tensor, total: Tensor, new: Tensor, sums: Tensor) -> None:
    """Merge an attention over other keys into `out` and `total`, in place."""
    merged = torch.logaddexp(total, sums)
    base = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_((total - base).exp().unsqueeze(-1)).add_(new * (sums - base).exp().unsqueeze(-1))
    total.copy_(merged)
