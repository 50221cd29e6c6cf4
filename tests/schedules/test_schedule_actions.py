"""Actions and groups: their text form, and what is refused when reading it."""

import pytest

from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.schedules.grid import Action, group_text, parse_group

WRITE = (
    "write stage, letter, microbatch: 2F0 (forward), 2B0 (backward), 2I0 and 2W0 (its input and"
    " weight halves), or two of them as (0F3;7B1)OVERLAP_F_B"
)


@pytest.mark.parametrize(
    ("phase", "text"), [("F", "12F305"), ("B", "12B305"), ("BI", "12I305"), ("BW", "12W305")]
)
def test_an_action_is_stage_letter_microbatch(phase: Phase, text: str) -> None:
    assert group_text((Action(stage=12, phase=phase, microbatch=305),)) == text
    assert parse_group(text, by="here") == (Action(stage=12, phase=phase, microbatch=305),)


@pytest.mark.parametrize("text", ["(0F3;7B1)OVERLAP_F_B", "(0F3;7I1)OVERLAP_F_B", "(7B1;0F3)OVERLAP_F_B"])
def test_a_pair_reads_back_as_it_was_written(text: str) -> None:
    assert group_text(parse_group(text, by="here")) == text


def test_spaces_inside_a_pair_do_not_matter() -> None:
    assert group_text(parse_group("( 0F3 ; 7B1 )OVERLAP_F_B", by="here")) == "(0F3;7B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    [
        *[
            "2F0xyz",
            "x2F0",
            "2F",
            "F0",
            "2f0",
            "2BI0",
            "-1F0",
            "2F-1",
            "2.0F1",
            "٣F0",
            "2F0 2F1",
            "1SEND_F0x",
        ],
        *["(0F3;7B1)", "(0F3)OVERLAP_F_B", "(0F3;7B1;2F0)OVERLAP_F_B", "()OVERLAP_F_B", "9" * 10 + "F0"],
    ],
)
def test_anything_else_is_not_an_action(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_group(text, by="s.csv, row 1, column 2")
    assert str(caught.value) == f"s.csv, row 1, column 2: {text!r} is not an action\n  hint: {WRITE}"


def test_a_bad_member_of_a_pair_is_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_group("(0F3;7Q1)OVERLAP_F_B", by="here")
    assert str(caught.value) == f"here: '7Q1' is not an action\n  hint: {WRITE}"


@pytest.mark.parametrize(("first", "second"), [("0F3", "1F2"), ("0B3", "1B2"), ("0F3", "1W2")])
def test_only_a_forward_and_a_backward_overlap(first: str, second: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_group(f"({first};{second})OVERLAP_F_B", by="here")
    assert str(caught.value) == (
        f"here: ({first};{second})OVERLAP_F_B overlaps {first} and {second}\n"
        "  hint: an overlapped cell holds one forward and one backward (B or I): (0F3;7B1)OVERLAP_F_B"
    )


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_group("x" * 1000, by="here")
    assert str(caught.value) == f"here: '{'x' * 37}...' is not an action\n  hint: {WRITE}"
