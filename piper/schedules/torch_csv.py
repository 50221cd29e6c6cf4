"""Grids as torch.distributed.pipelining's CSV: a row per rank, a cell per action. Needs no torch.

A grid that was read is checked: every action once, its passes on one rank, and no deadlock.
"""

import csv
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from piper.directives.order import Order
from piper.errors import ScheduleError, file_errors
from piper.ir.chunk import Phase
from piper.ir.grouping import grouped
from piper.schedules.grid import Action, Grid, Stage, group_text, orders, parse_group
from piper.schedules.timing import timeline

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
    with file_errors(
        "the schedule cannot be read", path, "give the path of a CSV file with one row per rank"
    ):
        text = Path(path).read_text(encoding="utf-8-sig")
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


COMPLETE: tuple[frozenset[Phase], ...] = (frozenset({"F", "B"}), frozenset({"F", "BI", "BW"}))
Where = Callable[[int, int], str]  # (rank, position in its row) -> how the user finds it
NO_FILE: Where = "rank {}, position {}".format


def validate(grid: Grid, *, by: str = "schedule", where: Where = NO_FILE) -> None:
    """Refuse a grid that leaves work out, does it twice, spreads a microbatch, or can never run.

    That each rank has actions, and that pairs can overlap, is known of all that was read.
    """
    nothing_missing(grid, places(grid, by, where), by)
    timeline(grid, by=by)


def places(grid: Grid, by: str, where: Where) -> dict[Action, tuple[int, int]]:
    """Return the rank and position of each action. Refuse duplicates.

    Refuse also a microbatch of a stage that two ranks run: its saved activations live in one place.
    """
    found: dict[Action, tuple[int, int]] = {}
    first_of: dict[tuple[int, int], Action] = {}  # by stage and microbatch
    for rank, row in enumerate(grid.rows):
        for position, group in enumerate(row):
            for action in group:
                if action in found:
                    raise ScheduleError(
                        f"{action} runs twice",
                        by=by,
                        facts={"first": where(*found[action]), "again": where(rank, position)},
                        hint="keep one of the two",
                    )
                found[action] = rank, position
                first = first_of.setdefault((action.stage, action.microbatch), action)
                if found[first][0] != rank:
                    raise ScheduleError(
                        f"stage {action.stage} runs microbatch {action.microbatch} on two ranks",
                        by=by,
                        facts={
                            "first": f"{first} at {where(*found[first])}",
                            "again": f"{action} at {where(rank, position)}",
                        },
                        hint="keep the forward and the backward of a microbatch on one rank",
                    )
    return found


def nothing_missing(grid: Grid, found: dict[Action, tuple[int, int]], by: str) -> None:
    """Refuse a grid in which some stage leaves out a microbatch, or a part of its backward."""
    parts = grouped(((action.stage, action.microbatch), action) for action in found)
    stages, microbatches = grid.stages, grid.microbatches
    sizes = f"stages 0..{stages - 1}, microbatches 0..{microbatches - 1}, by the largest of each"
    # Stops at the first gap, so a stray huge index costs no more than the actions that are there.
    for microbatch in range(microbatches):
        for stage in range(stages):
            present = parts.get((stage, microbatch), [])
            if {action.phase for action in present} not in COMPLETE:
                raise ScheduleError(
                    f"stage {stage} does not run microbatch {microbatch} forward and backward, once each",
                    by=by,
                    facts={"there": " ".join(map(str, present)) or "nothing", "sizes": sizes},
                    hint="a stage runs F and B, or F, I and W, for each microbatch",
                )
