"""A pipeline schedule as a value: its name, and the actions of each rank in order, as torch writes them."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeVar

from piper.directives.base import check_value, whole
from piper.directives.order import Order, order
from piper.errors import ScheduleError
from piper.ir.chunk import Phase
from piper.ir.select import At, at

LETTERS: Mapping[Phase, str] = MappingProxyType({"F": "F", "B": "B", "BI": "I", "BW": "W"})
PHASE_OF: Mapping[str, Phase] = MappingProxyType({letter: phase for phase, letter in LETTERS.items()})

ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Run one phase of one stage on one microbatch. As text: `2F0`, `2B0`, `2I0`, `2W0`."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.phase]}{self.microbatch}"


Group = tuple[Action, ...]  # one action; or a forward and a backward that may interleave


def group_text(group: Group) -> str:
    """Return a group as torch writes it: `2F0`, or `(0F3;7B1)OVERLAP_F_B`."""
    if len(group) == 1:
        return str(group[0])
    return f"({';'.join(map(str, group))})OVERLAP_F_B"


def parse_group(text: str, *, by: str) -> Group:
    """Parse a group; the inverse of `group_text`. `by` says where the text is from."""
    if overlap := OVERLAP.fullmatch(text):
        group = tuple(parse_action(member.strip(), by=by) for member in overlap.groups())
        if not is_overlap(group):
            raise ScheduleError(
                f"{text} overlaps {group[0]} and {group[1]}",
                by=by,
                hint="an overlapped cell holds one forward and one backward (B or I): (0F3;7B1)OVERLAP_F_B",
            )
        return group
    return (parse_action(text, by=by),)


def parse_action(text: str, *, by: str) -> Action:
    """Read one action. Nothing may come before or after it."""
    match = ACTION.fullmatch(text)
    if not match:
        start = text if len(text) <= 40 else f"{text[:37]}..."
        raise ScheduleError(
            f"{start!r} is not an action",
            by=by,
            hint="write stage, letter, microbatch: 2F0 (forward), 2B0 (backward), 2I0 and 2W0 (its input and"
            " weight halves), or two of them as (0F3;7B1)OVERLAP_F_B",
        )
    stage, letter, microbatch = match.groups()
    return Action(stage=int(stage), phase=PHASE_OF[letter], microbatch=int(microbatch))


def is_overlap(group: Group) -> bool:
    """Return whether a group is a forward and a backward that may interleave. A BW half may not."""
    phases = [action.phase for action in group]
    return len(phases) == 2 and phases.count("F") == 1 and "BW" not in phases


Row = tuple[Group, ...]
Stage = str | Sequence[At]  # the tag that numbers the stages, or one filter for each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One row of groups per rank. One rank runs all passes of a stage on a microbatch."""

    rows: tuple[Row, ...]

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Yield every action with its rank, rank by rank, in order."""
        return ((rank, action) for rank, row in enumerate(self.rows) for group in row for action in group)

    @property
    def stages(self) -> int:
        return max((action.stage for _, action in self.actions()), default=-1) + 1

    @property
    def microbatches(self) -> int:
        return max((action.microbatch for _, action in self.actions()), default=-1) + 1


class RowWriter:
    """Writes one rank's row the way the papers draw it: which stage moves next, without naming microbatches.

    It numbers each move with its stage's next microbatch, and remembers the weight gradients that are left.
    In every schedule here a stage takes microbatches in turn. Moves past the last microbatch write nothing,
    so one description serves any number of them.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._taken: Counter[tuple[str, int]] = Counter()  # microbatches so far, by phase and stage
        self.owed: deque[Action] = deque()  # weight gradients that can run now
        self._groups: list[Group] = []

    def forward(self, stage: int) -> None:
        """Run the stage's next forward."""
        self._groups.append(self._next(stage, "F"))

    def backward(self, stage: int) -> None:
        """Run the stage's next backward whole."""
        self._groups.append(self._next(stage, "B"))

    def inputs(self, stage: int) -> None:
        """Run the input half of the stage's next backward, and leave the weight half for later."""
        for action in self._next(stage, "B"):
            self._groups.append((replace(action, phase="BI"),))
            self.owed.append(replace(action, phase="BW"))

    def weights(self) -> None:
        """Run the weight half that has waited longest, if there is one."""
        if self.owed:
            self._groups.append((self.owed.popleft(),))

    def overlap(self, forward: int, backward: int) -> None:
        """Run one stage's next forward and another's next backward as a pair that may interleave."""
        self._groups.append(self._next(forward, "F") + self._next(backward, "B"))

    def finish(self) -> Row:
        """Write the weight gradients that are still owed, and return the row."""
        while self.owed:
            self.weights()
        return tuple(group for group in self._groups if group)

    def _next(self, stage: int, phase: Literal["F", "B"]) -> Group:
        microbatch = self._taken[phase, stage]
        self._taken[phase, stage] += 1
        if microbatch >= self._microbatches:
            return ()
        return (Action(stage=stage, phase=phase, microbatch=microbatch),)


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
        check_value(name, number, whole(1), f"{name}=1 is the least", by)


Build = TypeVar("Build", bound=Callable[..., Grid])


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """A schedule that the command line knows."""

    build: Callable[..., Grid]  # of ranks and microbatches, and of stages per rank where it takes any number
    rank: int  # its place in lists: the order of imports must not show
    stages_per_rank: int  # unless asked otherwise
    instead: str  # where it has no other number of stages: a schedule that takes one. Empty: it takes any


_KNOWN: dict[str, NamedSchedule] = {}  # filled where schedules are defined, and never changed after
NAMES: Mapping[str, NamedSchedule] = MappingProxyType(_KNOWN)  # in the order of their ranks
SYNTHESISED = "synthesised"  # has no grid of its own: the command line searches for one


def registered(
    name: str, rank: int, *, stages_per_rank: int = 2, instead: str = ""
) -> Callable[[Build], Build]:
    """Register the grid of a schedule by its name, at `rank` in every list.

    instead: of a schedule with this number of stages per rank alone, another one that takes any.
    """

    def register(build: Build) -> Build:
        entry = NamedSchedule(build=build, rank=rank, stages_per_rank=stages_per_rank, instead=instead)
        entries = sorted({**_KNOWN, name: entry}.items(), key=lambda named: named[1].rank)
        _KNOWN.clear()
        _KNOWN.update(entries)
        return build

    return register


def known() -> tuple[str, ...]:
    """Return every name that the command line knows."""
    return (*NAMES, SYNTHESISED)


@lru_cache(maxsize=256)  # some take a second for many ranks, and a search asks for each many times
def grid_for(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Grid:
    """Build a schedule by name. Without `stages_per_rank`, as many as the schedule usually has."""
    if name not in NAMES:
        close = get_close_matches(name.lower().replace("_", "-"), known(), n=1)
        raise ScheduleError(
            f"there is no schedule {name!r}",
            by="schedule",
            facts={"known": ", ".join(known())},
            hint=f"did you mean {close[0]}?" if close else "use one of the known names",
        )
    entry = NAMES[name]
    stages_per_rank = entry.stages_per_rank if stages_per_rank is None else stages_per_rank
    need_whole(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if entry.instead and stages_per_rank != entry.stages_per_rank:
        raise ScheduleError(
            f"stages_per_rank={stages_per_rank}",
            by=name,
            facts={"needs": f"stages_per_rank={entry.stages_per_rank}"},
            hint=f"leave stages_per_rank out, or use {entry.instead}",
        )
    return entry.build(ranks, microbatches, *(() if entry.instead else (stages_per_rank,)))
