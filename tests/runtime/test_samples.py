"""Which samples each device and part gets, as numbers: nothing here is computed by the code that slices."""

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.compiler import compile
from piper.ir.chunk import Tags
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.runtime.compute import slices

Spans = list[tuple[int, int]]


def plans(cells: int, **axes: int) -> Plans:
    return Plans(plans=(), comms={}, buckets={}, seed=1.0, weighted=False, cells=cells, axes=axes)


@pytest.mark.parametrize(
    ("device", "part", "wanted"),
    [
        (0, 0, [(0, 2)]),
        (0, 1, [(2, 4)]),
        (0, 3, [(6, 8)]),
        (1, 0, [(8, 10)]),
        (1, 3, [(14, 16)]),
    ],
)
def test_one_axis_cuts_inside_a_device_s_slice(device: int, part: int, wanted: Spans) -> None:
    assert slices(plans(2, MB=4), 16, device, 2, (("MB", part),)) == wanted


@pytest.mark.parametrize(
    ("part", "first", "second"),
    [
        ((("A", 0), ("B", 0)), [(0, 2)], [(12, 14)]),
        ((("A", 0), ("B", 1)), [(2, 4)], [(14, 16)]),
        ((("A", 0), ("B", 2)), [(4, 6)], [(16, 18)]),
        ((("A", 1), ("B", 0)), [(6, 8)], [(18, 20)]),
        ((("A", 1), ("B", 1)), [(8, 10)], [(20, 22)]),
        ((("A", 1), ("B", 2)), [(10, 12)], [(22, 24)]),
    ],
)
def test_a_second_axis_cuts_inside_the_first(part: Tags, first: Spans, second: Spans) -> None:
    found = plans(2, A=2, B=3)
    assert slices(found, 24, 0, 2, part) == first
    assert slices(found, 24, 1, 2, part) == second


@pytest.mark.parametrize(
    ("position", "count", "part", "wanted"),
    [
        (0, 2, 0, [(0, 1), (2, 3), (4, 5)]),
        (0, 2, 1, [(1, 2), (3, 4), (5, 6)]),
        (1, 2, 0, [(6, 7), (8, 9), (10, 11)]),
        (0, 3, 0, [(0, 1), (2, 3)]),
        (1, 3, 0, [(4, 5), (6, 7)]),
        (1, 3, 1, [(5, 6), (7, 8)]),
        (2, 3, 1, [(9, 10), (11, 12)]),
    ],
)
def test_a_part_is_a_piece_of_each_cell_where_sets_differ_in_size(
    position: int, count: int, part: int, wanted: Spans
) -> None:
    """Two and three devices share six cells: part 0 is the same samples on both."""
    assert slices(plans(6, MB=2), 12, position, count, (("MB", part),)) == wanted


@pytest.mark.parametrize(
    ("samples", "position", "count", "wanted"),
    [(12, 0, 2, [(0, 6)]), (12, 1, 3, [(4, 8)]), (6, 2, 3, [(4, 6)]), (6, 0, 1, [(0, 6)])],
)
def test_without_parts_neighbouring_cells_are_one_range(
    samples: int, position: int, count: int, wanted: Spans
) -> None:
    assert slices(plans(6), samples, position, count, ()) == wanted


class Ramp(nn.Module):
    """Weighs each sample by its place in the slice that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            weighed = self.scale * x * torch.arange(x.shape[0], dtype=x.dtype)
            return weighed.mean() * x.shape[0]  # a plain sum is refused by compile


def test_the_samples_of_a_run_on_two_axes() -> None:
    """Eight samples on two devices, each cut in two and in two again: pieces of one sample, all at place 0.

    With one axis only, each piece has two samples and the second counts: 1 + 3 + 5 + 7, over four pieces.
    """
    batch = {"x": torch.arange(8.0)}

    def loss_with(*splits: piper.Directive) -> float:
        job = Job(
            model=Ramp,
            loss=lambda model, given: model(given["x"]),
            data=lambda: [batch],
            strategy=[piper.replicate(piper.at(), [0, 1]), *splits],
            optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        )
        with launch_inline(compile(job)) as run:
            return run.step(batch).loss

    first, second = piper.split(piper.at(), "A", 2), piper.split(piper.at(), "B", 2)
    assert loss_with(first, second) == 0.0
    assert loss_with(first) == (1 + 3 + 5 + 7) / 4
    assert loss_with() == (1 + 2 * 2 + 3 * 3 + 5 + 2 * 6 + 3 * 7) / 2
