"""A decoder of packed documents, and the same mathematics document by document in plain PyTorch.

`by_document` shares no code with the model: it takes each document out of its row and attends within it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn

import piper

VOCAB, DIM, HEADS, KV_HEADS, HEAD = 32, 16, 4, 2, 4
CAP = 2.0  # of scores, where they are capped
PACKINGS: Mapping[str, Sequence[Sequence[int]]] = {  # the lengths of the documents of each row
    "several": [
        [5, 1, 10],
        [7, 9],
        [3, 6, 7],
        [2, 12, 2],
    ],  # one of one token; cuts at 4, 8 and 12 cross some
    "whole": [[16]] * 4,
    "single tokens": [[1] * 16, [15, 1], [1, 15], [8, 8]],
}
WEIGHTS = {"*.q|*.k|*.v|*.up|embedding|head": 0, "*.out|*.down": 1}
FIELDS = {"tokens": 1, "labels": 1, "documents": 1, "positions": 1, "places": 1}

NAMES = ("tokens", "documents", "positions", "places", "starts")  # what a forward takes


def batch(packing: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return rows of documents: tokens, labels, the document of each token and its place there."""
    generator = torch.Generator().manual_seed(0)
    length = sum(packing[0])
    tokens, labels = torch.randint(VOCAB, (2, len(packing), length), generator=generator)
    labels[:2, :3] = -100
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in packing]
    positions = [torch.cat([torch.arange(size) for size in row]) for row in packing]
    return {
        "tokens": tokens,
        "labels": labels,
        "documents": torch.stack(documents),
        "positions": torch.stack(positions),
        "places": torch.arange(length).expand(len(packing), length).contiguous(),
        "starts": torch.stack([_starts(row) for row in packing]),
    }


def _starts(row: Sequence[int]) -> Tensor:
    """Return where each document of a row begins and where the last one ends, repeated up to 17 numbers."""
    ends = torch.tensor([0, *row]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(17 - len(ends))])


class Layer(nn.Module):
    """Attention within documents, and a feed-forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.out = nn.Linear(DIM, HEADS * HEAD), nn.Linear(HEADS * HEAD, DIM)
        self.k, self.v = nn.Linear(DIM, KV_HEADS * HEAD), nn.Linear(DIM, KV_HEADS * HEAD)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
        if kind == "learned":
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | BlockMask) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.kind == "varlen":
            assert isinstance(mask, Tensor)  # the offsets of documents that lie end to end
            q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
            size = x.shape[1]
            attend: Callable[..., object] = varlen_attn  # that of torch 2.11 has no `enable_gqa`
            out = attend(q, k, v, mask, mask, size, size, window_size=(-1, 0), enable_gqa=True)
            assert isinstance(out, Tensor)
            y = out.unflatten(0, x.shape[:2]).transpose(1, 2)
        elif isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            slopes = self.slopes
            assert isinstance(slopes, Tensor)
            biased = lambda score, b, h, i, j: score + slopes[h] * (j - i)  # noqa: E731
            mods: dict[str, Callable[..., Tensor]] = {
                "alibi": biased,
                "learned": biased,
                "softcap": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP),
            }
            y = flex_attention(q, k, v, score_mod=mods.get(self.kind), block_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.silu(self.up(x)))
        return result


class Packed(nn.Module):
    """Tokens to logits, each document by itself. kind: the attention. stages: regions PP, of which each layer is one by default."""

    def __init__(self, kind: str, stages: int = 2, block: int = 4, layers: int | None = None) -> None:
        super().__init__()
        self.kind, self.block, self.stages = kind, block, stages
        self.embedding, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers or stages))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(
        self, tokens: Tensor, documents: Tensor, positions: Tensor, places: Tensor, starts: Tensor
    ) -> Tensor:
        if self.kind == "starts":
            every = torch.arange(documents.shape[1], device=starts.device)
            documents = (every[None, :, None] >= starts[:, None, 1:]).sum(-1)
        if self.kind == "varlen":
            rows = torch.arange(len(starts), device=starts.device)[:, None] * documents.shape[1]
            mask: Tensor | BlockMask = (starts + rows).flatten().int()
        else:
            mask = self.mask(documents, places)
        each = len(self.layers) // self.stages
        for stage in range(self.stages):
            with piper.annotate("PP"):
                if stage == 0:
                    x = self.embedding(tokens) + self.positions(positions)
                for layer in self.layers[stage * each : (stage + 1) * each]:
                    x = layer(x, mask)
                if stage == self.stages - 1:
                    x = self.head(x)
        logits: Tensor = x
        return logits

    def mask(self, documents: Tensor, places: Tensor) -> Tensor | BlockMask:
        """Return which keys each query sees: those of its document up to its own place.

        places: of the tokens in the sequence, where a batch has them in another order.
        """
        rows, length = documents.shape
        if self.kind == "sdpa":
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = documents[b, i] == documents[b, j]
            return same & (places[b, i] >= places[b, j] if self.kind == "placed" else i >= j)

        return create_block_mask(
            seen,
            rows, None, length, length, device=documents.device, BLOCK_SIZE=self.block,
        )  # fmt: skip


def loss(model: nn.Module, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the next tokens, and how many count."""
    logits = model(*(fields[name] for name in NAMES))
    return piper.losses.cross_entropy(logits, fields["labels"])


def by_document(model: Packed, fields: Mapping[str, Tensor], packing: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean loss of a batch, computed for one document after another."""
    state = dict(model.named_parameters())
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, sizes in enumerate(packing):
        for start, size in zip([sum(sizes[:i]) for i in range(len(sizes))], sizes, strict=True):
            tokens, labels = (fields[name][row, start : start + size] for name in ("tokens", "labels"))
            x = state["embedding.weight"][tokens] + state["positions.weight"][:size]
            for number in range(len(model.layers)):
                x = plain_layer(x, state, f"layers.{number}", model.kind)
            scores = x @ state["head.weight"].T
            for place in range(size):
                if labels[place] >= 0:
                    total = total + scores[place].logsumexp(0) - scores[place, labels[place]]
                    count += 1
    return total / count


def plain_layer(x: Tensor, state: Mapping[str, Tensor], name: str, kind: str) -> Tensor:
    """Return what a layer gives for the tokens of one document: [tokens, width]."""

    def linear(part: str, given: Tensor) -> Tensor:
        return given @ state[f"{name}.{part}.weight"].T + state[f"{name}.{part}.bias"]

    q, k, v = (linear(part, x) for part in "qkv")
    size, outs = len(x), []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        own, theirs = slice(head * HEAD, (head + 1) * HEAD), slice(shared * HEAD, (shared + 1) * HEAD)
        scores = q[:, own] @ k[:, theirs].T / math.sqrt(HEAD)
        places = torch.arange(size)
        if kind == "alibi":
            scores = scores + 2.0 ** -(head + 1) * (places[None, :] - places[:, None])
        if kind == "softcap":
            scores = CAP * torch.tanh(scores / CAP)
        scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
        outs.append(torch.softmax(scores, -1) @ v[:, theirs])
    x = x + linear("out", torch.cat(outs, -1))
    hidden = linear("up", x)
    return x + linear("down", hidden * torch.sigmoid(hidden))


@_varlen_attn.register_kernel("cpu")
def _on_host(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Attend within documents that lie end to end; torch has kernels for GPUs alone."""
    out = torch.zeros_like(query)
    for own, _q, _k, v, weights in _each(query, key, value, starts):
        out[own] = (weights @ v).transpose(0, 1)
    return out, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _on_host_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    *_: object,
) -> tuple[Tensor, ...]:
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for own, q, k, v, weights in _each(query, key, value, starts):
        given = grad[own].transpose(0, 1)
        changes = given @ v.transpose(1, 2)
        scores = weights * (changes - (changes * weights).sum(-1, keepdim=True)) / math.sqrt(HEAD)
        terms = scores @ k, scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ given
        for total, term in zip(grads, terms, strict=True):
            total[own] = term.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(grads)


def _each(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield the tokens of each document, its queries, keys and values for each head, and their weights."""
    groups = query.shape[1] // key.shape[1]
    for first, last in itertools.pairwise(starts.tolist()):
        q, k, v = (x[first:last].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        seen = torch.ones(last - first, last - first, dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2) / math.sqrt(HEAD)).masked_fill(~seen, -math.inf)
        yield slice(first, last), q, k, v, scores.softmax(-1)
