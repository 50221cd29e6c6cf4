"""Pipelines as text: one line per rank of a schedule or program of plans, columns of equal time."""

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from piper.ir.chunk import Tags
from piper.ir.devices import show
from piper.plan.plan import Plans
from piper.schedules.grid import Grid
from piper.schedules.timing import UNIT, Costs
from piper.view.cells import Rows, of_schedule, plan_rows

IDLE = "."
STILL = "--"  # what a cell takes beyond its first column, as the second half of a whole backward
PAIR = "+"  # joins a forward and a backward that overlap
FINEST = 1000  # the denominator up to which times are distinguished
NARROWEST = 4  # the shortest action takes at most this many columns


def grid(plans: Plans, tags: Mapping[str, Tags]) -> str:
    """Draw plans with F = I = W = 1 and B = 2. `tags`: the annotations of each chunk.

    0,1  0F0 0F1 .   .   0B0 --  0B1 --
    2,3  .   1F0 1B0 --  1F1 1B1 --
    """
    return rows_text([show(plan.devices) for plan in plans], plan_rows(plans, tags), 1.0)


def picture(schedule: Grid, costs: Costs = UNIT) -> str:
    """Draw a schedule; a pair that overlaps is drawn one after the other, joined.

    A column is one unit of time, with F = I = W = 1 and B = 2 unless other costs are given.

    rank 0  0F0 0F1 .   .   0B0 --  .   0B1 --
    rank 1  .   1F0 1B0 --  1F1+1B1 --  .   .
    """
    pipeline = of_schedule(schedule, "", costs)
    unit = column_time({cell.cost for row in pipeline.rows for cell in row})
    return rows_text(pipeline.names, pipeline.rows, unit)


def rows_text(names: Sequence[str], rows: Rows, unit: float) -> str:
    """Draw rows of cells. unit: the time of a column."""
    end = nearest(max((cell.start + cell.cost for row in rows for cell in row), default=0.0) / unit)
    width = max((len(cell.label) for row in rows for cell in row), default=1)
    room = max(map(len, names), default=0)
    idle, still = f"{IDLE:{width}} ", f"{STILL:{width}} "
    lines = []
    for name, row in zip(names, rows, strict=True):
        columns: list[str] = []
        pair = -1
        for cell in row:
            if 0 <= cell.pair == pair:
                columns[-1] = columns[-1][:-1] + PAIR
            pair = cell.pair
            first, last = nearest(cell.start / unit), nearest((cell.start + cell.cost) / unit)
            columns += [idle] * (first - len(columns))
            columns += [f"{cell.label:{width}} ", *[still] * (last - first - 1)]
        columns += [idle] * (end - len(columns))
        lines.append(f"{name:{room}}  {''.join(columns)}".rstrip())
    return "\n".join(lines)


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
