"""Which operations write in place: those that do, and those that only have such a name."""

import operator
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from piper.errors import CaptureError
from tests.capture.capturing import check

BATCH = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}


class Masked(nn.Module):
    """Layers that read one of two masks: the second is made from the first, which stays as it is."""

    def __init__(self, combined: Callable[[Tensor, Tensor], Tensor], rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 4))
        self.combined, self.rows = combined, rows

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        first = h > 0
        window = h.abs() < 0.8
        second = self.combined(first, window[: self.rows])
        return (h * second).sum() + (h * h * first).sum()


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    value: Tensor = model(batch["x"])
    return value


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("combined", [operator.and_, operator.or_, operator.xor])
def test_an_operator_whose_name_ends_in_an_underscore_writes_nothing(
    combined: Callable[[Tensor, Tensor], Tensor], rows: int
) -> None:
    check(lambda: Masked(combined, rows), loss, BATCH)


@pytest.mark.parametrize("combined", [operator.iand, operator.ior, operator.ixor])
def test_an_assignment_of_the_same_name_writes(combined: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(lambda: Masked(combined, 3), loss, BATCH)


def added(total: Tensor, part: Tensor) -> Tensor:
    return total.__iadd__(part)


def filled(total: Tensor, part: Tensor) -> Tensor:
    nn.init.constant_(tensor=total, val=0.5)
    return total + part


def clipped(total: Tensor, part: Tensor) -> Tensor:
    return nn.functional.relu(input=total, inplace=True) + part


def all_added(total: Tensor, part: Tensor) -> Tensor:
    torch._foreach_add_([total], [part])
    return total


def both_out(total: Tensor, part: Tensor) -> Tensor:
    places = torch.zeros_like(total, dtype=torch.int64)
    torch.sort(part, dim=-1, out=(total, places))
    return total * places


def multiplied(total: Tensor, part: Tensor) -> Tensor:
    product = total
    product @= part.T @ part
    return product


def normed(total: Tensor, part: Tensor) -> Tensor:
    """The running mean is written, and is not what the call returns."""
    mean = total[0] * 1
    made = nn.functional.batch_norm(part, mean, torch.ones_like(mean), training=True)
    return made + mean


class Written(nn.Module):
    """Something that is written while an earlier reader and a later reader want different values."""

    def __init__(self, written: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 4))
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        total, part = x - 1, x + 0.25
        before = (total + self.weight).sum()
        made = self.written(total, part)
        return before + (made * self.weight.exp()).sum() + (total * self.weight * self.weight).sum()


@pytest.mark.parametrize("written", [added, filled, clipped, all_added, both_out, multiplied, normed])
def test_a_write_is_seen_however_it_is_spelt_and_nothing_else(
    written: Callable[[Tensor, Tensor], Tensor],
) -> None:
    check(lambda: Written(written), loss, BATCH)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.table(torch.arange(3)) * x
        return made.sum()


def test_a_table_whose_rows_the_forward_bounds_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the forward changes the parameter table.weight"):
        check(Bounded, loss, BATCH)
