"""How many activations a schedule holds."""

from typing import Literal

from piper.schedules.grid import Grid


def peak_activations(grid: Grid, *, freed_by: Literal["BI", "BW"] = "BW") -> tuple[int, ...]:
    """Return the most forwards each rank holds at once.

    A whole backward, or the `freed_by` half of it, frees one.
    """
    peaks = []
    for row in grid.rows:
        alive = peak = 0
        for action in (action for group in row for action in group):
            if action.phase == "F":
                alive += 1
                peak = max(peak, alive)
            elif action.phase in ("B", freed_by):
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)
