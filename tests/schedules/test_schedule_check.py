"""`validate`: one test per way in which a grid is no schedule, with the whole message."""

import pytest

from piper.errors import ScheduleError
from piper.schedules.grid import Grid, parse_group
from piper.schedules.torch_csv import validate

MISSING_HINT = "hint:  a stage runs F and B, or F, I and W, for each microbatch"
DEADLOCK_HINT = "each rank runs its row in order: move what is waited for before what waits"


def grid(*rows: str) -> Grid:
    return Grid(rows=tuple(tuple(parse_group(cell, by="test") for cell in row.split()) for row in rows))


def refusal(bad: Grid) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        validate(bad)
    return [line.strip() for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    "good",
    [
        grid("0F0 0B0"),
        grid("0F0 0F1 0B0 0I1 0W1"),
        grid("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"),
        grid("0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 0B0 1B1 0B1"),
        grid("0F0 0B0", "1F0 1B0"),
        grid("0F0 0B0", "1F0 2F0 2B0 1B0"),
        grid("(0F0;0B0)OVERLAP_F_B"),
        grid("0F0 1F1 1B1 0B0", "1F0 0F1 1B0 0B1"),
    ],
)
def test_schedules_pass(good: Grid) -> None:
    validate(good)


def test_an_action_twice() -> None:
    assert refusal(grid("0F0 0B0 0F0")) == [
        "schedule: 0F0 runs twice",
        "first: rank 0, position 0",
        "again: rank 0, position 2",
        "hint:  keep one of the two",
    ]


def test_a_microbatch_on_two_ranks() -> None:
    assert refusal(grid("0F0 0B0 0F1", "0B1")) == [
        "schedule: stage 0 runs microbatch 1 on two ranks",
        "first: 0F1 at rank 0, position 2",
        "again: 0B1 at rank 1, position 0",
        "hint:  keep the forward and the backward of a microbatch on one rank",
    ]


@pytest.mark.parametrize(
    ("row", "microbatch", "there", "last"),
    [
        ("0F0 0B0 0F2 0B2", 1, "nothing", 2),
        ("0F0", 0, "0F0", 0),
        ("0B0", 0, "0B0", 0),
        ("0F0 0I0", 0, "0F0 0I0", 0),
        ("0F0 0W0", 0, "0F0 0W0", 0),
        ("0F0 0B0 0I0 0W0", 0, "0F0 0B0 0I0 0W0", 0),
        ("0F0 0B0 0W0", 0, "0F0 0B0 0W0", 0),
    ],
)
def test_work_left_out_or_too_much(row: str, microbatch: int, there: str, last: int) -> None:
    assert refusal(grid(row)) == [
        f"schedule: stage 0 does not run microbatch {microbatch} forward and backward, once each",
        f"there: {there}",
        f"sizes: stages 0..0, microbatches 0..{last}, by the largest of each",
        MISSING_HINT,
    ]


def test_a_stray_huge_index_is_found_at_once() -> None:
    assert refusal(grid("0F0 0B0 999999999F999999999 999999999B999999999"))[:2] == [
        "schedule: stage 1 does not run microbatch 0 forward and backward, once each",
        "there: nothing",
    ]


@pytest.mark.parametrize(
    ("row", "waits"),
    [
        ("0B0 0F0", "0B0 waits for 0F0"),
        ("0F0 0W0 0I0", "0W0 waits for 0I0"),
        ("1F0 0F0 1B0 0B0", "1F0 waits for 0F0"),
        ("(0B0;0F0)OVERLAP_F_B", "(0B0;0F0)OVERLAP_F_B waits for 0F0"),
    ],
)
def test_a_rank_that_waits_for_itself(row: str, waits: str) -> None:
    assert refusal(grid(row)) == [
        "schedule: this order can never run",
        f"rank 0: {waits} on rank 0",
        f"hint:   {DEADLOCK_HINT}",
    ]


def test_ranks_that_wait_in_a_circle() -> None:
    stuck = grid("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    assert refusal(stuck) == [
        "schedule: this order can never run",
        "rank 0: 0B0 waits for 1B0 on rank 1",
        "rank 1: 1F1 waits for 0F1 on rank 0",
        f"hint:   {DEADLOCK_HINT}",
    ]


def test_pairs_that_wait_for_each_other() -> None:
    stuck = grid("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert refusal(stuck) == [
        "schedule: this order can never run",
        "rank 0: (0F1;0B0)OVERLAP_F_B waits for 1B0 on rank 1",
        "rank 1: (1F1;1B0)OVERLAP_F_B waits for 0F1 on rank 0",
        f"hint:   {DEADLOCK_HINT}",
    ]
