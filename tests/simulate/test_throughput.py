"""Tokens or samples a second, and the arithmetic of a model against the peak, counted by hand."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import at, place, remat, replicate, split
from piper.directives import Directive
from piper.simulate.simulate import Throughput, amount_of, model_flops

SAMPLES, WIDE, NARROW = 12, 16, 8
# Products of the first layer in forward and backward, whose input needs no gradient; all three of the second.
FLOPS = 2 * SAMPLES * NARROW * WIDE * 2 + 2 * SAMPLES * WIDE * NARROW * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


@pytest.mark.parametrize(
    "strategy",
    [
        [],
        [replicate(at(), [0, 1])],
        [place(at(PP=0), [0]), place(at(PP=1), [1]), split(at(), parts=3)],
    ],
    ids=["one device", "two replicas", "a pipeline"],
)
def test_a_model_has_the_same_arithmetic_under_every_strategy(strategy: list[Directive]) -> None:
    assert flops(strategy) == FLOPS


def test_a_backward_counts_twice_its_forward_at_most() -> None:
    """It recomputes the forward of the first layer, whose input needs no gradient, and that of the second."""
    assert flops([remat(at(), budget=0)]) == 3 * 2 * SAMPLES * NARROW * WIDE * 2


def flops(strategy: list[Directive]) -> float:
    batch = {"x": torch.ones(SAMPLES, NARROW)}
    program = piper.compile(piper.Job(model=Net, loss=loss, data=lambda: [batch], strategy=strategy))
    return model_flops(program.plans, program.outline)


def test_rates_and_their_text() -> None:
    throughput = Throughput(amount=8192, unit="tokens", flops=3e12, peak=1e13)
    assert throughput.mfu(2.0) == pytest.approx(0.15)
    assert throughput.text(2.0) == "4,096 tokens/s, MFU 15.0 %"
    assert Throughput(amount=3, unit="samples", flops=1.0).text(0.5) == "6 samples/s"


def test_tokens_are_counted_where_a_batch_has_them() -> None:
    assert amount_of({"mask": (4, 6), "input_ids": (4, 5)}) == (20, "tokens")
    assert amount_of({"x": (4, 5)}) == (4, "samples")
