"""Filters: how they read, and what they refuse."""

from inspect import cleandoc

import pytest

from piper.errors import ScheduleError
from piper.ir.select import Index, at


def test_a_filter_reads_as_it_was_written() -> None:
    assert str(at(PP=0, EP="*", MB=None, PASS="BI")) == "at(EP=*, MB=-, PP=0, PASS=BI)"
    assert str(at()) == "at()"


def test_the_order_of_tags_does_not_matter() -> None:
    assert at(PP=0, MB=1) == at(MB=1, PP=0)


def test_any_pass_is_no_pass() -> None:
    assert at(PASS="*") == at()


@pytest.mark.parametrize("index", [-1, 1.0, "0", True])
def test_an_index_that_selects_nothing(index: Index) -> None:
    with pytest.raises(ScheduleError) as caught:
        at(PP=index)
    assert str(caught.value) == cleandoc(f"""
        at: PP={index!r} selects nothing
          hint: an index is a whole number from 0, "*" for any, or None for nodes without the tag
    """)


@pytest.mark.parametrize("phase", ["f", "W", "FB", 3, ["F"]])
def test_a_pass_that_does_not_exist(phase: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        at(PASS=phase)
    assert str(caught.value) == cleandoc(f"""
        at: there is no pass {phase!r}
          hint: PASS is F, B, BI (input gradients), BW (weight gradients) or *
    """)
