"""A pipeline schedule as a value: what each rank runs, in order. Builders make it; directives say it."""

from collections.abc import Iterator
from dataclasses import dataclass

from piper.directives.order import Order, order
from piper.errors import ScheduleError
from piper.ir.select import At, at
from piper.schedules.action import Action, Group

Row = tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One row of groups per rank. A stage belongs to the one rank that runs it."""

    rows: tuple[Row, ...]

    def actions(self) -> Iterator[Action]:
        """Every action, rank by rank, in order."""
        return (action for row in self.rows for group in row for action in group)

    @property
    def stages(self) -> int:
        return max((action.stage for action in self.actions()), default=-1) + 1

    @property
    def microbatches(self) -> int:
        return max((action.microbatch for action in self.actions()), default=-1) + 1


def orders(grid: Grid, *, stage: str = "PP", part: str = "MB") -> list[Order]:
    """Say a grid as directives: one `order` per rank, one of its groups per group of the row.

    rank 0  0F0 0F1 0B0
    -->
    order([[at(PP=0, MB=0, PASS="F")], [at(PP=0, MB=1, PASS="F")], [at(PP=0, MB=0, PASS="B")]])
    """
    if stage == part or "PASS" in (stage, part):
        raise ScheduleError(
            f"stage={stage!r} and part={part!r} cannot both be tags",
            by="orders",
            hint='use two different tags, neither of them PASS: stage="PP", part="MB"',
        )

    def select(action: Action) -> At:
        return at(PASS=action.phase, **{stage: action.stage, part: action.microbatch})

    return [order([[select(action) for action in group] for group in row]) for row in grid.rows]


def need_whole(by: str, **numbers: int) -> None:
    """Refuse a number of ranks, stages or microbatches that is not a whole number from 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"{name}={number!r}", by=by, hint=f"{name} is a whole number from 1")
