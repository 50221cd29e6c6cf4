"""Draws a grid as text: one line per rank, columns of equal time."""

import math
from collections.abc import Collection
from fractions import Fraction

from piper.schedules.action import Group
from piper.schedules.grid import Grid
from piper.schedules.timing import UNIT, Costs, cost_of, timeline

IDLE = "."
STILL = "--"  # the second half of a whole backward
PAIR = "+"  # joins a forward and a backward that overlap
FINEST = 1000  # the denominator up to which times are distinguished
NARROWEST = 4  # the shortest action takes at most this many columns


def picture(grid: Grid, costs: Costs = UNIT) -> str:
    """Draw a grid; a pair that overlaps is drawn one after the other, joined.

    A column is one unit of time, with F = I = W = 1 and B = 2 unless other costs are given.

    rank 0  0F0 0F1 .   .   0B0 --  .   0B1 --
    rank 1  .   1F0 1B0 --  1F1+1B1 --  .   .
    """
    times = timeline(grid, costs)
    unit = column_time({cost_of(costs, action) for action in grid.actions()})
    lines: list[list[str]] = []
    for row, starts in zip(grid.rows, times.starts, strict=True):
        cells: list[str] = []
        for group, start in zip(row, starts, strict=True):
            cells += [IDLE] * (nearest(start / unit) - len(cells))
            cells += group_cells(group, start, costs, unit)
        lines.append(cells + [IDLE] * (nearest(times.end / unit) - len(cells)))
    label = len(f"rank {len(lines) - 1}")
    width = max((len(cell.rstrip(PAIR)) for cells in lines for cell in cells), default=0)
    return "\n".join(
        f"{f'rank {rank}':{label}}  {''.join(cell_text(cell, width) for cell in cells)}".rstrip()
        for rank, cells in enumerate(lines)
    )


def column_time(times: Collection[float]) -> float:
    """Return the time of a column: what divides all times, or the shortest where that is too small."""
    exact = [Fraction(time).limit_denominator(FINEST) for time in times if time > 0]
    if not exact:
        return 1.0
    whole = math.lcm(*(time.denominator for time in exact))
    common = Fraction(math.gcd(*(int(time * whole) for time in exact)), whole)
    return float(common if common and common * NARROWEST >= min(exact) else min(exact))


def nearest(columns: float) -> int:
    """Return the nearest whole column: an action that takes a column or more keeps at least one."""
    return math.floor(columns + 0.5)


def group_cells(group: Group, start: float, costs: Costs, unit: float) -> list[str]:
    """Return one cell per column that the group takes; the cell before the second of a pair ends in `+`."""
    cells: list[str] = []
    clock = start
    for action in group:
        if cells:
            cells[-1] += PAIR
        first, clock = nearest(clock / unit), clock + cost_of(costs, action)
        cells += [str(action), *[STILL] * (nearest(clock / unit) - first - 1)]
    return cells


def cell_text(cell: str, width: int) -> str:
    """Return a cell and the gap after it, which holds the mark of a pair."""
    return f"{cell.removesuffix(PAIR):{width}}{PAIR if cell.endswith(PAIR) else ' '}"
