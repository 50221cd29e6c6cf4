"""Errors that trained wrongly in silence elsewhere, each as a small model: the numbers of plain PyTorch, or refused.

The numbers of findings are those of https://github.com/NVIDIA/Megatron-LM/issues/7452; the others name their
own thread. The table is in docs/checking.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.compiler import compile
from piper.job import Job
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import plain

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 12, 8, 2, 8, 8
PAIR, FOUR = [0, 1], [0, 1, 2, 3]
COLUMNS = {"*q|*k|*v|*up|head": 0, "*out|*down": 1}
DENSE, HEADED = {"up|head": 0, "down": 1}, {"q|k|v|head|sink": 0, "out": 1}
BOTH = {"tokens": 1, "labels": 1}


class Attention(nn.Module):
    """Attention with a norm of each head's queries, whose weight all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor, source: Tensor, *, causal: bool) -> Tensor:
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, source), (self.v, source))
        )
        seen = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=causal)
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.drop = Attention(), nn.Dropout(drop)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.drop(self.attention(y, y, causal=True))
        result: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return result


class Decoder(nn.Module):
    """Two stages. tied: the head is the embedding."""

    def __init__(self, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            x = self.blocks[0](x)
        with piper.annotate("PP"):
            result: Tensor = self.head(self.last(self.blocks[1](x)))
            return result


class Crossed(nn.Module):
    """Attends to an encoder's output, and joins images to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.see = nn.Embedding(VOCAB, WIDTH), nn.Linear(5, WIDTH)
        self.attention, self.before, self.last = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.block, self.head = Block(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        with piper.annotate("PP"):
            seen = self.see(images)
            x = self.embedding(tokens)
            x = torch.cat([seen, x + self.attention(self.before(x), seen, causal=False)], 1)
        with piper.annotate("PP"):
            result: Tensor = self.head(self.last(self.block(x)))[:, images.shape[1] :]
            return result


class Sinks(nn.Module):
    """Attention with a learned sink for each head, which takes a share of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.sink = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.zeros(HEADS))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT).exp()
        shares = weights / (weights.sum(-1, keepdim=True) + self.sink.exp().view(-1, 1, 1))
        result: Tensor = self.head(x + self.out((shares @ v).transpose(1, 2).flatten(2)))
        return result


class Routed(nn.Module):
    """A mixture of experts whose balance is a term of the loss, and counts no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router, self.head = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        share, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = F.one_hot(chosen, 4).sum(0)
        with piper.annotate("EP"):
            rows, mine = piper.route(flat[order], counts)
            rows = torch.tanh(piper.grouped_mm(rows, self.experts, mine))
            back = piper.unroute(rows, mine, len(flat))
        y = torch.empty_like(flat).index_copy(0, order, back) * share.unsqueeze(-1)
        balance = (scores * keep.flatten().unsqueeze(-1)).square().sum(-1)
        return self.head(x + y.view(x.shape)), balance.view(tokens.shape)


def batch(seed: int) -> dict[str, Tensor]:
    """Return tokens of which rows have 0 to 8 labels, so that slices weigh unevenly, and images."""
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCAB, (ROWS, LENGTH), generator=rng) for _ in range(2))
    lengths = torch.tensor([0, 0, 8, 1, 3, 6, 2, 5]).unsqueeze(1)
    labels = labels.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return {"tokens": tokens, "labels": labels, "images": torch.randn(ROWS, 2, 5, generator=rng)}


def token_loss(model: nn.Module, given: plain.Batch) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(given["tokens"]), given["labels"])


def two_tokens(model: nn.Module, given: plain.Batch) -> tuple[Tensor, Tensor]:
    """Predict the next token and, with another head of the same logits, the one after it."""
    logits, labels = model(given["tokens"]), given["labels"]
    total, weight = piper.losses.cross_entropy(logits, labels)
    after, _ = piper.losses.cross_entropy(logits[:, :-1].flip(-1), labels[:, 1:])
    return total + 0.3 * after, weight


def crossed_loss(model: nn.Module, given: plain.Batch) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(given["tokens"], given["images"]), given["labels"])


def routed_loss(model: nn.Module, given: plain.Batch) -> tuple[Tensor, Tensor]:
    keep = (given["labels"] != -100).to(given["images"].dtype)
    logits, balance = model(given["tokens"], keep)
    total, weight = piper.losses.cross_entropy(logits, given["labels"])
    return total + 0.1 * balance.sum(), weight


def tensor(
    devices: list[int], between: int | None = None, weights: Mapping[str, int] = COLUMNS
) -> piper.Directive:
    return piper.shard(piper.at(), devices, 2, axis="TP", weights=dict(weights), between=between)


def stages(*strategies: Sequence[piper.Directive]) -> list[piper.Directive]:
    return [*(d for each in strategies for d in each), piper.split(piper.at(), parts=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A model, its loss and a strategy that trained wrongly in silence elsewhere."""

    strategy: Sequence[piper.Directive]
    model: Callable[[], nn.Module] = Decoder
    loss: plain.Loss = token_loss
    quick: bool = False  # in every run of the tests


DP = [piper.replicate(piper.at(), FOUR, zero=1)]
TIED = [piper.replicate(piper.at(PP=stage), [2 * stage, 2 * stage + 1], zero=2) for stage in (0, 1)]
PATTERNS = {
    "2 logits of a divided vocabulary": Pattern(strategy=[tensor(PAIR)], quick=True),
    "3 a second loss over uneven tokens": Pattern(
        strategy=stages([piper.replicate(piper.at(), PAIR, zero=2)]), loss=two_tokens, quick=True
    ),
    "5 experts and padding in groups of another order": Pattern(
        strategy=[tensor([3, 1, 0, 2], weights=DENSE), piper.shard(piper.at(EP="*"), [3, 1, 0, 2], ways=2)],
        model=Routed,
        loss=routed_loss,
    ),
    "6 cross attention in groups of another order": Pattern(
        strategy=[*DP, tensor([2, 0, 3, 1])], model=Crossed, loss=crossed_loss
    ),
    "7 images and tokens joined along a divided sequence": Pattern(
        strategy=[*DP, tensor([2, 0, 3, 1], between=1)], model=Crossed, loss=crossed_loss, quick=True
    ),
    "8 sinks of heads in the norm that clips": Pattern(
        strategy=[tensor(PAIR, weights=HEADED)], model=Sinks, quick=True
    ),
    "10 balance without padding under tensor parallelism": Pattern(
        strategy=[tensor(PAIR, weights=DENSE)], model=Routed, loss=routed_loss
    ),
    "11 a norm that divided heads share": Pattern(strategy=[*DP, tensor(FOUR)], quick=True),
    "norms between regions divided along the sequence": Pattern(strategy=[*DP, tensor(FOUR, between=1)]),
    "the scale of a loss under context parallelism": Pattern(
        strategy=[*DP, piper.shard(piper.at(), FOUR, 2, axis="CP", batch=BOTH)], quick=True
    ),
    "both axes, and replicas": Pattern(
        strategy=[
            piper.replicate(piper.at(), [*range(8)], zero=3),
            tensor([*range(8)], between=1),
            piper.shard(piper.at(), [*range(8)], 2, axis="CP", batch=BOTH),
        ]
    ),
    "a tied weight counts once in the norm": Pattern(
        strategy=stages(TIED), model=lambda: Decoder(tied=True), quick=True
    ),
    "experts and divided weights in the norm": Pattern(
        strategy=[tensor(FOUR, weights=DENSE), piper.shard(piper.at(EP="*"), FOUR, ways=2)],
        model=Routed,
        loss=routed_loss,
    ),
    "gradients of experts over their own replicas": Pattern(
        strategy=[piper.replicate(piper.at(), FOUR, zero=1), piper.shard(piper.at(EP="*"), FOUR, ways=2)],
        model=Routed,
        loss=routed_loss,
        quick=True,
    ),
    "microbatches without a label": Pattern(
        strategy=[*TIED, piper.split(piper.at(), parts=4), *piper.schedules.one_f_one_b(2, 4)]
    ),
}


def clipped(params: list[Tensor], limit: float) -> float:
    return float(nn.utils.clip_grad_norm_(params, limit))


@pytest.mark.parametrize(
    "name", [n if p.quick else pytest.param(n, marks=pytest.mark.slow) for n, p in PATTERNS.items()]
)
def test_the_numbers_are_those_of_plain_pytorch(name: str) -> None:
    """Losses, norms, the first step's gradients, and the state after two clipped steps; the first state too."""
    made, limit = PATTERNS[name], 0.05
    batches = [batch(seed) for seed in range(2)]
    job = Job(
        model=made.model,
        loss=made.loss,
        data=lambda: batches,
        strategy=made.strategy,
        optimizer=plain.sgd,
        precision="fp64",
        clip_norm=limit,
    )
    torch.manual_seed(0)
    model = made.model().double()
    optimizer = plain.sgd(model.parameters())
    with launch_inline(compile(job, device="cpu"), Options(keep_gradients=True)) as run:
        assert plain.largest_difference(model.state_dict(), run.state_dict()) < 1e-15, "as initialised"
        for given in batches:
            result = run.step(given)
            optimizer.zero_grad()
            wide = {
                key: value.double() if value.is_floating_point() else value for key, value in given.items()
            }
            total, weight = made.loss(model, wide)
            (total / weight).backward()
            wanted = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            norm = clipped([*model.parameters()], limit)
            optimizer.step()
            assert norm > limit, "it clips"
            assert abs(result.loss - float(total / weight)) < 1e-12
            assert abs(result.grad_norm - norm) < 1e-12 * max(1.0, norm)
            assert plain.largest_difference(wanted, run.gradients()) < 1e-12
        assert plain.largest_difference(model.state_dict(), run.state_dict()) < 1e-12
