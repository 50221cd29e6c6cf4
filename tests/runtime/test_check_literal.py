"""How far numbers are apart, and what `check` calls the same: in numbers, with NaN and names that are missing."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from piper import Job, at, replicate
from piper.callbacks import StepNumbers
from piper.check.check import check
from piper.check.distance import differences, distance, relative
from piper.check.localise import Checked
from piper.compiler import Program, compile
from piper.run.launch import launch_inline
from piper.runtime.recorders import OutputKey
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, compiled

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "wanted", "apart"),
    [(3.0, 2.0, 0.5), (-1.0, 1.0, 2.0), (2.0, 2.0, 0.0), (0.0, 0.0, 0.0), (INF, 1.0, INF)],
)
def test_two_numbers_are_apart_in_units_of_the_second(got: float, wanted: float, apart: float) -> None:
    assert relative(got, wanted) == apart


@pytest.mark.parametrize(("got", "wanted"), [(NAN, 1.0), (1.0, NAN), (NAN, NAN)])
def test_a_nan_is_never_the_same(got: float, wanted: float) -> None:
    assert not relative(got, wanted) <= 1e9
    assert not distance(torch.tensor([1.0, got]), torch.tensor([1.0, wanted])) <= 1e9


@pytest.mark.parametrize(
    ("got", "wanted", "floor", "apart"),
    [
        ([1.0, 5.0], [1.0, 4.0], 0.0, 0.25),
        ([1.0, 4.0], [1.0, 4.0], 0.0, 0.0),
        ([0.25, 0.0], [0.0, 0.0], 2.0, 0.125),  # a gradient that should be nothing, beside others of size 2
        ([1.0], [1.0, 1.0], 0.0, INF),
    ],
)
def test_two_tensors_are_apart_in_units_of_the_largest_element(
    got: list[float], wanted: list[float], floor: float, apart: float
) -> None:
    assert distance(torch.tensor(got), torch.tensor(wanted), floor) == apart


def test_a_name_that_only_one_side_has_is_as_far_apart_as_can_be() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    apart = differences({"a": two, "extra": one}, {"a": one, "missing": one})
    found = {name: diff for name, diff, *_ in apart}
    assert found == {"a": 1.0, "missing": INF, "extra": INF}
    assert not [*differences({}, {})]


def test_a_gradient_far_below_the_others_is_compared_with_those() -> None:
    """A difference of 1e-9 is 1e-5 of a ten-thousandth of the largest gradient, and much more of its own size."""
    wanted = {"large": torch.tensor([1.0]), "quiet": torch.tensor([1e-12])}
    got = {"large": torch.tensor([1.0]), "quiet": torch.tensor([1e-9])}
    apart = {name: diff for name, diff, *_ in differences(got, wanted)}
    assert apart["quiet"] == pytest.approx(1e-5, rel=1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A run whose numbers are wrong in one way."""

    run: Checked
    scale: float = 1.0  # of the gradients
    without: str = ""  # a gradient that is left out

    def step(self, batch: Mapping[str, Tensor]) -> StepNumbers:
        return self.run.step(batch)

    def gradients(self) -> dict[str, Tensor]:
        found = self.run.gradients()
        return {name: value * self.scale for name, value in found.items() if name != self.without}

    def state_dict(self) -> dict[str, Tensor]:
        return self.run.state_dict()

    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        return self.run.trails()


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(Cell(case="mlp", schedule="none", dp=2))


@pytest.mark.parametrize(
    ("scale", "without", "ok"),
    [
        (1.0, "", True),
        (1 + 1e-6, "", False),
        (1.01, "", False),
        (NAN, "", False),
        (1.0, "layers.0.bias", False),
    ],
)
def test_check_says_no_to_a_small_difference_a_nan_and_a_missing_name(
    program: Program, scale: float, without: str, ok: bool
) -> None:
    @contextmanager
    def launch(given: ProgramLike, options: Options) -> Iterator[Wrong]:
        with launch_inline(given, options) as run:
            yield Wrong(run=run, scale=scale, without=without)

    report = check(program, launch, batches(Cell(case="mlp", schedule="none", dp=2), 1))
    assert report.ok is ok
    assert ok or not report.max_grad_diff <= 9e-7 or math.isnan(scale)
    assert (report.first_bad is None) is ok


class Copies(nn.Module):
    """Writes a product into memory of its own: `copy_` in place, which a trace holds as an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.empty_like(x)
        place.copy_(self.linear(x))
        return place * x


def test_check_names_a_difference_of_a_model_that_copies_in_place() -> None:
    """The chunks run under autograd to find it."""
    made = compile(
        Job(
            model=Copies,
            loss=lambda model, batch: model(batch["x"]).square().mean(),
            data=lambda: [{"x": torch.arange(16.0).view(4, 4)}],
            strategy=[replicate(at(), [0, 1])],
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            precision="fp64",
        )
    )

    @contextmanager
    def launch(given: ProgramLike, options: Options) -> Iterator[Wrong]:
        with launch_inline(given, options) as run:
            yield Wrong(run=run, scale=2.0)

    report = check(made, launch, [{"x": torch.arange(16.0).view(4, 4)}])
    assert report.first_bad is not None and "linear" in report.first_bad
