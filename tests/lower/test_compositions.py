"""Every schedule with every kind of parallelism: proven, and the same mathematics as one device."""

from dataclasses import replace

import pytest

from piper.plan.check import prove
from piper.proof.values import prove_values
from tests.lower.compositions import Composition, every, pairwise
from tests.lower.oracle import examine


def check(cell: Composition) -> None:
    plans, graph = cell.plans()
    prove(plans)
    prove_values(plans, graph)
    examine(plans, graph, 0, 1)


@pytest.mark.parametrize("cell", pairwise(), ids=str)
def test_a_composition_is_right(cell: Composition) -> None:
    check(cell)


@pytest.mark.parametrize("cell", pairwise()[::2], ids=str)
def test_a_composition_is_right_where_stages_run_again(cell: Composition) -> None:
    check(replace(cell, again=True))


@pytest.mark.matrix
@pytest.mark.parametrize("cell", every(), ids=str)
def test_every_composition_is_right(cell: Composition) -> None:
    check(cell)
