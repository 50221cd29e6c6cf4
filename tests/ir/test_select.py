"""Filters: how they read, and what they refuse."""

from inspect import cleandoc

import pytest

from piper.errors import ScheduleError
from piper.ir.select import Asked, at


def test_a_filter_reads_as_it_was_written() -> None:
    assert str(at(PP=0, EP="*", MB=None, PASS="BI")) == 'at(EP="*", MB=None, PP=0, PASS="BI")'
    assert str(at()) == "at()"


def test_the_order_of_tags_does_not_matter() -> None:
    assert at(PP=0, MB=1) == at(MB=1, PP=0)


def test_any_pass_is_no_pass() -> None:
    assert at(PASS="*") == at()


@pytest.mark.parametrize(
    "index", [-1, 1.0, "0", True, [], range(2, 2), range(-1, 2), [0, True], [0, "*"], {0, 1}, b"\x01"]
)
def test_an_index_that_selects_nothing(index: Asked) -> None:
    with pytest.raises(ScheduleError) as caught:
        at(PP=index)
    assert str(caught.value) == cleandoc(f"""
        at: PP={index!r} selects nothing
          hint: an index is a whole number from 0, several as a range or a list, "*" for any, or None for nodes without the tag
    """)


@pytest.mark.parametrize("phase", ["f", "W", "FB", 3, ["F"]])
def test_a_pass_that_does_not_exist(phase: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        at(PASS=phase)
    assert str(caught.value) == cleandoc(f"""
        at: there is no pass {phase!r}
          hint: PASS is F, B, BI (input gradients), BW (weight gradients) or *
    """)


def test_a_filter_by_several_indices_reads_as_it_was_written() -> None:
    assert str(at(LAYER=range(0, 5), MB=[3, 0, 3])) == "at(LAYER=range(0, 5), MB=[0, 3])"
    assert str(at(LAYER=range(0, 6, 2))) == "at(LAYER=[0, 2, 4])"


def test_several_indices_are_the_same_filter_however_they_are_written() -> None:
    assert at(PP=range(1, 4)) == at(PP=[3, 2, 1]) == at(PP=(1, 2, 3))
    assert at(PP=[2]) == at(PP=2)


def test_a_filter_is_shown_as_the_call_that_makes_it() -> None:
    made = at(LAYER=range(0, 5), EP="*", TP=None, MB=[0, 1], PASS="F")
    assert repr(made) == 'at(EP="*", LAYER=range(0, 5), MB=[0, 1], TP=None, PASS="F")'
    assert eval(repr(made)) == made
