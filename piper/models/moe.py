"""A Qwen3-style mixture-of-experts decoder, annotated by pipeline stage and by expert region."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper.models.causal import TINY, CausalDecoder, Sizes, loss, token_loss
from piper.models.layers import Attention, Block, gated_experts

__all__ = ["Config", "MoEDecoder", "SparseFeedForward", "loss", "token_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Sizes):
    """The sizes of a mixture-of-experts decoder."""

    experts: int = 64
    top_k: int = 8  # experts that see each token
    hidden: int = 512  # of one expert

    def __post_init__(self) -> None:
        Sizes.__post_init__(self)  # super() does not find the class that slots=True makes
        if not 1 <= self.top_k <= self.experts:
            hint = f"choose top_k from 1 to {self.experts}"
            raise self.wrong("a token cannot go to that many experts", hint, "top_k", "experts")

    @classmethod
    def tiny(cls, *, layers: int = 2, stages: int = 2, experts: int = 8, tied: bool = False) -> "Config":
        """Return a size for tests: a step takes milliseconds."""
        std = 0.2  # far from uniform, so that tests see uneven counts and empty experts
        few: dict[str, Any] = {**TINY, "experts": experts, "top_k": 2, "hidden": 16, "init_std": std}
        return cls(**few, layers=layers, stages=stages, tied=tied)


class SparseFeedForward(nn.Module):
    """Experts, of which each token sees the `top_k` that its router scores highest."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, config.dim, 2 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self._choose(tokens)
        return gated_experts(tokens, weights, chosen, self.gate_up, self.down).view(x.shape)

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights, which add up to one."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        weights, chosen = self.router(tokens).softmax(-1, dtype=wide).topk(self.top_k, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype), chosen


class MoEDecoder(CausalDecoder):
    """A mixture-of-experts decoder: regions PP=0 ... PP=stages-1, and in each layer one region EP."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, lambda _: block(config))


def block(config: Config) -> Block:
    """Build a layer: attention, then the experts."""
    attention = Attention(
        config.dim, config.heads, config.kv_heads, config.head_dim, qk_norm=True, eps=config.eps
    )
    return Block(config.dim, attention, SparseFeedForward(config), eps=config.eps)
