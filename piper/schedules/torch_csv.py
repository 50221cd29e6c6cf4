"""Grids as torch.distributed.pipelining's CSV: a row per rank, a cell per action. Needs no torch."""

import csv
import re
from io import StringIO
from pathlib import Path

from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.schedules.action import group_text, parse_group
from piper.schedules.grid import Grid, Stage, orders
from piper.schedules.grid_check import validate

# What torch adds when it writes a schedule with its communication. Skipped: the compiler derives our own.
COMMUNICATION = re.compile(r"[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")


def from_csv(path: str | Path, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Read a schedule that torch.distributed.pipelining wrote, or can read, as directives.

    0F0,0F1,,0B0,0B1        rank 0 runs stage 0; an empty cell is idle time and orders nothing
    ,1F0,1B0,1F1,1B1        rank 1 runs stage 1
    """
    return orders(read_csv(path), stage=stage, part=part)


def read_csv(path: str | Path) -> Grid:
    """Read and check the grid in a CSV file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not text"
        raise ScheduleError(
            f"the schedule cannot be read: {reason}",
            by=str(path),
            hint="give the path of a CSV file with one row per rank",
        ) from error
    return parse_csv(text, by=str(path))


def parse_csv(text: str, *, by: str) -> Grid:
    """Read and check the grid in CSV text. `by` names the text in errors."""
    rows = []
    columns: list[list[int]] = []  # the column of each group, for errors: idle cells are not in the grid
    for number, cells in enumerate(table(text, by), start=1):
        groups = [
            (column, parse_group(cell, by=f"{by}, row {number}, column {column}"))
            for column, cell in enumerate(map(str.strip, cells), start=1)
            if cell and not COMMUNICATION.fullmatch(cell)
        ]
        if not groups:
            raise ScheduleError(
                "no action in this row",
                by=f"{by}, row {number}",
                hint=f"row {number} is rank {number - 1}: give it a stage, or take the row out",
            )
        columns.append([column for column, _ in groups])
        rows.append(tuple(group for _, group in groups))
    grid = Grid(rows=tuple(rows))
    validate(grid, by=by, where=lambda rank, position: f"row {rank + 1}, column {columns[rank][position]}")
    return grid


def table(text: str, by: str) -> list[list[str]]:
    """Return the cells of CSV text, row by row. Empty lines at the end are not rows."""
    try:
        cells = list(csv.reader(StringIO(text, newline="")))
    except csv.Error as error:
        raise ScheduleError(
            f"this is not CSV: {error}", by=by, hint="write one row per rank, cells separated by commas"
        ) from error
    while cells and not cells[-1]:
        cells.pop()
    if not cells:
        raise ScheduleError("there is no row", by=by, hint="write one row per rank: 0F0,0F1,0B0,0B1")
    return cells


def to_csv(grid: Grid) -> str:
    """Write a grid as torch's compute-only CSV. No cell is idle: torch waits for data, not for columns."""
    return "".join(",".join(map(group_text, row)) + "\n" for row in grid.rows)
