"""A vision-language model with another parallelism for each part: images over all devices, text over pairs.

The vision tower is small and its images are many, so each device has its own. Pairs shard the language model.
"""

import torch
from torch import Tensor, nn

import piper
from piper.models.layers import Attention, Block, SwiGLU, rope

VOCAB, WIDTH, SEEN, HEADS, PATCHES, LENGTH = 96, 32, 16, 4, 4, 12
WEIGHTS = {
    "language.*.q|language.*.k|language.*.v|language.*.gate|language.*.up|head": 0,
    "language.*.out|language.*.down": 1,
}


def layer(width: int) -> Block:
    attention = Attention(width, HEADS, HEADS, width // HEADS, qk_norm=True, eps=1e-6)
    return Block(width, attention, SwiGLU(width, 2 * width), eps=1e-6)


class VisionLanguage(nn.Module):
    """Patches of an image through a tower, then before the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(layer(SEEN) for _ in range(2))
        self.project = nn.Linear(SEEN, WIDTH)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.language = nn.ModuleList(layer(WIDTH) for _ in range(2))

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            for each in self.vision:
                patches = each(patches, rope(PATCHES, SEEN // HEADS, 1e4, like=patches))
            patches = self.project(patches)
        with piper.annotate("PP"):
            x = torch.cat([patches, self.embedding(tokens)], dim=1)
            for each in self.language:
                x = each(x, rope(PATCHES + LENGTH, WIDTH // HEADS, 1e4, like=x))
            return self.head(x[:, PATCHES:])


def data() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (8, LENGTH), generator=draw)
    return [{"patches": torch.randn(8, PATCHES, SEEN, generator=draw), "tokens": tokens, "labels": tokens}]


def small() -> piper.Job:
    """Four devices: images sharded four ways with ZeRO-3, text over two groups of two."""
    language = piper.at(PP=1)
    pairs = piper.shard(language, range(4), ways=2, axis="TP", weights=WEIGHTS)
    whole = [piper.replicate(piper.at(PP=0), range(4), zero=3), piper.replicate(language, range(4))]
    loss = lambda m, b: piper.losses.cross_entropy(m(b["patches"], b["tokens"]), b["labels"])  # noqa: E731
    return piper.Job(model=VisionLanguage, loss=loss, data=data, strategy=[*whole, pairs])
