"""The models of the published runs, with the embedding, each layer and the head as a region LAYER.

Megatron-LM trains with dropout, by default a tenth of the scores and of the hidden state. Each device of a
tensor parallel group draws for its own slice: `thinned` is such a dropout, with a rule for divided values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import piper
from piper.models.layers import Attention, Block, SwiGLU, rope

DROPPED = 0.1


@torch.library.custom_op("published::thinned", mutates_args=())
def thinned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Set a tenth of the elements to zero. Return the rest, scaled, and which they are."""
    kept = torch.rand_like(x) >= DROPPED
    return x * kept / (1 - DROPPED), kept


@thinned.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@torch.library.custom_op("published::thinned_grad", mutates_args=())
def thinned_grad(grad: Tensor, kept: Tensor) -> Tensor:
    """Return the gradient of what was kept."""
    return grad * kept / (1 - DROPPED)


@thinned_grad.register_fake
def _(grad: Tensor, kept: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:  # noqa: ANN401
    made: Tensor = thinned_grad(grad, ctx.saved_tensors[0])
    return made


thinned.register_autograd(_backward, setup_context=_save)


def _divided(sharder: Any, node: fx.Node) -> None:  # noqa: ANN401
    """Drop from a device's own slice, or from the whole where every device holds it."""
    source = node.args[0]
    layout = sharder.settle(source)
    sharder.done(node, sharder.emit(node.target, (sharder.local[source],)), [layout, layout])


piper.sharding_rule(torch.ops.published.thinned.default, _divided)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a decoder."""

    layers: int
    dim: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    vocab: int
    seq: int


class PlainAttention(nn.Module):
    """Attention as it was before fused kernels: scores in memory, a mask, a softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        places = torch.arange(x.shape[1], device=x.device)
        scores = scores.masked_fill(places[None, :] > places[:, None], -10000.0)
        mixed = torch.matmul(thinned(torch.softmax(scores, dim=-1))[0], v)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class GptLayer(nn.Module):
    """A layer of GPT: attention and a feed-forward of two products."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.attention = PlainAttention(sizes.dim, sizes.heads)
        self.up, self.down = nn.Linear(sizes.dim, sizes.ffn), nn.Linear(sizes.ffn, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + thinned(self.attention(self.attention_norm(x)))[0]
        made: Tensor = x + thinned(self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh")))[0]
        return made


class LlamaLayer(nn.Module):
    """A layer of Llama 3: rotary attention with shared keys, a gated feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        attention = Attention(sizes.dim, sizes.heads, sizes.kv_heads, self.head_dim, qk_norm=False, eps=1e-5)
        self.block = Block(sizes.dim, attention, SwiGLU(sizes.dim, sizes.ffn), eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.block(x, rope(x.shape[1], self.head_dim, 500_000.0, like=x))
        return made


class Embedding(nn.Module):
    """The table of tokens, and of positions where they are learned."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.dim)
        self.places = None if sizes.gated else nn.Embedding(sizes.seq, sizes.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.places is not None:
            x = thinned(x + self.places(torch.arange(tokens.shape[1], device=tokens.device)))[0]
        return x


class Decoder(nn.Module):
    """Tokens to logits. LAYER=0 is the embedding, the last LAYER the final norm and the head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = LlamaLayer if sizes.gated else GptLayer
        self.embedding = Embedding(sizes)
        self.layers = nn.ModuleList(layer(sizes) for _ in range(sizes.layers))
        self.norm: nn.Module = nn.RMSNorm(sizes.dim) if sizes.gated else nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("LAYER"):
            x = self.embedding(tokens)
        for layer in self.layers:
            with piper.annotate("LAYER"):
                x = layer(x)
        with piper.annotate("LAYER"):
            made: Tensor = self.head(self.norm(x))
        return made


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy and the number of labels."""
    return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def divided_weights(sizes: Sizes) -> dict[str, int]:
    """Return which weights tensor parallelism divides, and along which dimension."""
    inner = "*ffn.gate|*ffn.up" if sizes.gated else "layers.*.up"
    outer = "*ffn.down" if sizes.gated else "layers.*.down"
    columns = f"*attention.q|*attention.k|*attention.v|{inner}|embedding.tokens|head"
    return {columns: 0, f"*attention.out|{outer}": 1}
