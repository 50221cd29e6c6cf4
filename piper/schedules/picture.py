"""Draws a grid as text: one line per rank, one column per unit of time."""

from piper.schedules.action import Group
from piper.schedules.clock import UNIT, timeline
from piper.schedules.grid import Grid

IDLE = "."
STILL = "--"  # the second half of a whole backward
PAIR = "+"  # joins a forward and a backward that overlap


def picture(grid: Grid) -> str:
    """Draw a grid with F = I = W = 1 and B = 2; a pair that overlaps is drawn one after the other, joined.

    rank 0  0F0 0F1 .   .   0B0 --  .   0B1 --
    rank 1  .   1F0 1B0 --  1F1+1B1 --  .   .
    """
    times = timeline(grid)
    lines: list[list[str]] = []
    for row, starts in zip(grid.rows, times.starts, strict=True):
        cells: list[str] = []
        for group, start in zip(row, starts, strict=True):
            cells += [IDLE] * (int(start) - len(cells))
            cells += group_cells(group)
        lines.append(cells + [IDLE] * (int(times.end) - len(cells)))
    label = len(f"rank {len(lines) - 1}")
    width = max((len(cell.rstrip(PAIR)) for cells in lines for cell in cells), default=0)
    return "\n".join(
        f"{f'rank {rank}':{label}}  {''.join(cell_text(cell, width) for cell in cells)}".rstrip()
        for rank, cells in enumerate(lines)
    )


def group_cells(group: Group) -> list[str]:
    """Return one cell per unit of time that a group takes.

    The cell before the second action of a pair ends in `+`.
    """
    cells: list[str] = []
    for action in group:
        if cells:
            cells[-1] += PAIR
        cells += [str(action), *[STILL] * (int(UNIT[action.phase]) - 1)]
    return cells


def cell_text(cell: str, width: int) -> str:
    """Return a cell and the gap after it, which holds the mark of a pair."""
    return f"{cell.removesuffix(PAIR):{width}}{PAIR if cell.endswith(PAIR) else ' '}"
