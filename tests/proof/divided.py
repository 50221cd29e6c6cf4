"""Small programs whose regions are divided along axes, each for one thing that such a plan can do."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from piper import schedules
from piper.capture.trace.annotate import annotate
from piper.compiler import Program, compile
from piper.directives import Directive, place, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.losses import cross_entropy as weighted_cross_entropy
from piper.plan.plan import Plans
from tests.proof import models, programs

WIDTH, VOCABULARY, LENGTH = 4, 8, 4
WEIGHTS = {"embedding|*.heads|*.up|head": 0, "*.out|*.down": 1}
FIELDS = {"tokens": 1, "labels": 1}


class Block(nn.Module):
    """Causal attention of two heads, each its own queries, keys and values; a wide layer and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.heads, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x * self.scale).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        mixed = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide: Tensor = x + self.down(torch.tanh(self.up(x)))
        return wide


class Reader(nn.Module):
    """Two stages between an embedding and a head, whose loss never needs all logits in one place."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.blocks[0](self.embedding(tokens))
        with annotate("PP"):
            logits: Tensor = self.head(self.blocks[1](x))
        return logits


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over all labels: every slice has as many."""
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def weighted_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum over the labels that count, and how many these are."""
    return weighted_cross_entropy(model(batch["tokens"]), batch["labels"])


def batch(samples: int) -> dict[str, Tensor]:
    """Tokens and labels, of which a few do not count."""
    rng = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, VOCABULARY, (samples, LENGTH), generator=rng) for _ in range(2))
    return {"tokens": tokens, "labels": labels}


def program(
    strategy: Sequence[Directive],
    *,
    tied: bool = False,
    clip: float | None = None,
    loss: models.Loss = mean_loss,
) -> Program:
    """Compile the model under a strategy, in fp64."""
    return compile(
        Job(
            model=lambda: Reader(tied),
            loss=loss,
            data=lambda: [batch(8)],
            strategy=strategy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            precision="fp64",
            clip_norm=clip,
        ),
        device="cpu",
    )


def tensor(stage: int | None, devices: Sequence[int], between: int | None = None) -> Directive:
    """A stage, or the model, divided over each pair of devices by its weights."""
    where = at() if stage is None else at(PP=stage)
    return shard(where, devices, ways=2, axis="TP", weights=WEIGHTS, between=between)


def context(devices: Sequence[int], balance: str | None = None, attention: str = "gather") -> Directive:
    """The model divided over pairs of devices by the sequence."""
    return shard(at(), devices, ways=2, axis="CP", batch=FIELDS, attention=attention, balance=balance)


def stages(between: int | None = None) -> list[Directive]:
    """Two stages of two devices each, two microbatches, 1F1B."""
    divided = [tensor(0, [0, 1], between), tensor(1, [2, 3], between)]
    return [*divided, split(at(), parts=2), *schedules.one_f_one_b(2, 2)]


FOUR, EIGHT = range(4), range(8)
PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "tensor, clipped": lambda: program([replicate(at(), FOUR, zero=1), tensor(None, FOUR)], clip=0.1),
    "sequence, stages": lambda: program(stages(between=1), loss=weighted_loss),
    "sequence, zero 3": lambda: program([replicate(at(), FOUR, zero=3), tensor(None, FOUR, between=1)]),
    "tied stages": lambda: program(stages(), tied=True),
    "context": lambda: program([replicate(at(), FOUR, zero=2), context(FOUR, "zigzag")], loss=weighted_loss),
    "two axes": lambda: program([tensor(None, EIGHT, between=1), context(EIGHT)], loss=weighted_loss),
    "into one device": lambda: program([tensor(0, [0, 1]), place(at(PP=1), [2]), split(at(), parts=2)]),
    "out of one device": lambda: program([place(at(PP=0), [0]), tensor(1, [1, 2, 3, 4], between=1)]),
    "zero-bubble": lambda: program(
        [tensor(0, [0, 1], 1), tensor(1, [2, 3], 1), split(at(), parts=4), *schedules.zero_bubble(2, 4)]
    ),
    "ring": lambda: program([context(FOUR, "zigzag", "ring")]),
}


@cache
def program_of(name: str) -> Program:
    """Return a program, compiled once."""
    return PROGRAMS[name]()


def numbers(name: str, plans: Plans) -> programs.Numbers:
    """Run two steps of plans on threads."""
    return programs.numbers(program_of(name), plans)


@cache
def right_numbers(name: str) -> programs.Numbers:
    """Return what the plans of a program give as they were compiled."""
    return numbers(name, program_of(name).plans)
