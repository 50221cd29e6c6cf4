"""A pipeline schedule as a value: what each rank runs, in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.directives.arguments import check_value, whole
from piper.directives.order import Order, order
from piper.errors import ScheduleError
from piper.ir.select import At, at
from piper.schedules.action import Action, Group

Row = tuple[Group, ...]
Stage = str | Sequence[At]  # the tag that numbers the stages, or one filter for each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One row of groups per rank. One rank runs all passes of a stage on a microbatch."""

    rows: tuple[Row, ...]

    def actions(self) -> Iterator[Action]:
        """Yield every action, rank by rank, in order."""
        return (action for row in self.rows for group in row for action in group)

    @property
    def stages(self) -> int:
        return max((action.stage for action in self.actions()), default=-1) + 1

    @property
    def microbatches(self) -> int:
        return max((action.microbatch for action in self.actions()), default=-1) + 1


def orders(grid: Grid, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Return a grid as directives: one `order` per rank, with one group per group of the row.

    rank 0  0F0 0F1 0B0
    -->
    order([[at(PP=0, MB=0, PASS="F")], [at(PP=0, MB=1, PASS="F")], [at(PP=0, MB=0, PASS="B")]])

    stage: the tag that numbers the stages, or one filter for each stage, such as at(LAYER=range(0, 4)).
    """
    if not isinstance(stage, str):
        filters = stage
        check_filters(filters, part, grid.stages)
    elif stage == part or "PASS" in (stage, part):
        raise ScheduleError(
            f"stage={stage!r} and part={part!r} cannot both be tags",
            by="orders",
            hint='use two different tags, neither of them PASS: stage="PP", part="MB"',
        )
    else:
        filters = [at(None, **{stage: number}) for number in range(grid.stages)]

    def select(action: Action) -> At:
        return filters[action.stage].narrowed(action.phase, **{part: action.microbatch})

    return [order([[select(action) for action in group] for group in row]) for row in grid.rows]


def check_filters(stages: Sequence[At], part: str, count: int) -> None:
    """Refuse what is not a filter for each of `count` stages, and filters that name a pass or `part`."""
    if not isinstance(stages, Sequence) or not all(isinstance(one, At) for one in stages):
        raise ScheduleError(
            f"stage={stages!r} is neither a tag nor a list of filters",
            by="orders",
            hint='give the tag that numbers the stages, stage="PP", or a filter for each: '
            "stage=[at(LAYER=range(0, 4)), at(LAYER=range(4, 8))]",
        )
    for one in stages:
        if one.phase is not None or any(tag == part for tag, _ in one.tags):
            raise ScheduleError(
                f"the filter of a stage names {'PASS' if one.phase is not None else part}",
                by="orders",
                facts={"filter": str(one)},
                hint=f"leave PASS and {part} out: the schedule gives both",
            )
    if len(stages) != count:
        raise ScheduleError(
            f"{count} stages, and filters for {len(stages)}",
            by="orders",
            facts={"filters": ", ".join(map(str, stages)) or "none"},
            hint="give stage one filter for each stage, or the tag that numbers them",
        )


def need_whole(by: str, **numbers: int) -> None:
    """Refuse a number of ranks, stages or microbatches that is not a whole number from 1."""
    for name, number in numbers.items():
        check_value(by, name, number, whole(1), f"{name}=1 is the least")
