"""`piper init`: a recipe to begin with."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.application import Answer
from piper.errors import file_errors

TEMPLATE = '''"""A small decoder that learns to count, and three strategies. Put your own model and data in.

piper check {file}:four      the same numbers as one device?
piper plan {file}:four       the pipeline, what moves, what memory it takes
piper train {file}:four      trains on four processes of this machine
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import piper

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4, 64, 4, 128, 32, 16


class Decoder(nn.Module):
    """An embedding, layers and a head, without a word about Piper."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def model() -> nn.Module:
    """The model with its layers tagged LAYER=0, 1, ...: strategies select them by that tag."""
    return piper.annotate_layers(Decoder())


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the loss and its weight: exact however a batch is sliced."""
    return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def data() -> Iterator[dict[str, Tensor]]:
    """Global batches: the devices take their samples from them."""
    draws = torch.Generator().manual_seed(0)
    while True:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=draws)
        text = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        yield {{"tokens": text[:, :-1], "labels": text[:, 1:]}}


def job(strategy: Sequence[piper.Directive]) -> piper.Job:
    return piper.Job(
        model=model,
        loss=loss,
        data=data,
        strategy=strategy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
        steps=50,
    )


def one() -> piper.Job:
    """One device."""
    return job([])


def two() -> piper.Job:
    """Two devices that shard everything."""
    return job(piper.strategies.fsdp(dp=2))


def four() -> piper.Job:
    """Two pipeline stages, each on two devices that shard everything."""
    return job(piper.strategies.pipeline(layers=LAYERS, pp=2, dp=2, zero=3, schedule="1f1b", microbatches=4))
'''


def init(name: Annotated[str, typer.Argument(help="The recipe's file: NAME.py.", metavar="NAME")]) -> Answer:
    """Write a recipe to begin with: a small model and strategies for one, two and four devices."""
    path = Path(name) if Path(name).suffix == ".py" else Path(f"{name}.py")
    hint = "name a new file in a folder that exists and is yours: init replaces nothing"
    refused = file_errors("the recipe cannot be written", path, hint, ValueError)
    with refused, path.open("x", encoding="utf-8") as file:
        file.write(TEMPLATE.format(file=path))
    text = (
        f"Wrote {path}. Next:\n"
        f"  piper check {path}:four    the same numbers as one device?\n"
        f"  piper train {path}:four    trains on four processes of this machine\n"
    )
    return Answer(
        report={"file": str(path), "recipes": [f"{path}:{name}" for name in ("one", "two", "four")]},
        show=lambda: sys.stdout.write(text),
    )
