"""A Llama-style decoder, annotated by pipeline stage."""

from dataclasses import dataclass

from piper.models.causal import TINY, CausalDecoder, Sizes, loss, token_loss
from piper.models.layers import Attention, Block, SwiGLU

__all__ = ["SHARDED_WEIGHTS", "Config", "Decoder", "loss", "token_loss"]

SHARDED_WEIGHTS = {  # which weights tensor parallelism shards along which dimension: `shard(weights=)`
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Sizes):
    """The sizes of a dense decoder."""

    hidden: int = 2816
    qk_norm: bool = False  # normalise queries and keys, as Qwen3 does

    @classmethod
    def tiny(cls, *, layers: int = 4, stages: int = 2, tied: bool = False) -> "Config":
        """Return a size for tests: a step takes milliseconds."""
        return cls(**TINY, layers=layers, hidden=64, stages=stages, tied=tied)

    @classmethod
    def medium(cls, *, stages: int = 1) -> "Config":
        """Return a size with 1.1 billion parameters."""
        return cls(dim=2048, layers=16, heads=16, kv_heads=8, head_dim=128, hidden=8192, stages=stages)


class Decoder(CausalDecoder):
    """A dense decoder: regions PP=0 ... PP=stages-1."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, lambda _: block(config))


def block(config: Config) -> Block:
    """Build a layer: attention and one feed-forward."""
    attention = Attention(
        config.dim, config.heads, config.kv_heads, config.head_dim, qk_norm=config.qk_norm, eps=config.eps
    )
    return Block(config.dim, attention, SwiGLU(config.dim, config.hidden), eps=config.eps)
