"""Where a long chunk is cut into segments, each distinct one of which is traced once."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.capture.trace.annotate import annotate_modules
from piper.capture.trace.trace import trace
from tests import plain, zoo


class Block(nn.Module):
    """28 operations, between which nothing can be cut: the input lives until the last one."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), act

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(13):
            y = self.act(y) * 2
        result: Tensor = x + y
        return result


class Stacks(nn.Module):
    """Two stacks of equal blocks, with a layer before them and one behind."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.Sequential(
            *(Block(torch.tanh) for _ in range(first)), *(Block(torch.sin) for _ in range(second))
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.end(self.blocks(self.begin(x)))
        return result


def lengths(first: int, second: int, *regions: Sequence[str]) -> list[list[int]]:
    """Return how many operations each segment of the model has, by chunk."""

    def model() -> nn.Module:
        return annotate_modules(Stacks(first, second), {"PP": regions})

    return [
        [sum(node.op.startswith("call") for node in body.graph.nodes) for body in bodies]
        for piece in trace(model, zoo.regression, zoo.vectors(4, 0), 4).pieces
        if piece.body is not None
        for bodies in [[part.body for part in piece.segments] or [piece.body]]
    ]


def test_layers_that_repeat_are_cut_out_by_themselves() -> None:
    assert lengths(4, 0) == [[2, 28, 28, 28, 28, 3]]  # a cast and a layer; a layer, a cast and the loss


def test_so_are_the_layers_of_another_stack() -> None:
    assert lengths(3, 2) == [[2, 28, 28, 28, 28, 28, 3]]


def test_so_is_a_layer_that_is_a_whole_region_elsewhere() -> None:
    regions = ["begin", "blocks.0"], ["blocks.1"], ["blocks.2", "end"]
    assert lengths(3, 0, *regions) == [[2, 28], [28], [28, 3]]


def test_what_does_not_repeat_is_cut_where_it_is_long_enough() -> None:
    assert lengths(1, 1) == [[30, 31]]


class Picking(Stacks):
    """Picks a column of a value whose last size is data: of known size itself, but not of known strides."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        copies = (x > x - 1).sum().item()
        column = x[..., None].expand(-1, -1, copies).contiguous()[..., 0]  # type: ignore[arg-type]
        result: Tensor = self.end(self.blocks(column))
        return result


def test_a_value_of_known_size_may_have_strides_that_are_data() -> None:
    batch = zoo.vectors(4, 0)
    job = piper.Job(
        model=lambda: Picking(1, 0),
        loss=zoo.regression,
        data=lambda: [batch],
        optimizer=plain.sgd,
        precision="fp64",
    )
    wanted = plain.train(job.model, zoo.regression, [batch] * 2)
    with piper.launch(piper.compile(job, device="cpu"), on="inline") as run:
        losses = [run.step(batch).loss for _ in range(2)]
        state = run.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=1e-12)
    assert plain.largest_difference(wanted.state, state) < 1e-12
