"""A run goes on from a checkpoint exactly: with the same strategy to the bit, with any other to 1e-9."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from piper.compiler import Program, compile
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests.checkpoint.jobs import (
    ROWS,
    batches,
    case,
    equal_bits,
    program,
    resume,
    strategy,
    train_and_save,
)
from tests.runtime.grid import Cell, job
from tests.runtime.inline_workers import workers_of

SAME = [
    ("decoder", "pp2-dp2-zero3", "adamw"),  # its embedding is tied across stages
    ("mlp", "pp2-dp2-zero1", "bf16"),
    ("mlp", "dp4-zero2", "nadam"),
    ("mlp", "pp2-dp2-zero0", "sgd"),
    ("dropout", "pp2-dp2-zero3", "adamw"),
    ("decoder", "dp4-groups-zero3", "adamw"),
    ("mlp", "dp4-owners-zero3", "bf16"),
]
OTHER = [
    ("decoder", "pp2-dp2-zero3", "dp4", "adamw"),
    ("decoder", "pp2-dp2-zero3", "one", "adamw"),
    ("decoder", "pp2-dp2-zero3", "pp", "adamw"),
    ("decoder", "one", "pp2-dp2-zero3", "adamw"),
    ("mlp", "pp", "dp4-zero2", "sgd"),
    ("mlp", "dp4-zero2", "pp2-dp2-zero1", "nadam"),
    ("frozen", "pp2-dp2-zero3", "dp4-zero1", "adamw"),
    ("decoder", "dp4-groups-zero3", "pp2-dp2-zero3", "adamw"),
    ("mlp", "dp4-zero2", "dp4-groups-zero3", "nadam"),
    ("decoder", "dp4-owners-zero3", "pp2-dp2-zero3", "adamw"),
    ("mlp", "dp4-groups-zero3", "dp4-owners-zero3", "nadam"),
    ("moe", "pp2-ep2-zero3", "ep4", "adamw"),
    ("moe", "ep4", "ep2-dp4-zero2", "adamw"),
    ("moe", "ep2-dp4-zero2", "pp2-ep2-zero3", "adamw"),
]


@pytest.mark.parametrize(("model", "name", "settings"), SAME)
def test_the_same_strategy_goes_on_to_the_bit(model: str, name: str, settings: str, tmp_path: Path) -> None:
    made, given = program(model, name, settings), batches(model, 0, 4)
    losses, saved, last = train_and_save(made, given, 2, tmp_path / "checkpoint")
    again, loaded, end = resume(made, given[2:], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert again == losses
    assert equal_bits(end, last)


@pytest.mark.parametrize(("model", "before", "after", "settings"), OTHER)
def test_another_strategy_goes_on_from_the_same_numbers(
    model: str, before: str, after: str, settings: str, tmp_path: Path
) -> None:
    given = batches(model, 0, 4)
    losses, saved, _ = train_and_save(program(model, before, settings), given, 2, tmp_path / "checkpoint")
    again, loaded, _ = resume(program(model, after, settings), given[2:], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert again == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("before", "after"), [("dp2", "pp2-dp2-zero3"), ("pp", "dp2")])
def test_buffers_go_on(before: str, after: str, tmp_path: Path) -> None:
    """BatchNorm mixes samples, so the losses of other slices differ: the state is what must be equal."""
    given = batches("convnet", 0, 4)
    _, saved, _ = train_and_save(program("convnet", before), given, 2, tmp_path / "checkpoint")
    _, loaded, _ = resume(program("convnet", after), given[2:3], tmp_path / "checkpoint")
    assert equal_bits(loaded, saved)
    assert any(name.endswith("running_mean") for name in saved)


class Unread(nn.Module):
    """A model with values that its forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(16, 4), nn.Parameter(torch.rand(3))
        self.scale = nn.Parameter(torch.tensor(2.0))  # a single number, which shards hold as a run of one
        self.register_buffer("note", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x) * self.scale
        return result


def test_what_no_device_reads_and_single_numbers_go_on(tmp_path: Path) -> None:
    made = case("mlp")
    given = [made.batch(ROWS, seed) for seed in range(4)]
    one, sharded = (
        compile(
            job(
                Cell(case="mlp"),
                model=Unread,
                loss=made.loss,
                data=lambda: given,
                strategy=strategy(name, 1),
            )
        )
        for name in ("one", "dp4-zero2")
    )
    losses, saved, _ = train_and_save(one, given, 2, tmp_path / "a")
    assert {"spare", "note", "scale"} <= saved.keys() and "scratch" not in saved
    again, loaded, _ = resume(sharded, given[2:], tmp_path / "a")
    assert equal_bits(loaded, saved)
    assert again == pytest.approx(losses, rel=1e-9)
    losses, saved, _ = train_and_save(sharded, given, 2, tmp_path / "b")
    again, loaded, _ = resume(one, given[2:], tmp_path / "b")
    assert equal_bits(loaded, saved)
    assert again == pytest.approx(losses, rel=1e-9)


def test_bf16_keeps_its_exact_weights(tmp_path: Path) -> None:
    given = batches("mlp", 0, 4)
    _, saved, _ = train_and_save(program("mlp", "pp2-dp2-zero1", "bf16"), given, 2, tmp_path / "a")
    _, loaded, _ = resume(program("mlp", "dp4", "bf16"), given[2:3], tmp_path / "a", blank=False)
    assert equal_bits(loaded, saved)
    assert {str(value.dtype) for value in saved.values()} == {"torch.float32"}


def test_how_an_optimizer_computes_is_not_taken_from_a_checkpoint(tmp_path: Path) -> None:
    given, made = batches("mlp", 0, 4), program("mlp", "one")

    def computing(*, fused: bool | None = None, foreach: bool | None = None) -> Program:
        def adamw(params: Iterable[Tensor]) -> AdamW:
            return AdamW(params, lr=0.02, fused=fused, foreach=foreach)

        return replace(made, job=replace(made.job, optimizer=adamw))

    train_and_save(computing(fused=True), given, 2, tmp_path / "a")
    with launch_inline(computing(foreach=True), Options(blank=True)) as run:
        run.load(tmp_path / "a")
        optimizer = workers_of(run)[0].env.state.optimizer
        assert optimizer is not None
        (group,) = optimizer.param_groups
        assert (group["fused"], group["foreach"], group["lr"]) == (None, True, 0.02)
