"""Losses over a sharded vocabulary: those of the undivided call, without a collective of all logits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.errors import CaptureError
from piper.ir.sharding import Shard
from piper.losses import fused_cross_entropy
from tests.capture.shard.test_rules import Batch, Net, compare, divided, numbers, tokens

CLASSES, WIDTH = 8, 6
Loss = Callable[[Tensor, Batch], Tensor]  # of logits of [2, 8, CLASSES]


def flat(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), batch["labels"].flatten()


def with_z(logits: Tensor, batch: Batch) -> Tensor:
    rows, labels = flat(logits, batch)
    return F.cross_entropy(rows, labels) + 0.1 * rows.logsumexp(-1).square().mean()


LOSSES: dict[str, Loss] = {
    "smoothed": lambda x, b: F.cross_entropy(*flat(x, b), label_smoothing=0.1),
    "smoothed sum": lambda x, b: F.cross_entropy(*flat(x, b), label_smoothing=0.3, reduction="sum"),
    "weighted": lambda x, b: F.cross_entropy(*flat(x, b), b["weight"]),
    "weighted sum": lambda x, b: F.cross_entropy(*flat(x, b), b["weight"], reduction="sum"),
    "weighted and smoothed": lambda x, b: F.cross_entropy(*flat(x, b), b["weight"], label_smoothing=0.2),
    "each, weighted and smoothed": lambda x, b: (
        F.cross_entropy(x.mT, b["labels"], b["weight"], label_smoothing=0.2, reduction="none").square().sum()
    ),
    "another label ignored": lambda x, b: F.cross_entropy(*flat(x, b), label_smoothing=0.1, ignore_index=3),
    "probabilities": lambda x, b: F.cross_entropy(x.flatten(0, 1), b["target"].softmax(-1)),
    "probabilities, weighted and smoothed": lambda x, b: F.cross_entropy(
        x.flatten(0, 1), b["target"].softmax(-1), b["weight"], label_smoothing=0.2
    ),
    "probabilities of a teacher": lambda x, b: F.cross_entropy(
        x.flatten(0, 1), (x * 0.5).flatten(0, 1).softmax(-1)
    ),
    "one row": lambda x, b: F.cross_entropy(x[0, 0], b["labels"][1, 1], b["weight"], label_smoothing=0.2),
    "likelihood": lambda x, b: F.nll_loss(x.log_softmax(-1).flatten(0, 1), b["labels"].flatten()),
    "likelihood, weighted": lambda x, b: F.nll_loss(
        x.log_softmax(-1).flatten(0, 1), b["labels"].flatten(), b["weight"]
    ),
    "z-loss": with_z,
    "z-loss, kept": lambda x, b: x.logsumexp(-1, keepdim=True).square().sum() / 16,
    "logits of other positions": lambda x, b: x.logsumexp(1).square().mean(),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_a_sharded_vocabulary(name: str, degree: int) -> None:
    labels = tokens(2, 8, classes=CLASSES)
    if "another" not in name:
        labels[0, :5] = -100

    def call(net: Net, batch: Batch) -> Tensor:
        return LOSSES[name](F.linear(batch["x"], net.head), batch)

    batch = {
        "x": numbers(2, 8, WIDTH),
        "labels": labels,
        "weight": torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) + 0.2,
        "target": numbers(16, CLASSES),
    }
    ran = compare(call, {"head": (CLASSES, WIDTH)}, batch, {"head": Shard(0)}, degree=degree)
    assert not {"all_gather", "all_to_all"} & ran.keys()
    if name == "z-loss":  # cross entropy and z-loss read one sum of exponentials
        assert (ran["max"], ran["all_reduce"]) == (1, 2)


def fused(net: Net, batch: Batch) -> Tensor:
    """All that the fused loss can do."""
    total, weight = fused_cross_entropy(
        batch["x"] * net.scale,
        net.head,
        batch["labels"],
        pieces=3,
        bias=net.bias,
        class_weight=batch["weight"],
        label_smoothing=0.1,
        z_loss=0.01,
    )
    return total / weight


def plain(net: Net, batch: Batch) -> Tensor:
    """The same in PyTorch's own words."""
    logits = F.linear(batch["x"] * net.scale, net.head, net.bias).flatten(0, 1)
    labels, weight = batch["labels"].flatten(), batch["weight"]
    counted = torch.where(labels < 0, 0.0, weight[labels.clamp(min=0)])
    wide = (logits.logsumexp(-1).square() * counted).sum() / counted.sum()
    return F.cross_entropy(logits, labels, weight, label_smoothing=0.1) + 0.01 * wide


FUSED_SHAPES = {"scale": (WIDTH,), "head": (CLASSES, WIDTH), "bias": (CLASSES,)}


def fused_batch() -> dict[str, Tensor]:
    labels = tokens(2, 8, classes=CLASSES)
    labels[0, :5] = -100
    return {"x": numbers(2, 8, WIDTH), "labels": labels, "weight": numbers(CLASSES).abs() + 0.1}


@pytest.mark.parametrize("degree", [2, 4])
def test_a_fused_loss_over_a_sharded_vocabulary_exchanges_a_few_numbers_for_each_row(degree: int) -> None:
    ran = compare(fused, FUSED_SHAPES, fused_batch(), {"head": Shard(0)}, degree=degree, undivided=plain)
    assert ran == {"max": 1, "all_reduce": 1, "back none": 1, "none": 1, "back all_reduce": 1}


@pytest.mark.parametrize("weights", [{}, {"head": Shard(0)}])
def test_a_fused_loss_of_a_sharded_sequence(weights: dict[str, Shard]) -> None:
    by = Shard(1, zigzag=True)
    fields = {"x": by, "labels": by}
    compare(fused, FUSED_SHAPES, fused_batch(), weights, fields, zigzag=True, undivided=plain)


def test_a_fused_loss_whose_head_is_sharded_along_its_inputs_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        divided(fused, FUSED_SHAPES, fused_batch(), {"head": Shard(1)})
    assert "piper.head_sums.default cannot be sharded: the weight of its head is sharded" in str(caught.value)
    assert caught.value.hint == "shard that weight along dimension 0, its outputs, or leave it whole"


def test_labels_in_rows_with_weights_and_smoothing() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        logits = F.linear(batch["x"], net.head).flatten(0, 1)
        wide = logits.logsumexp(-1).square().mean()
        return wide + F.cross_entropy(logits, batch["labels"].flatten(), batch["weight"], label_smoothing=0.1)

    batch = {"x": numbers(2, 8, WIDTH), "labels": tokens(2, 8), "weight": numbers(CLASSES).abs()}
    by = Shard(1, zigzag=True)
    compare(call, {"head": (CLASSES, WIDTH)}, batch, {}, {"x": by, "labels": by}, zigzag=True)
