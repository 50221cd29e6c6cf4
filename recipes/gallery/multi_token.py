"""Multi-token prediction (DeepSeek-V3): the last stage embeds tokens with the table of the first stage.

The table is one parameter with two owners, whose gradients are summed. The strategy is that of any pipeline.
"""

import torch
from text import text
from torch import Tensor, nn

import piper
from piper.models.layers import Attention, Block, SwiGLU, rope

VOCAB, WIDTH, HEADS, LAYERS, EXTRA = 96, 32, 4, 4, 0.3


def layer() -> Block:
    attention = Attention(WIDTH, HEADS, HEADS, WIDTH // HEADS, qk_norm=True, eps=1e-6)
    return Block(WIDTH, attention, SwiGLU(WIDTH, 2 * WIDTH), eps=1e-6)


class Decoder(nn.Module):
    """Predicts the next token, and with one more layer the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.join, self.extra = nn.Linear(2 * WIDTH, WIDTH, bias=False), layer()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, following = self.embedding(tokens), tokens.roll(-1, dims=1)
        for number, each in enumerate(self.layers):
            with piper.annotate("PP"):
                turn = rope(tokens.shape[1], WIDTH // HEADS, 10_000.0, like=x)
                x = each(x, turn)
                if number == LAYERS - 1:
                    both = torch.cat([x, self.embedding(following)], dim=-1)
                    further = self.extra(self.join(both), turn)
                    return self.head(x), self.head(further)
        raise AssertionError("there are layers")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of the next token, and a third of that of the one after it."""
    first, second = model(batch["input_ids"])
    total, count = piper.losses.cross_entropy(first[:, :-1], batch["labels"][:, 1:])
    more, _ = piper.losses.cross_entropy(second[:, :-2], batch["labels"][:, 2:])
    return total + EXTRA * more, count


def small() -> piper.Job:
    """Four stages, 1F1B: the first and the last share the table."""
    stages = [piper.place(piper.at(PP=n), [n]) for n in range(LAYERS)]
    order = [piper.split(piper.at(), parts=4), *piper.schedules.one_f_one_b(LAYERS, 4)]
    data = lambda: text(samples=8, length=12, vocab=VOCAB)  # noqa: E731
    return piper.Job(model=Decoder, loss=loss, data=data, strategy=[*stages, *order])
