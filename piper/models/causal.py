"""The parts that the reference decoders share: their sizes, tokens to logits, and losses."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.errors import ConfigError
from piper.losses import IGNORED, cross_entropy
from piper.models.layers import rope

Batch = Mapping[str, Tensor]
TINY: Mapping[str, Any] = {"vocab": 64, "dim": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}  # for tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes every decoder has."""

    vocab: int = 32_000
    dim: int = 1024
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    stages: int = 1  # regions PP=0 ... PP=stages-1
    by_layer: bool = False  # each layer is a region LAYER: what ZeRO gathers and reduces at a time
    tied: bool = False  # the head uses the embedding's weight
    rope_base: float = 10_000.0
    eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.layers:
            hint = f"choose stages from 1 to {self.layers}"
            raise self.wrong("every stage needs a layer", hint, "stages", "layers")
        if self.heads % self.kv_heads:
            what = "query heads cannot share key and value heads evenly"
            raise self.wrong(what, "choose kv_heads that divides heads", "heads", "kv_heads")
        if self.head_dim % 2:
            what = "rotary positions turn features in pairs"
            raise self.wrong(what, "choose an even head_dim", "head_dim")

    def wrong(self, what: str, hint: str, *names: str) -> ConfigError:
        """Return the error of sizes that do not fit together, with these names."""
        return ConfigError(what, by="Config", facts={n: str(getattr(self, n)) for n in names}, hint=hint)

    @property
    def rotary(self) -> int:
        """Return the number of features of a head that rotary embedding turns."""
        return self.head_dim


def stage_ranges(layers: int, stages: int) -> Sequence[range]:
    """Return each stage's layers, as evenly divided as possible."""
    return [range(layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages)]


class CausalDecoder(nn.Module):
    """Tokens to logits through `sizes.layers` blocks, in `sizes.stages` regions tagged PP.

    With `by_layer` each block is a region of its own inside its stage, tagged LAYER.
    The first region holds the embedding, the last the final norm and the head.
    """

    def __init__(self, sizes: Sizes, block: Callable[[int], nn.Module]) -> None:
        """Build the decoder. `block` makes a layer, given its number."""
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList(map(block, range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.eps)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=sizes.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits: [batch, length] -> [batch, length, vocab]."""
        sizes, x = self.sizes, tokens
        for stage, layers in enumerate(stage_ranges(sizes.layers, sizes.stages)):
            with annotate("PP"):
                if stage == 0:
                    x = self.embedding(x)
                # Each stage computes its own rotation, which is less work than receiving one.
                rotation = rope(tokens.shape[1], sizes.rotary, sizes.rope_base, like=x)
                for layer in layers:
                    with annotate("LAYER") if sizes.by_layer else nullcontext():
                        x = self.layers[layer](x, rotation)
                if stage == sizes.stages - 1:
                    x = self.head(self.norm(x))
        return x


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of `batch["labels"]` given `batch["tokens"]`; label -100 does not count.

    It is exact if every row has equally many labels that count; `token_loss` is always exact.
    """
    return mean_cross_entropy(model(batch["tokens"]), batch["labels"])


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and how many labels it counts: exact however a batch is sliced."""
    return cross_entropy(model(batch["tokens"]), batch["labels"])


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over the labels that are not ignored."""
    wide = torch.promote_types(logits.dtype, torch.float32)  # for the sum over the vocabulary
    return F.cross_entropy(logits.flatten(0, 1).to(wide), labels.flatten(), ignore_index=IGNORED)
