"""Fewer heads of keys and values than devices that divide the heads: several devices hold the same head."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import at, replicate, shard, split
from piper.check.check import check
from piper.compiler import Program, compile
from piper.errors import CaptureError
from piper.models import decoder
from piper.run.launch import launch_inline
from piper.schedules import one_f_one_b
from tests import plain
from tests.runtime.divided import FIELDS, SIZES, VOCAB, batches, hf_weights, staged


def ours(kv_heads: int = 2, stages: int = 1, **more: bool) -> nn.Module:
    """Our decoder, of four heads."""
    sizes = {"vocab": VOCAB, "dim": 32, "head_dim": 8, "hidden": 32, "heads": 4}
    return decoder.Decoder(
        decoder.Config(**sizes, layers=stages, kv_heads=kv_heads, stages=stages, **more)  # type: ignore[arg-type]
    )


class Stock(nn.Module):
    """An unmodified model of `transformers` with biases of keys and values: tokens to logits."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2ForCausalLM

        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
        config = Qwen2Config(**sizes, num_hidden_layers=1, attn_implementation=attention)
        self.model = staged(Qwen2ForCausalLM(config), 1, 1, "model.layers")
        for name, parameter in self.model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    total = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), labels, reduction="sum")
    return total, (labels >= 0).sum().to(total.dtype)


MODELS: dict[str, tuple[Callable[[], nn.Module], Mapping[str, int]]] = {
    "two heads": (partial(ours, 2), decoder.SHARDED_WEIGHTS),
    "one head": (partial(ours, 1), decoder.SHARDED_WEIGHTS),
    "normed keys": (partial(ours, 2, qk_norm=True), decoder.SHARDED_WEIGHTS),
    "two stages": (partial(ours, 1, 2), decoder.SHARDED_WEIGHTS),
    "repeated and biased": (partial(Stock, "sdpa"), hf_weights()),
    "by hand": (partial(Stock, "eager"), hf_weights()),
}
Weights = Mapping[str, int]
Strategy = Callable[[Weights], list[piper.Directive]]


def tensor(devices: int = 4, ways: int = 4, between: int | None = None) -> Strategy:
    return lambda weights: [shard(at(), range(devices), ways, axis="TP", weights=weights, between=between)]


def zero(level: int) -> Strategy:
    return lambda weights: [replicate(at(), range(8), zero=level), *tensor(8, between=1)(weights)]


def context(attention: str, first: str = "TP") -> Strategy:
    def strategy(weights: Weights) -> list[piper.Directive]:
        between = 1 if first == "TP" else None  # of slices that are innermost
        both: dict[str, piper.Directive] = {
            "TP": shard(at(), range(8), 4, axis="TP", weights=weights, between=between),
            "CP": shard(at(), range(8), 2, axis="CP", batch=FIELDS, attention=attention, balance="zigzag"),
        }
        return [both[first], *(each for name, each in both.items() if name != first)]

    return strategy


def stages(weights: Weights) -> list[piper.Directive]:
    halves = [range(4), range(4, 8)]
    return [
        *(shard(at(PP=i), half, axis="TP", weights=weights, between=1) for i, half in enumerate(halves)),
        split(at(), parts=2),
        *one_f_one_b(2, 2),
    ]


CASES: dict[str, tuple[str, Strategy]] = {
    "tp4": ("two heads", tensor()),
    "one head": ("one head", tensor(between=1)),
    "normed keys": ("normed keys", tensor(between=1)),
    "zero 0": ("two heads", zero(0)),
    "zero 1": ("one head", zero(1)),
    "zero 2": ("two heads", zero(2)),
    "zero 3": ("one head", zero(3)),
    "1f1b": ("two stages", stages),
    "gathered context": ("two heads", context("gather")),
    "ring": ("one head", context("ring")),
    "ring outside": ("two heads", context("ring", first="CP")),
    "repeated": ("repeated and biased", tensor(between=1)),
    "repeated, zero 3": ("repeated and biased", zero(3)),
    "by hand": ("by hand", tensor()),
}
QUICK = {"tp4", "zero 3", "repeated"}


def compiled(model: str, strategy: Strategy) -> Program:
    build, weights = MODELS[model]
    job = piper.Job(
        model=build,
        loss=loss,
        data=batches,
        strategy=strategy(weights),
        optimizer=plain.sgd,
        precision="fp64",
        clip_norm=1e9,
    )
    return compile(job, device="cpu")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_heads_that_several_devices_hold_train_as_on_one_device(name: str) -> None:
    model, strategy = CASES[name]
    given = batches()
    if (
        MODELS[model][1] is not decoder.SHARDED_WEIGHTS
    ):  # computes in float32 in places, which `check` widens on both sides
        report = check(compiled(model, strategy), launch_inline, given, tol=1e-9)
        assert report.ok, report
        return
    right = plain.train(MODELS[model][0], loss, given)
    norms = torch.stack([gradient.norm() for gradient in right.gradients.values()])
    with launch_inline(compiled(model, strategy)) as run:
        results = [run.step(batch) for batch in given]
        state = run.state_dict()
    assert max(abs(a - b.loss) for a, b in zip(right.losses, results, strict=True)) < 1e-9
    assert abs(results[0].grad_norm - float(norms.norm())) < 1e-9, "each copy counts once"
    assert plain.largest_difference(right.state, state) < 1e-9


def test_a_run_goes_on_where_other_devices_hold_the_heads(tmp_path: Path) -> None:
    given = batches()
    right = plain.train(MODELS["one head"][0], loss, given)
    with launch_inline(compiled("one head", zero(1))) as run:
        run.step(given[0])
        run.save(tmp_path / "saved")
    with launch_inline(compiled("one head", tensor(2, 2))) as run:
        run.load(tmp_path / "saved")
        run.step(given[1])
        assert plain.largest_difference(right.state, run.state_dict()) < 1e-9
        run.save(tmp_path / "again")
    with launch_inline(compiled("one head", tensor(between=1))) as run:
        run.load(tmp_path / "again")
        assert plain.largest_difference(right.state, run.state_dict()) < 1e-9


def test_each_device_holds_one_head_of_keys() -> None:
    program = compiled("two heads", tensor())
    keys = [
        (piece.shape, [(each.degree, each.stride) for each in piece.shardings], bucket.groups)
        for bucket in program.plans.buckets.values()
        for piece in bucket.pieces
        if piece.name.endswith("attention.k.weight")
    ]
    assert keys == [((8, 32), [(2, 2)], ((0, 1), (2, 3)))]


def test_fewer_heads_of_queries_than_devices_are_refused() -> None:
    with pytest.raises(CaptureError, match="4 heads do not divide by 8"):
        compiled("two heads", tensor(8, 8))
