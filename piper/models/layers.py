"""The modules of the reference decoders: rotary attention, a gated feed-forward, tokens to experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.experts import grouped_mm, route, unroute


def rope(length: int, head_dim: int, base: float, like: Tensor) -> Tensor:
    """Return the rotation of each position: [2, length, head_dim], cosines then sines, in the type of `like`.

    Angles are computed in fp32 for every type: in bf16 late positions would become equal.
    """
    steps = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] / base**steps
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of features (i, i + half) of [..., length, head_dim] by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-right, left], dim=-1) * rotation[1]


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, *, qk_norm: bool, eps: float
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.groups = heads // kv_heads
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=eps) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).view(heads) for layer in (self.q, self.k, self.v))
        q = rotate(self.q_norm(q).transpose(1, 2), rotation)
        k = rotate(self.k_norm(k).transpose(1, 2), rotation)
        y = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=self.groups > 1
        )
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class SwiGLU(nn.Module):
    """A feed-forward layer whose hidden features are gated."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Attention, then a feed-forward or experts, each after a norm and inside a residual connection."""

    def __init__(self, dim: int, attention: nn.Module, ffn: nn.Module, *, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(dim, eps=eps)
        self.ffn = ffn

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        result: Tensor = x + self.ffn(self.ffn_norm(x))
        return result


def group_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort (token, expert) pairs by expert: [tokens, k] -> the order [tokens * k], and each expert's count.

    Pair `order[i]` of the flattened `chosen` comes i-th; its token is `order[i] // k`. The sort is stable, so
    an expert sees its tokens in the order of the batch.
    """
    pairs = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return pairs.argsort(stable=True), counts.scatter_add(0, pairs, torch.ones_like(pairs))


def collect(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Give each token the weighted sum of its experts' rows: [tokens * k, d] in `order` -> [tokens, d]."""
    # A sum over k adjacent rows, not an `index_add`: the latter adds in any order on a GPU.
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return (y[back].view(*weights.shape, y.shape[-1]) * weights.unsqueeze(-1)).sum(1)


def gated_experts(tokens: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Give each token the weighted sum of the experts chosen for it, in one region tagged EP."""
    # tokens: [n, d]; weights and chosen: [n, k]; gate_up: [experts, d, 2 * f]; down: [experts, f, d].
    order, counts = group_by_expert(chosen, gate_up.shape[0])
    grouped = tokens[order // chosen.shape[-1]]
    with annotate("EP"):
        rows, received = route(grouped, counts)
        gate, up = grouped_mm(rows, gate_up, received).chunk(2, dim=-1)
        y = grouped_mm(F.silu(gate) * up, down, received)
        y = unroute(y, received, grouped.shape[0])
    return collect(y, weights, order)
