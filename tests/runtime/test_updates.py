"""From gradients to parameters in numbers that were worked out by hand: clipping, portions, buffers, types."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import piper
from piper.compiler import compile
from piper.ir.dtypes import JobPrecision
from piper.job import Job
from piper.run.launch import launch_inline
from piper.runtime import device_state
from piper.runtime.device_state import fuse
from piper.runtime.worker import Options

Batch = Mapping[str, Tensor]


class Dot(nn.Module):
    """Parameters whose gradient is the data: (3, 4) for a batch of threes and fours."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            return (x * self.w).sum(-1)


def dots(scale: float, rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.tensor([[3.0, 4.0]]).repeat(rows, 1) * scale}


def mean(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch["x"])
    return found.mean()


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    found: Tensor = model(batch["x"])
    return found.sum(), torch.tensor(float(len(found)))


def sgd(params: Iterable[Tensor]) -> Optimizer:
    return SGD(params, lr=1.0)


def stepped(
    batch: Batch,
    *,
    clip: float | None,
    loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]] = mean,
    devices: int = 1,
    zero: int = 0,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = sgd,
    precision: JobPrecision = "fp64",
) -> tuple[list[float], float]:
    """The parameters after one step of SGD from zero, and the norm of its gradient."""
    job = Job(
        model=Dot,
        loss=loss,
        data=lambda: [batch],
        strategy=[piper.replicate(piper.at(), range(devices), zero), piper.split(piper.at(), parts=2)],
        optimizer=optimizer,
        precision=precision,
        clip_norm=clip,
    )
    with launch_inline(compile(job)) as run:
        norm = run.step(batch).grad_norm
        return run.state_dict()["w"].tolist(), norm


@pytest.mark.parametrize(
    ("scale", "clip", "wanted", "norm"),
    [
        (1.0, None, [-3.0, -4.0], 5.0),
        (1.0, 1.0, [-0.6, -0.8], 5.0),
        (1.0, 5.5, [-3.0, -4.0], 5.0),
        (2**-10, 1.0, [-3 / 1024, -4 / 1024], 5 / 1024),  # a small gradient is not scaled up
    ],
)
@pytest.mark.parametrize("loss", [mean, summed], ids=["mean", "summed"])
def test_clipping_scales_down_and_never_up(
    loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]],
    scale: float,
    clip: float | None,
    wanted: list[float],
    norm: float,
) -> None:
    found, measured = stepped(dots(scale), clip=clip, loss=loss)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert measured == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_each_element_counts_once_in_the_norm(zero: int) -> None:
    found, norm = stepped(dots(1.0), clip=1.0, devices=2, zero=zero)
    assert found == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert norm == pytest.approx(5.0, rel=1e-9)


class OwnSGD(SGD):
    """An optimizer of a user, which need not divide gradients itself."""


seen: list[list[float]] = []


def watched(params: Iterable[Tensor]) -> Optimizer:
    made = SGD(params, lr=1.0, fused=True)
    made.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].grad.tolist())
    )
    return made


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: SGD(params, lr=1.0, fused=True),
        lambda params: OwnSGD(params, lr=1.0, fused=True),
        watched,
    ],
    ids=["torch's", "own", "watched"],
)
def test_fused_optimizers_see_gradients_divided_and_clipped(
    optimizer: Callable[[Iterable[Tensor]], Optimizer], precision: JobPrecision
) -> None:
    found, _ = stepped(dots(1.0), clip=1.0, loss=summed, optimizer=optimizer, precision=precision)
    assert found == pytest.approx([-0.6, -0.8], rel=1e-2 if precision == "bf16" else 1e-5)
    if optimizer is watched:
        assert seen[-1] == pytest.approx([0.6, 0.8], rel=1e-5)


class Three(nn.Module):
    """Three parameters of two numbers, each with the gradient 1, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unread = (nn.Parameter(torch.full((2,), 8.0)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            return (x * (self.a + self.b + self.c)).sum(-1)


def fused(params: Iterable[Tensor]) -> Optimizer:
    return SGD(params, lr=1.0, fused=True)


def of_three(
    precision: JobPrecision, optimizer: Callable[[Iterable[Tensor]], Optimizer], steps: int = 2
) -> dict[str, Tensor]:
    batch = {"x": torch.ones(2, 2)}
    job = Job(
        model=Three, loss=mean, data=lambda: [batch], optimizer=optimizer, precision=precision, steps=steps
    )
    with launch_inline(compile(job)) as run:
        for _ in range(steps):
            run.step(batch)
        return run.state_dict()


@pytest.mark.parametrize("portion", [1, 2, 3, 4, 2**26])
def test_a_portion_is_stepped_once(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    monkeypatch.setattr(device_state, "PORTION", portion)
    found = of_three("bf16", fused)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [6.0, 6.0],
        "b": [6.0, 6.0],
        "c": [6.0, 6.0],
        "unread": [8.0, 8.0],
    }


def test_what_no_gradient_reaches_is_left_alone() -> None:
    """Weight decay takes a half of each parameter that has a gradient, and nothing of the others."""
    found = of_three("fp64", lambda params: SGD(params, lr=1.0, weight_decay=0.5), steps=1)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [3.0, 3.0],
        "b": [3.0, 3.0],
        "c": [3.0, 3.0],
        "unread": [8.0, 8.0],
    }


class Counting(nn.Module):
    """Multiplies by what it makes of a buffer, more numbers than the buffer has, and then changes the buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            y = (self.w * x) * (self.seen * torch.ones(8, dtype=x.dtype))
            self.seen.add_(1.0)
            return y.mean(-1)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "made again"])
def test_a_backward_sees_the_buffer_that_its_forward_saw(again: bool) -> None:
    """The parts of a step see 2, 3 and then 4, 5: the gradients are 3 * 2.5 and 3 * 4.5.

    Where the factors are made again, they are made of what the buffer held before it was overwritten.
    """
    batch = {"x": torch.full((2, 8), 3.0)}
    job = Job(
        model=Counting,
        loss=mean,
        data=lambda: [batch],
        strategy=[piper.split(piper.at(), parts=2), *([piper.remat(piper.at(), 0)] if again else [])],
        optimizer=sgd,
        precision="fp64",
    )
    with launch_inline(compile(job), Options(keep_gradients=True)) as run:
        run.step(batch)
        assert run.gradients()["w"].item() == 7.5
        assert run.state_dict()["seen"].item() == 4.0
        run.step(batch)
        assert run.gradients()["w"].item() == 13.5


class Held(nn.Module):
    """One parameter in two stages, of which the second does not train it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            y = x * self.w
        with piper.annotate("PP"):
            return y + self.w.detach() / 2


def test_a_copy_that_no_backward_reaches_gets_the_sum_and_adds_nothing() -> None:
    """The gradient is 2 in each step: w goes from 1 to -1, and so does the copy of the second stage."""
    batch = {"x": torch.full((2,), 2.0)}
    job = Job(
        model=Held,
        loss=mean,
        data=lambda: [batch],
        strategy=[piper.place(piper.at(PP=0), [0]), piper.place(piper.at(PP=1), [1])],
        optimizer=sgd,
        precision="fp64",
    )
    with launch_inline(compile(job)) as run:
        assert [run.step(batch).loss for _ in range(2)] == [2.5, -2.5]
        assert run.state_dict()["w"].item() == -3.0


class Quiet(nn.Module):
    """Adds ten times what it computes where autograd does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            with torch.no_grad():
                aside = 10 * x * self.w
            return x * self.w + aside


def test_no_gradient_goes_through_what_runs_without_grad() -> None:
    batch = {"x": torch.full((2,), 2.0)}
    job = Job(model=Quiet, loss=mean, data=lambda: [batch], optimizer=sgd, precision="fp64")
    with launch_inline(compile(job), Options(keep_gradients=True)) as run:
        assert run.step(batch).loss == 22.0
        assert run.gradients()["w"].item() == 2.0


def test_an_optimizer_is_fused_only_where_that_was_left_open() -> None:
    param = [torch.zeros(1, requires_grad=True)]
    for given, wanted in (
        ({}, True),
        ({"foreach": True}, None),
        ({"fused": False}, False),
        ({"differentiable": True}, None),
    ):
        made = torch.optim.AdamW(param, **given)  # type: ignore[arg-type]
        fuse(made)
        assert made.param_groups[0]["fused"] is wanted, given
