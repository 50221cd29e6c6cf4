"""Checks that a grid is a schedule: every action once, its passes on one rank, and no deadlock."""

from collections.abc import Callable

from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.schedules.action import Action, is_overlap
from piper.schedules.grid import Grid
from piper.schedules.timing import timeline

COMPLETE: tuple[frozenset[Phase], ...] = (frozenset({"F", "B"}), frozenset({"F", "BI", "BW"}))
Where = Callable[[int, int], str]  # (rank, position in its row) -> how the user finds it


def rank_and_position(rank: int, position: int) -> str:
    """Name a place in a grid that has no file."""
    return f"rank {rank}, position {position}"


def validate(grid: Grid, *, by: str = "schedule", where: Where = rank_and_position) -> None:
    """Refuse a grid that leaves work out, does it twice, spreads a microbatch, or can never run."""
    if not grid.rows or not all(grid.rows):
        idle = [f"rank {rank} runs nothing" for rank, row in enumerate(grid.rows) if not row]
        raise ScheduleError(
            idle[0] if idle else "there are no ranks",
            by=by,
            hint="give every rank at least one stage, or leave the rank out",
        )
    found = places(grid, by, where)
    one_rank_per_microbatch(found, by, where)
    nothing_missing(grid, found, by)
    timeline(grid, by=by)


def places(grid: Grid, by: str, where: Where) -> dict[Action, tuple[int, int]]:
    """Return the rank and position of each action. Refuse duplicates, and groups that cannot overlap."""
    found: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(grid.rows):
        for position, group in enumerate(row):
            if len(group) != 1 and not is_overlap(group):
                raise ScheduleError(
                    f"{where(rank, position)} groups {', '.join(map(str, group)) or 'nothing'}",
                    by=by,
                    hint="a group is one action, or one forward and one backward (B or I) that overlap",
                )
            for action in group:
                if action in found:
                    raise ScheduleError(
                        f"{action} runs twice",
                        by=by,
                        facts={"first": where(*found[action]), "again": where(rank, position)},
                        hint="keep one of the two",
                    )
                found[action] = rank, position
    return found


def one_rank_per_microbatch(found: dict[Action, tuple[int, int]], by: str, where: Where) -> None:
    """Refuse a microbatch of a stage that two ranks run: its saved activations live in one place."""
    first_of: dict[tuple[int, int], Action] = {}
    for action, (rank, position) in found.items():
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


def nothing_missing(grid: Grid, found: dict[Action, tuple[int, int]], by: str) -> None:
    """Refuse a grid in which some stage leaves out a microbatch, or a part of its backward."""
    parts: dict[tuple[int, int], list[Action]] = {}
    for action in found:
        parts.setdefault((action.stage, action.microbatch), []).append(action)
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
