"""One recording of a model serves every strategy: the plans equal those of a compilation of its own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import piper
from piper import at, remat, replicate, shard, split, strategies
from piper.capture import recordings
from piper.capture.autodiff import differentiate as autodiff
from piper.capture.autodiff.joint import trace_joint
from piper.capture.shard import aten
from piper.capture.trace.assemble import Body
from piper.capture.trace.trace import trace
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.plan.text import show_plans
from tests import zoo
from tests.runtime import divided

pytestmark = pytest.mark.usefixtures("own_captures")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x).relu())
        return x + made


class Tower(nn.Module):
    def __init__(self, dim: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def other_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.l1_loss(model(batch["x"]), batch["y"])


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.scale * loss(model, batch)


def scaled(scale: float) -> Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]:
    def scaled_loss(
        model: nn.Module, batch: Mapping[str, torch.Tensor], *, by: float = scale
    ) -> torch.Tensor:
        return by * loss(model, batch)

    return scaled_loss


def data() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(16, 8), "y": torch.zeros(16, 8)}]


def build() -> nn.Module:
    return piper.annotate_layers(Tower())


JOB = piper.Job(model=build, loss=loss, data=data)
WEIGHTS = {"*.up": 0, "*.down": 1}
STRATEGIES: dict[str, list[Directive]] = {
    "two stages": strategies.pipeline(4, pp=2, dp=2, zero=2, schedule="zero-bubble", microbatches=4),
    "other boundaries": strategies.pipeline(4, pp=2, dp=2, zero=2, microbatches=4, head=2),
    "four stages": strategies.pipeline(4, pp=4, schedule="1f1b", microbatches=16),
    "recomputed": [*strategies.fsdp(2, microbatches=2), remat(at(), 0.5)],
    "by region": [*strategies.fsdp(2, microbatches=2), remat(at(), 0, across="LAYER")],
    "tensor": [
        replicate(at(), range(4), zero=1),
        shard(at(), range(4), ways=2, axis="TP", weights=WEIGHTS),
        split(at(), parts=2),
    ],
    "tensor over four": [shard(at(), range(4), axis="TP", weights=WEIGHTS), split(at(), parts=4)],
}


@pytest.fixture(scope="module")
def first() -> Program:
    return compile(replace(JOB, strategy=strategies.ddp(4)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_plans_equal_those_of_a_compilation_of_its_own(first: Program, name: str) -> None:
    job = replace(JOB, strategy=STRATEGIES[name])
    shared, fresh = compile(job, captured=first), compile(job)
    assert show_plans(shared.plans) == show_plans(fresh.plans)
    assert shared.outline == fresh.outline


def test_a_microbatch_size_is_traced_once() -> None:
    traced: list[int] = []

    def counted(*given: object, **more: object) -> object:
        traced.append(given[3])  # type: ignore[arg-type]
        return trace(*given, **more)  # type: ignore[arg-type]

    with patch.object(recordings, "trace", counted):
        known = compile(replace(JOB, strategy=strategies.ddp(4))).recordings
        for name in ("two stages", "other boundaries", "four stages", "tensor over four"):
            compile(replace(JOB, strategy=STRATEGIES[name]), captured=known)
    assert traced == [4, 2, 1]


def test_a_recording_is_written_in_aten_once_for_all_its_shardings() -> None:
    known = compile(replace(JOB, strategy=strategies.ddp(4))).recordings
    with patch.object(aten, "make_fx", wraps=make_fx) as written:
        for name in ("tensor", "tensor over four"):  # of microbatches of one size
            compile(replace(JOB, strategy=STRATEGIES[name]), captured=known)
    written.assert_called_once()


def test_a_shared_program_computes_the_same_numbers(first: Program) -> None:
    job = replace(JOB, strategy=STRATEGIES["two stages"])
    batch = {"x": torch.randn(16, 8), "y": torch.randn(16, 8)}
    losses = []
    for program in (compile(job), compile(job, captured=first)):
        with piper.launch(program, on="inline") as run:
            losses.append([run.step(batch).loss, run.step(batch).loss])
    assert losses[0] == losses[1]


def test_an_equal_model_of_another_function_is_accepted(first: Program) -> None:
    again = replace(JOB, model=lambda: piper.annotate_layers(Tower(dim=8)), strategy=strategies.ddp(4))
    assert show_plans(compile(again, captured=first).plans) == show_plans(first.plans)


WRONG: dict[str, tuple[Callable[[], piper.Job], str]] = {
    "a deeper model": (
        lambda: replace(JOB, model=lambda: piper.annotate_layers(Tower(layers=5))),
        "compile: what was captured has another model\n"
        "  captured: region LAYER of layers.0\n"
        "  job:      parameter layers.4.up.weight [16, 8] float32",
    ),
    "another loss": (
        lambda: replace(JOB, loss=other_loss),
        "compile: what was captured has another loss\n  captured: loss (test_captured.py:",
    ),
    "another shape": (
        lambda: replace(JOB, data=lambda: [{"x": torch.zeros(16, 3, 8), "y": torch.zeros(16, 3, 8)}]),
        "compile: what was captured has another batch\n"
        "  captured: x [8] float32, y [8] float32\n"
        "  job:      x [3, 8] float32, y [3, 8] float32",
    ),
    "another precision": (
        lambda: replace(JOB, precision="bf16"),
        "compile: what was captured has another precision\n  captured: fp32\n  job:      bf16",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_recordings_of_another_job_are_refused(first: Program, name: str) -> None:
    job, text = WRONG[name]
    with pytest.raises(piper.ConfigError) as error:
        compile(job(), captured=first)
    assert text in str(error.value)
    assert "  hint:     compile the same job with another strategy:" in str(error.value)


@pytest.mark.parametrize("of", [lambda scale: Scaled(scale).loss, scaled], ids=["a method", "a default"])
def test_a_loss_of_the_same_code_with_another_value_is_refused(of: Callable[[float], piper.job.Loss]) -> None:
    job = replace(JOB, loss=of(2.0))
    program = compile(job)
    assert compile(job, captured=program).recordings is program.recordings
    with pytest.raises(piper.ConfigError, match="what was captured has another loss"):
        compile(replace(JOB, loss=of(3.0)), captured=program)


def test_captured_must_be_a_program(first: Program) -> None:
    with pytest.raises(piper.ConfigError) as error:
        compile(JOB, captured=first.plans)  # type: ignore[arg-type]
    assert str(error.value) == (
        "compile: captured is a Plans\n"
        "  hint: give an earlier program of the same job: compile(job, captured=program)"
    )


def test_experts_share_a_recording() -> None:
    """The code of experts serves any number of rows: another microbatch size has its own sizes, but no trace."""
    found = zoo.case("moe")
    job = piper.Job(model=found.model, loss=found.loss, data=lambda: [found.batch(8, 0)])
    ways: list[list[Directive]] = [
        [replicate(at(), range(4)), shard(at(EP="*"), range(4), ways=count), split(at(), parts=parts)]
        for count, parts in ((2, 1), (4, 1), (2, 2))
    ]
    traced: list[int] = []

    def counted(body: Body, *given: object, **more: object) -> object:
        traced.append(body.experts.total if body.experts else 0)
        return trace_joint(body, *given, **more)  # type: ignore[arg-type]

    first = compile(replace(job, strategy=ways[0]))
    for strategy in ways:
        wanted = first if strategy is ways[0] else compile(replace(job, strategy=strategy))
        with patch.object(autodiff, "trace_joint", counted):
            made = compile(replace(job, strategy=strategy), captured=first)
        assert show_plans(made.plans) == show_plans(wanted.plans)
        assert made.outline == wanted.outline
    assert list(filter(None, traced)) == [8 // 4]  # experts of a device whose code was traced


def test_a_recording_of_experts_is_divided_twice() -> None:
    """A first division leaves sizes of routed rows in the trace, which a second one must not take for its own."""
    first = compile(divided.job("moe", "tp2"))
    compile(divided.job("moe", "sp2"), captured=first)
