"""A DeepSeek-V3-style decoder for tests: latent attention, a shared expert and routed ones, a bias for balance."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.causal import CausalDecoder, Sizes
from piper.models.layers import Block, SwiGLU, gated_experts, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Sizes):
    """The sizes of a DeepSeek-V3-style decoder; `head_dim`: the features of a head without a position."""

    kv_heads: int = 16  # every head has its own keys and values, made from one small latent
    rope_dim: int = 32  # the features of a head that carry the position; all heads share the key's
    q_rank: int = 384
    kv_rank: int = 128
    dense_layers: int = 1  # the first layers have one feed-forward instead of experts
    dense_hidden: int = 2816
    experts: int = 64
    top_k: int = 6
    hidden: int = 512  # of one expert
    shared: int = 1  # experts that see every token, as one feed-forward
    scale: float = 2.5  # of the routed experts' sum
    balance: float = 1e-3  # how far a step moves the bias of an expert that saw too many tokens, or too few

    @property
    def rotary(self) -> int:
        """Return the number of features of a head that rotary embedding turns."""
        return self.rope_dim

    @classmethod
    def tiny(cls, *, layers: int = 4, stages: int = 2, experts: int = 8, tied: bool = False) -> "Config":
        """Return a size for tests: a step takes milliseconds."""
        return cls(
            vocab=64,
            dim=32,
            layers=layers,
            heads=4,
            kv_heads=4,
            head_dim=8,
            rope_dim=4,
            q_rank=16,
            kv_rank=8,
            dense_hidden=64,
            experts=experts,
            top_k=2,
            hidden=16,
            stages=stages,
            tied=tied,
            init_std=0.2,  # far from uniform, so that tests see uneven counts and empty experts
        )


class LatentAttention(nn.Module):
    """Causal attention whose keys and values of all heads come from one small latent per token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.plain, self.turned = config.heads, config.head_dim, config.rope_dim
        self.q_down = nn.Linear(config.dim, config.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_rank, eps=config.eps)
        self.q_up = nn.Linear(config.q_rank, self.heads * (self.plain + self.turned), bias=False)
        self.kv_down = nn.Linear(config.dim, config.kv_rank + self.turned, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=config.eps)
        self.kv_up = nn.Linear(config.kv_rank, self.heads * 2 * self.plain, bias=False)
        self.out = nn.Linear(self.heads * self.plain, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        q = self.q_up(self.q_norm(self.q_down(x))).view(heads).transpose(1, 2)
        q_plain, q_turned = q.split([self.plain, self.turned], dim=-1)
        latent, k_turned = self.kv_down(x).split([self.kv_norm.weight.shape[0], self.turned], dim=-1)
        k_plain, v = self.kv_up(self.kv_norm(latent)).view(heads).transpose(1, 2).chunk(2, dim=-1)
        k_turned = rotate(k_turned.unsqueeze(1), rotation).expand(-1, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(
            torch.cat([q_plain, rotate(q_turned, rotation)], dim=-1),
            torch.cat([k_plain, k_turned], dim=-1),
            v,
            is_causal=True,
        )
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class SharedAndRouted(nn.Module):
    """Experts that see every token, and routed ones of which each token sees the `top_k` that score highest.

    Each score is a separate sigmoid, so experts do not compete for weight. The bias changes the choice of
    experts, not their weights. Each forward in training raises it for experts that saw too few tokens, and
    lowers it for those that saw too many.
    """

    bias: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.scale, self.balance = config.top_k, config.scale, config.balance
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.register_buffer("bias", torch.zeros(config.experts))
        self.shared = SwiGLU(config.dim, config.shared * config.hidden)
        self.gate_up = nn.Parameter(torch.empty(config.experts, config.dim, 2 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self._choose(tokens)
        if self.training and self.balance:
            self._balance(chosen)
        routed = gated_experts(tokens, weights, chosen, self.gate_up, self.down)
        result: Tensor = self.shared(x) + routed.view(x.shape)
        return result

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, which add up to `scale`."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        scores = self.router(tokens).to(wide).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return (self.scale * weights / weights.sum(-1, keepdim=True)).to(tokens.dtype), chosen

    def _balance(self, chosen: Tensor) -> None:
        with torch.no_grad():
            pairs = chosen.flatten()
            ones = torch.ones_like(pairs, dtype=self.bias.dtype)
            seen = torch.zeros_like(self.bias).scatter_add(0, pairs, ones)
            self.bias.add_(self.balance * torch.sign(pairs.shape[0] / seen.shape[0] - seen))


class DeepSeekDecoder(CausalDecoder):
    """A DeepSeek-V3-style decoder: regions PP=0 ... PP=stages-1, and in each sparse layer one region EP."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, lambda number: block(config, number))


def block(config: Config, number: int) -> Block:
    """Build a layer: latent attention, then the feed-forward or the experts."""
    attention = LatentAttention(config)
    dense = number < config.dense_layers
    ffn = SwiGLU(config.dim, config.dense_hidden) if dense else SharedAndRouted(config)
    return Block(config.dim, attention, ffn, eps=config.eps)
