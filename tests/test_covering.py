"""The cells of the matrix: every two choices that the product brings together meet in it."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests import zoo
from tests.covering import Choices, covering, covering_each, selected
from tests.lower import compositions
from tests.run import test_recovery_matrix as recoveries
from tests.runtime import divided as strategies
from tests.runtime import test_divided as divided
from tests.runtime import test_matrix as matrix
from tests.runtime import test_ring as ring

PLAIN = [(x, y, z) for x in "ab" for y in "cd" for z in "ef"]


def axes(cell: tuple[str, str, str]) -> Choices:
    return dict(zip("xyz", cell, strict=True))


def test_every_two_values_meet() -> None:
    assert covering(PLAIN, axes) == [("a", "c", "e"), ("a", "d", "f"), ("b", "c", "f"), ("b", "d", "e")]
    assert covering(PLAIN, axes, 3) == PLAIN
    assert covering(PLAIN, axes, 1) == [("a", "c", "e"), ("b", "d", "f")]


def test_values_that_meet_elsewhere_are_left_out() -> None:
    first = [("a", "c", "e"), ("a", "d", "f"), ("b", "c", "f")]
    assert covering(PLAIN, axes, given=first) == [("b", "d", "e")]
    assert covering(PLAIN, axes, given=PLAIN) == []


def test_a_cell_counts_for_each_description() -> None:
    def ends(cell: tuple[str, str, str]) -> Choices:
        return {"x": cell[0], "z": cell[2]}

    def begin(cell: tuple[str, str, str]) -> Choices:
        return {"x": cell[0], "y": cell[1]}

    assert covering(PLAIN, ends) == [("a", "c", "e"), ("a", "c", "f"), ("b", "c", "e"), ("b", "c", "f")]
    both = covering_each(PLAIN, ends, begin)
    assert len(both) == 4
    for choices in (ends, begin):
        assert meet(both, choices, 2) == meet(PLAIN, choices, 2)
    assert covering_each(PLAIN, ends, begin, given=PLAIN) == []


def test_a_cell_that_later_ones_make_needless_is_left_out() -> None:
    """The first of these adds most, and the others, each for a pair of its own, have all that it has."""
    rows = {"first": "abcd", "second": "abe", "third": "cdf"}

    def pairs(cell: str) -> Choices:
        return dict.fromkeys(rows[cell])

    assert covering(rows, pairs, 1) == ["second", "third"]


def test_values_that_never_meet_are_not_asked_for() -> None:
    assert covering([("a", "c", "e"), ("b", "d", "e")], axes) == [("a", "c", "e"), ("b", "d", "e")]


def test_the_other_cells_are_exhaustive() -> None:
    found = selected([("a", 1), ("b", 2)], [("b", 2)])
    assert [marked(param) for param in found] == [
        ("a-1", ("a", 1), ["exhaustive"]),
        ("b-2", ("b", 2), ["matrix"]),
    ]
    assert [marked(param) for param in selected(["a"], [])] == [("a", ("a",), ["exhaustive"])]


def marked(param: object) -> tuple[object, tuple[object, ...], list[str]]:
    assert isinstance(param, ParameterSet)
    return param.id, tuple(param.values), [mark.name for mark in param.marks]


def meet(cells: Sequence[Any], choices: Callable[[Any], Choices], together: int) -> list[set[object]]:
    """Return the values that meet, of every few axes."""
    rows = [choices(cell) for cell in cells]
    return [{tuple(row[axis] for axis in some) for row in rows} for some in combinations(rows[0], together)]


@pytest.mark.parametrize(
    ("cells", "chosen", "choices", "together"),
    [
        (compositions.every(), compositions.pairwise(), compositions.choices, 2),
        (
            compositions.every(),
            [*compositions.pairwise(), *compositions.by_threes()],
            compositions.choices,
            3,
        ),
        ([*matrix.cells(), *matrix.both_ways()], matrix.chosen(), matrix.choices, 2),
        ([*divided.FEW, *divided.UNLIKE], [*divided.FEW, *divided.CHOSEN], divided.division, 2),
        ([*divided.FEW, *divided.ALL], [*divided.FEW, *divided.CHOSEN], divided.composition, 2),
        ([*ring.FEW, *ring.UNLIKE], [*ring.FEW, *ring.CHOSEN], ring.division, 2),
        ([*ring.FEW, *ring.ALL], [*ring.FEW, *ring.CHOSEN], ring.composition, 2),
        (recoveries.CHEAP, [*recoveries.DEFAULT, *recoveries.chosen()], recoveries.choices, 2),
        (recoveries.DIVIDED_WAYS, recoveries.chosen_divided(), recoveries.choices_of_divided, 2),
    ],
    ids=[
        "compositions by pairs",
        "compositions by threes",
        "models",
        "divisions of models",
        "divided compositions",
        "rings of models",
        "ring compositions",
        "recoveries",
        "recoveries of divided chunks",
    ],
)
def test_every_two_choices_meet_in_the_matrix(
    cells: Sequence[Any], chosen: Sequence[Any], choices: Callable[[Any], Choices], together: int
) -> None:
    assert set(chosen) <= set(cells)
    assert meet(chosen, choices, together) == meet(cells, choices, together)


def test_every_model_meets_every_schedule_and_every_kind_of_zero() -> None:
    schedules = [
        "none",
        "gpipe",
        "1f1b",
        "zero-bubble",
        "interleaved-1f1b",
        "interleaved-zero-bubble",
        "zbv",
        "dualpipe-v",
        "dualpipe",
    ]
    chosen = matrix.chosen()
    assert {(cell.case, cell.schedule) for cell in chosen} == {*product(zoo.NAMES, schedules)}
    assert {(cell.case, cell.zero) for cell in chosen} == {*product(zoo.NAMES, range(4))}
    assert {(cell.schedule, cell.zero) for cell in chosen} == {*product(schedules, range(4))}
    mixtures = {cell.case for cell in chosen if cell.ways > 1}
    assert mixtures == {"moe", "deepseek", "qwen3_moe_hf"}


def test_divided_models_name_the_axes_of_every_strategy() -> None:
    assert strategies.AXES.keys() == strategies.STRATEGIES.keys()
    assert ring.AXES.keys() == ring.STRATEGIES.keys()
