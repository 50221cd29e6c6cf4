"""Which chunk is named when a step has numbers that are none: the one that made the first."""

import pytest
import torch
from torch import Tensor

from piper.ir.ids import read_pass
from piper.runtime.recorders import OutputKey, first_bad, kind_of
from tests.chain import chain
from tests.slots import AXES, slot

NAN, INF, GOOD = (torch.tensor([1.0, number]) for number in (float("nan"), float("inf"), 2.0))
OUTLINE = chain(3)
Trail = dict[OutputKey, Tensor]


def mark(run: str, result: str) -> OutputKey:
    return read_pass(run, AXES), slot(result)


def test_a_nan_that_a_forward_made_is_blamed_on_the_earliest_stage() -> None:
    first: Trail = {mark("F[PP=0]", "PP=0.out0"): GOOD, mark("B[PP=0]", "PP=0.din0"): NAN}
    later: Trail = {
        mark("F[PP=2]", "PP=2.out0"): NAN,
        mark("F[PP=1]", "PP=1.out0"): INF,
        mark("B[PP=2]", "PP=2.din0"): NAN,
    }
    assert first_bad(OUTLINE, {0: first, 1: later}, {}) == "F[PP=1]: PP=1.out0 holds an infinity on device 1"


def test_a_nan_that_a_backward_made_is_blamed_on_the_latest_stage() -> None:
    """Gradients go from the last stage to the first: those before only hand it on."""
    trails: dict[int, Trail] = {
        0: {mark("F[PP=0]", "PP=0.out0"): GOOD, mark("B[PP=0]", "PP=0.din0"): NAN},
        1: {mark("F[PP=1]", "PP=1.out0"): GOOD, mark("B[PP=1]", "PP=1.din0"): NAN},
        2: {mark("F[PP=2]", "PP=2.out0"): GOOD, mark("B[PP=2]", "PP=2.din0"): GOOD},
    }
    assert first_bad(OUTLINE, trails, {"w": NAN}) == "B[PP=1]: PP=1.din0 holds a NaN on device 1"
    trails[2][mark("BI[PP=2]", "PP=2.din0")] = INF
    assert first_bad(OUTLINE, trails, {}) == "BI[PP=2]: PP=2.din0 holds an infinity on device 2"


def test_parts_are_looked_at_in_their_order() -> None:
    trail: Trail = {mark("F[PP=1 MB=0]", "PP=1.out0"): NAN, mark("F[PP=1 MB=1]", "PP=1.out0"): INF}
    assert first_bad(OUTLINE, {1: trail}, {}) == "F[PP=1 MB=0]: PP=1.out0 holds a NaN on device 1"


def test_without_a_bad_result_it_was_the_update() -> None:
    trails: dict[int, Trail] = {0: {mark("F[PP=0]", "PP=0.out0"): GOOD}}
    assert first_bad(OUTLINE, trails, {"a": GOOD, "b": INF}) == "the update: b holds an infinity"
    assert first_bad(OUTLINE, trails, {"a": GOOD}) is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor([1, 2]), None),
        (torch.tensor([1.0, 2.0]), None),
        (torch.tensor([1.0, float("-inf")]), "an infinity"),
        (torch.tensor([float("inf"), float("nan")]), "a NaN"),
    ],
)
def test_what_is_wrong_with_a_tensor(value: Tensor, wanted: str | None) -> None:
    assert kind_of(value) == wanted
