"""Every schedule with every kind of parallelism: proven, and the same mathematics as one device."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.covering import selected
from tests.lower.compositions import Composition, by_threes, every, pairwise
from tests.lower.machine import examine


def check(cell: Composition) -> None:
    plans, graph = cell.plans()  # proven: `test_every_composition_is_proven`
    examine(plans, graph, 0, 1)


def test_every_composition_is_proven() -> None:
    """Lowering ends with the proof, so that no test of compositions proves its plans again."""
    with patch("piper.lower.emit.prove") as order, patch("piper.lower.emit.prove_values") as values:
        plans, graph = pairwise()[0].plans()
    order.assert_called_once_with(plans)
    values.assert_called_once_with(plans, graph, clip=False, whole=False)


@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_a_composition_is_right(cell: Composition) -> None:
    check(cell)


@pytest.mark.parametrize("cell", pairwise()[::2], ids=str)
def test_a_composition_is_right_where_stages_run_again(cell: Composition) -> None:
    check(replace(cell, again=True))


@pytest.mark.parametrize("cell", selected(every(), by_threes()))
def test_every_composition_is_right(cell: Composition) -> None:
    check(cell)
