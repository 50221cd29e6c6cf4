"""Losses over a sharded vocabulary in whole jobs: smoothed, weighted, with z-loss, of several heads, fused or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import at, replicate, shard, split
from piper.compiler import compile
from piper.models import decoder
from piper.models.layers import rope
from piper.run.launch import launch_inline
from piper.schedules import one_f_one_b, zero_bubble
from tests import plain
from tests.runtime.divided import FIELDS, LENGTH, SIZES, VOCAB, batches, staged

SMOOTHING, Z, SHARE, CLIP = 0.1, 0.01, 0.3, 0.05
Batch = Mapping[str, Tensor]
Hidden = list[Tensor]


class TwoTokens(nn.Module):
    """A decoder in two stages that predicts the next token, and from that one's embedding the token after it."""

    def __init__(self) -> None:
        super().__init__()
        config = decoder.Config.tiny(layers=1, stages=1)
        self.config = config
        self.embedding = nn.Embedding(VOCAB, config.dim)
        self.layers = nn.ModuleList(decoder.Decoder(config).layers)
        self.join = nn.Linear(2 * config.dim, config.dim)
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCAB)
        self.register_buffer("scales", torch.linspace(0.5, 1.5, VOCAB))

    def forward(self, tokens: Tensor) -> Hidden:
        after = F.pad(tokens[:, 1:], (0, 1))
        with piper.annotate("PP"):
            embedded = self.embedding(tokens)
            rotation = rope(tokens.shape[1], self.config.rotary, self.config.rope_base, like=embedded)
            x = self.layers[0](embedded, rotation)
            next_embedded = self.embedding(after)
        with piper.annotate("PP"):
            y = torch.tanh(self.join(torch.cat([x, next_embedded], -1)))
            return [self.norm(x), self.norm(y)]


class Llama(nn.Module):
    """An unmodified Llama in two stages, whose head the loss applies."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2))
        staged(model, 2, 2, "model.layers")
        self.model, self.head = model.model, model.lm_head
        self.register_buffer("scales", torch.linspace(0.5, 1.5, VOCAB))

    def forward(self, tokens: Tensor) -> Hidden:
        return [self.model(input_ids=tokens, use_cache=False).last_hidden_state]


def labels_of(batch: Batch, heads: int) -> list[Tensor]:
    """The labels of each head: a later one predicts a later token."""
    labels = batch["labels"]
    return [labels, F.pad(labels[:, 1:], (0, 1), value=-100)][:heads]


def fused(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (of two classes)
    hidden = model(batch["tokens"])
    found = [
        piper.losses.fused_cross_entropy(
            x,
            model.head.weight,
            labels,
            pieces=3,
            bias=model.head.bias,
            class_weight=model.scales,
            label_smoothing=SMOOTHING,
            z_loss=Z,
        )
        for x, labels in zip(hidden, labels_of(batch, len(hidden)), strict=True)
    ]
    total = torch.stack([SHARE**i * total for i, (total, _) in enumerate(found)]).sum()
    return total, found[0][1]


def unfused(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:  # noqa: ANN401 (of two classes)
    hidden = model(batch["tokens"])
    found = [
        piper.losses.cross_entropy(
            model.head(x), labels, weight=model.scales, label_smoothing=SMOOTHING, z_loss=Z
        )
        for x, labels in zip(hidden, labels_of(batch, len(hidden)), strict=True)
    ]
    total = torch.stack([SHARE**i * total for i, (total, _) in enumerate(found)]).sum()
    return total, found[0][1]


def wanted(model: Any, batch: Batch) -> Tensor:  # noqa: ANN401
    """The same in PyTorch's own words, on whole logits."""
    hidden = model(batch["tokens"])
    total = count = torch.zeros((), dtype=torch.float64)
    for i, labels in enumerate(labels_of(batch, len(hidden))):
        logits, flat = model.head(hidden[i]).flatten(0, 1), labels.flatten()
        scales = model.scales.to(logits.dtype)
        counts = torch.where(flat < 0, 0.0, scales[flat.clamp(min=0)])
        entropy = F.cross_entropy(logits, flat, scales, label_smoothing=SMOOTHING, reduction="sum")
        total = total + SHARE**i * (entropy + Z * (logits.logsumexp(-1).square() * counts).sum())
        count = count if i else counts.sum()
    return total / count


class Clipped(torch.optim.SGD):
    """Clips the norm of all gradients before it steps."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], CLIP)
        super().step(closure)


WEIGHTS = {
    TwoTokens: decoder.SHARDED_WEIGHTS,
    Llama: {"*q_proj|*k_proj|*v_proj|*gate_proj|*up_proj|head|*embed_tokens": 0, "*o_proj|*down_proj": 1},
}
Strategy = Callable[[Mapping[str, int]], list[piper.Directive]]


def zero(level: int) -> Strategy:
    return lambda weights: [
        replicate(at(), range(4), zero=level),
        shard(at(), range(4), 2, axis="TP", weights=weights, between=1),
    ]


def staged_by(schedule: Sequence[piper.Directive]) -> Strategy:
    return lambda weights: [
        *(
            shard(at(PP=stage), [2 * stage, 2 * stage + 1], axis="TP", weights=weights, between=1)
            for stage in range(2)
        ),
        split(at(), parts=2),
        *schedule,
    ]


def two_axes(weights: Mapping[str, int]) -> list[piper.Directive]:
    return [
        shard(at(), range(4), 2, axis="TP", weights=weights),
        shard(at(), range(4), 2, axis="CP", batch=FIELDS, balance="zigzag"),
    ]


STRATEGIES: dict[str, Strategy] = {
    "zero 0": zero(0),
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "1f1b": staged_by(one_f_one_b(2, 2)),
    "zero bubble": staged_by(zero_bubble(2, 2)),
    "tp4": lambda weights: [shard(at(), range(4), axis="TP", weights=weights)],
    "two axes": two_axes,
}
QUICK = {(TwoTokens, fused, "zero bubble"), (TwoTokens, unfused, "zero 3")}
CASES = [
    pytest.param(model, loss, name, marks=[] if (model, loss, name) in QUICK else [pytest.mark.slow])
    for model in (TwoTokens, Llama)
    for loss in (fused, unfused)
    for name in STRATEGIES
]


@pytest.mark.parametrize(("model", "loss", "name"), CASES)
def test_a_loss_over_a_sharded_vocabulary_is_that_of_one_device(
    model: type[nn.Module], loss: plain.Loss, name: str
) -> None:
    given = batches()
    assert given[0]["tokens"].shape[1] == LENGTH

    def clipped(params: object) -> torch.optim.Optimizer:
        return Clipped(params, lr=0.1, momentum=0.9)  # type: ignore[arg-type]

    right = plain.train(model, wanted, given, optimizer=clipped)
    job = piper.Job(
        model=model,
        loss=loss,
        data=lambda: given,
        strategy=STRATEGIES[name](WEIGHTS[model]),
        optimizer=plain.sgd,
        precision="fp64",
        clip_norm=CLIP,
    )
    with launch_inline(compile(job, device="cpu")) as run:
        losses = [run.step(batch).loss for batch in given]
        state = run.state_dict()
    assert max(abs(a - b) for a, b in zip(right.losses, losses, strict=True)) < 1e-9
    assert plain.largest_difference(right.state, state) < 1e-9


class Head(nn.Module):
    """A table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            logits: Tensor = self.head(self.table(tokens))
            return logits


@pytest.mark.parametrize("label", [8, -1])
def test_a_label_that_is_no_class_gives_no_number(label: int) -> None:
    """PyTorch raises on the host and stops a GPU. No device of a sharded vocabulary has that class."""
    tokens = torch.arange(8).reshape(2, 4)
    good = {"tokens": tokens, "labels": tokens.roll(1)}
    bad = {**good, "labels": tokens.roll(1).masked_fill(tokens == 5, label)}
    with pytest.raises(IndexError):
        F.cross_entropy(torch.zeros(8, 8), bad["labels"].flatten())
    job = piper.Job(
        model=Head,
        loss=lambda model, batch: F.cross_entropy(
            model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        ),
        data=lambda: [good],
        strategy=[shard(at(), [0, 1], axis="TP", weights={"head.*": 0})],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        precision="fp64",
    )
    with launch_inline(compile(job)) as run:
        assert run.step(good).loss > 0
        assert torch.tensor(run.step(bad).loss).isnan()
