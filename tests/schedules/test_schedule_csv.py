"""Torch's CSV: what is read, what is written, and each refusal with its whole message."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import ConfigError, ScheduleError
from piper.schedules import from_csv, one_f_one_b
from piper.schedules.grid import grid_for
from piper.schedules.torch_csv import parse_csv, read_csv, to_csv
from piper.view.cells import picture

WRITE = (
    "write stage, letter, microbatch: 2F0 (forward), 2B0 (backward), 2I0 and 2W0 (its input and"
    " weight halves), or two of them as (0F3;7B1)OVERLAP_F_B"
)


def refusal(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        parse_csv(text, by="s.csv")
    return str(caught.value)


def test_what_is_written() -> None:
    assert to_csv(grid_for("zero-bubble", 2, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


@pytest.mark.parametrize(
    "name",
    ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "interleaved-zero-bubble", "zbv", "dualpipe-v"],
)
def test_every_schedule_reads_back(name: str) -> None:
    grid = grid_for(name, 3, 7)
    assert parse_csv(to_csv(grid), by="s.csv") == grid


def test_idle_cells_spaces_ragged_rows_and_last_lines_order_nothing() -> None:
    plain = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    padded = "0F0, 0F1,,,0B0 ,0B1,,\r\n,1F0,1B0,1F1,1B1\r\n\r\n\r\n"
    assert parse_csv(padded, by="s.csv") == parse_csv(plain, by="s.csv")


def test_communication_that_torch_adds_is_skipped() -> None:
    with_comms = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    assert to_csv(parse_csv(with_comms, by="s.csv")) == "0F0,0B0\n1F0,1B0\n"


def test_from_csv_gives_the_builder_s_directives(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert from_csv(path, stage="STAGE") == one_f_one_b(2, 2, stage="STAGE")
    assert from_csv(str(path)) == one_f_one_b(2, 2)


def test_a_cell_that_is_no_action() -> None:
    assert (
        refusal("0F0,0B0\n1F0,,1B0z\n") == f"s.csv, row 2, column 3: '1B0z' is not an action\n  hint: {WRITE}"
    )


def test_an_action_twice() -> None:
    assert refusal("0F0,,0B0\n,1F0,1B0,1F0\n") == (
        "s.csv: 1F0 runs twice\n"
        "  first: row 2, column 2\n"
        "  again: row 2, column 4\n"
        "  hint:  keep one of the two"
    )


def test_an_action_missing() -> None:
    assert refusal("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n") == (
        "s.csv: stage 1 does not run microbatch 1 forward and backward, once each\n"
        "  there: 1F1\n"
        "  sizes: stages 0..1, microbatches 0..1, by the largest of each\n"
        "  hint:  a stage runs F and B, or F, I and W, for each microbatch"
    )


def test_a_stage_on_two_rows() -> None:
    assert refusal("0F0,0B0,0F1\n1F0,1B0,,0B1,1F1,1B1\n") == (
        "s.csv: stage 0 runs microbatch 1 on two ranks\n"
        "  first: 0F1 at row 1, column 3\n"
        "  again: 0B1 at row 2, column 4\n"
        "  hint:  keep the forward and the backward of a microbatch on one rank"
    )


def test_an_order_that_cannot_run() -> None:
    assert refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n") == (
        "s.csv: this order can never run\n"
        "  rank 0: 0B0 waits for 1B0 on rank 1\n"
        "  rank 1: 1F1 waits for 0F1 on rank 0\n"
        "  hint:   each rank runs its row in order: move what is waited for before what waits"
    )


@pytest.mark.parametrize("row", ["", ",,", "0SEND_F0"])
def test_a_row_without_actions(row: str) -> None:
    assert refusal(f"0F0,0B0\n{row}\n1F0,1B0\n") == (
        "s.csv, row 2: no action in this row\n  hint: row 2 is rank 1: give it a stage, or take the row out"
    )


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_no_rows(text: str) -> None:
    assert refusal(text) == "s.csv: there is no row\n  hint: write one row per rank: 0F0,0F1,0B0,0B1"


def test_text_that_is_not_csv() -> None:
    assert refusal("0" * 200_000) == (
        "s.csv: this is not CSV: field larger than field limit (131072)\n"
        "  hint: write one row per rank, cells separated by commas"
    )


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_csv("missing.csv")
    assert str(caught.value) == (
        "missing.csv: the schedule cannot be read\n"
        "  why:  No such file or directory\n"
        "  hint: give the path of a CSV file with one row per rank"
    )


def test_a_file_that_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        read_csv("binary.csv")
    assert str(caught.value).startswith(
        "binary.csv: the schedule cannot be read\n"
        "  why:  UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"
    )


CELLS = st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 1))
ODD_CELLS = st.one_of(
    CELLS, CELLS, CELLS, st.sampled_from(["", "x", '"', "1SEND_F0", "(0F1;1B0)OVERLAP_F_B"])
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(ODD_CELLS, max_size=8).map(",".join), max_size=3).map("\n".join))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        grid = parse_csv(text, by="s.csv")
    except ScheduleError as error:
        assert "hint:" in str(error)
    else:
        assert parse_csv(to_csv(grid), by="s.csv") == grid
        assert picture(grid)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_shuffled_schedule_runs_or_says_why_not(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "zero-bubble", "zbv", "dualpipe-v"]))
    rows = [row.split(",") for row in to_csv(grid_for(name, 2, 4)).splitlines()]
    row = data.draw(st.sampled_from(rows))
    first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[first], row[second] = row[second], row[first]
    try:
        grid = parse_csv("\n".join(map(",".join, rows)), by="s.csv")
    except ScheduleError as error:
        assert str(error).startswith("s.csv: this order can never run\n  rank ")
    else:
        assert picture(grid)
