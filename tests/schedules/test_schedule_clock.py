"""The clock: when groups run, how a grid is drawn, and what is alive meanwhile."""

from inspect import cleandoc
from typing import Literal

import pytest

from piper.schedules.grid import Grid, parse_group
from piper.schedules.timing import makespan, timeline
from piper.view.cells import picture
from tests.schedules.activations import peak_activations


def grid(*rows: str) -> Grid:
    return Grid(rows=tuple(tuple(parse_group(cell, by="test") for cell in row.split()) for row in rows))


PAIRED = grid("0F0 0F1 0B0 0B1", "1F0 1B0 (1F1;1B1)OVERLAP_F_B")


def test_the_picture_in_the_docstring_is_real() -> None:
    assert picture(PAIRED) in cleandoc(picture.__doc__ or "")


def test_a_row_waits_for_values_of_other_ranks() -> None:
    assert timeline(PAIRED).starts == ((0, 1, 4, 7), (1, 2, 4))
    assert timeline(PAIRED).end == makespan(PAIRED) == 9


def test_a_pair_starts_when_both_members_can() -> None:
    first, last = "0F0 0F1 0B0 0B1", "2F0 2B0 2F1 2B1"
    apart = grid(first, "1F0 1F1 1B0 1B1", last)
    paired = grid(first, "1F0 (1F1;1B0)OVERLAP_F_B 1B1", last)
    assert picture(apart) == cleandoc("""
        rank 0  0F0 0F1 .   .   .   .   .   0B0 --  .   0B1 --
        rank 1  .   1F0 1F1 .   .   1B0 --  .   1B1 --  .   .
        rank 2  .   .   2F0 2B0 --  2F1 2B1 --  .   .   .   .
    """)
    assert picture(paired) == cleandoc("""
        rank 0  0F0 0F1 .   .   .   .   .   .   0B0 --  .   0B1 --
        rank 1  .   1F0 .   .   .   1F1+1B0 --  .   1B1 --  .   .
        rank 2  .   .   2F0 2B0 --  .   2F1 2B1 --  .   .   .   .
    """)


def test_costs_can_be_any_numbers() -> None:
    assert makespan(grid("0F0 0I0 0W0"), {"F": 1.5, "BI": 2, "BW": 0.25, "B": 9}) == 3.75


def test_names_of_many_ranks_line_up() -> None:
    rows = [f"{stage}F0 {stage}B0" for stage in range(11)]
    lines = picture(grid(*rows)).splitlines()
    assert lines[0].startswith("rank 0   0F0  .") and lines[10].startswith("rank 10  .")


@pytest.mark.parametrize(("freed_by", "peak"), [("BI", 2), ("BW", 3)])
def test_activations_live_until_the_half_that_frees_them(freed_by: Literal["BI", "BW"], peak: int) -> None:
    assert peak_activations(grid("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"), freed_by=freed_by) == (peak,)


def test_a_whole_backward_frees_activations() -> None:
    assert peak_activations(grid("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) == (2, 1)
