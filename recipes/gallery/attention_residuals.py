"""Attention residuals (2603.15031): each block of layers attends to the results of all blocks before it.

A stage reads the results of every earlier stage. The strategy does not say so: the graph does. Each value is
sent to the stages that read it, and its gradients come back and are summed.
"""

import torch
from text import text
from torch import Tensor, nn

import piper
from piper.models.layers import Attention, Block, SwiGLU, rope

VOCAB, WIDTH, HEADS, BLOCKS = 96, 32, 4, 4


def layer() -> Block:
    attention = Attention(WIDTH, HEADS, HEADS, WIDTH // HEADS, qk_norm=True, eps=1e-6)
    return Block(WIDTH, attention, SwiGLU(WIDTH, 2 * WIDTH), eps=1e-6)


class Decoder(nn.Module):
    """Blocks of two layers; the input of each is a mean over the depth, weighted by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(nn.ModuleList((layer(), layer())) for _ in range(BLOCKS))
        self.queries = nn.ParameterList(torch.randn(WIDTH) / WIDTH for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        sources: list[Tensor] = []
        for number, (block, query) in enumerate(zip(self.blocks, self.queries, strict=True)):
            with piper.annotate("PP"):
                sources = sources or [self.embedding(tokens)]
                depth = torch.stack(sources)  # [depth, samples, length, width]
                x = ((self.norm(depth) @ query).softmax(0).unsqueeze(-1) * depth).sum(0)
                for each in block:
                    x = each(x, rope(tokens.shape[1], WIDTH // HEADS, 10_000.0, like=x))
                sources = [*sources, x]
                if number == BLOCKS - 1:
                    x = self.head(x)
        return x


def small() -> piper.Job:
    """Four stages, one block each, 1F1B."""
    return piper.Job(
        model=Decoder,
        loss=lambda model, batch: piper.losses.cross_entropy(model(batch["input_ids"]), batch["labels"]),
        data=lambda: text(samples=8, length=12, vocab=VOCAB),
        strategy=[
            *(piper.replicate(piper.at(PP=n), [2 * n, 2 * n + 1], zero=1) for n in range(BLOCKS)),
            piper.split(piper.at(), parts=4),
            *piper.schedules.one_f_one_b(BLOCKS, 4),
        ],
    )
