"""A pipeline as cells in rows: the common form from which schedules and plans are drawn, and its text."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, product

from piper.ir.chunk import CapturedModel, Phase, Tags
from piper.ir.devices import in_words, show
from piper.ir.graph import Ordering
from piper.ir.ids import AGAIN, Pass, SlotId
from piper.plan.ops import OPS
from piper.plan.plan import Plan, Plans
from piper.schedules.grid import LETTERS, Grid
from piper.schedules.timing import UNIT, Costs, cost_of, timeline

Rows = tuple[tuple["Cell", ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One phase of one stage on one microbatch, in units of time."""

    start: float
    cost: float
    phase: Phase
    stage: int | None  # None: the model has no stages
    part: tuple[int, ...]  # one index per axis that splits the samples
    again: bool = False  # a forward that runs a second time
    pair: int = -1  # cells of a row with the same number overlap; -1: none
    places: tuple[int, ...] = ()  # of plans: the places of its instructions

    @property
    def microbatch(self) -> str:
        """Return the indices of its microbatch as text."""
        return ".".join(map(str, self.part))

    @property
    def label(self) -> str:
        """Return its stage, phase and microbatch: `2F0`."""
        letter = AGAIN if self.again else LETTERS[self.phase]
        return f"{'' if self.stage is None else self.stage}{letter}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Rows of cells, one per rank of a schedule or program of plans."""

    title: str
    names: tuple[str, ...]
    rows: Rows

    @property
    def end(self) -> float:
        return max((cell.start + cell.cost for row in self.rows for cell in row), default=0)

    @property
    def idle(self) -> float:
        """Return the fraction of all rows' time in which nothing runs."""
        whole = self.end * len(self.rows)
        return 1 - sum(cell.cost for row in self.rows for cell in row) / whole if whole else 0.0

    @property
    def stages_share_rows(self) -> bool:
        """Return whether a row runs several stages, so that its cells must name theirs."""
        return any(len({cell.stage for cell in row}) > 1 for row in self.rows)

    @property
    def phases(self) -> tuple[tuple[Phase, bool], ...]:
        """Return the phases that occur, in the order F, B, BI, BW, each with whether it is a recompute."""
        used = {(cell.phase, cell.again) for row in self.rows for cell in row}
        order: tuple[Phase, ...] = ("F", "B", "BI", "BW")
        return tuple(found for found in product(order, (False, True)) if found in used)


def of_schedule(grid: Grid, title: str, costs: Costs = UNIT) -> Pipeline:
    """Return the pipeline of a schedule. Each cell starts as soon as its inputs are there."""
    rows = []
    for row, starts in zip(grid.rows, timeline(grid, costs).starts, strict=True):
        cells: list[Cell] = []
        for number, (group, clock) in enumerate(zip(row, starts, strict=True)):
            pair = number if len(group) > 1 else -1
            for action in group:
                cost, part = cost_of(costs, action), (action.microbatch,)
                cells.append(
                    Cell(start=clock, cost=cost, phase=action.phase, stage=action.stage, part=part, pair=pair)
                )
                clock += cost
        rows.append(tuple(cells))
    return Pipeline(title=title, names=tuple(f"rank {i}" for i in range(len(rows))), rows=tuple(rows))


def of_plans(
    plans: Plans, tags: Mapping[str, Tags], title: str, orderings: Iterable[Ordering] = ()
) -> Pipeline:
    """Return the pipeline of plans, with transfers free. Pairs are the passes that an `order` overlaps."""
    mates = pairs_of(orderings, tags)
    rows = ([replace(cell, pair=mates.get(cell.label, -1)) for cell in row] for row in plan_rows(plans, tags))
    return Pipeline(
        title=title,
        names=tuple(in_words(plan.devices) for plan in plans),
        rows=tuple(tuple(lone_unpaired(row)) for row in rows),
    )


def plan_rows(plans: Plans, tags: Mapping[str, Tags]) -> Rows:
    """Return each program's cells, with the time each starts when transfers are free.

    tags: the annotations of each chunk. All chunks of one stage in one phase on one microbatch are one cell.
    """
    collected = PlanCells(tags)
    return collected.timed([collected.row(plan) for plan in plans])


class PlanCells:
    """The cells of plans by number, and whose values each of them needs: of other cells, and of transfers."""

    def __init__(self, tags: Mapping[str, Tags]) -> None:
        self.tags = tags
        self.cells: list[Cell] = []
        self.places: list[list[int]] = []
        self.needs: list[set[int | str]] = []
        self.sent: dict[str, frozenset[int | str]] = {}  # by transfer: whose value it moves

    def row(self, plan: Plan) -> list[int]:
        """Collect a program's cells, and return their order: as issued, but a recompute before its backwards.

        Where each chunk is recomputed just before its own backward, another chunk's backward may be there.
        """
        by_label: dict[str, int] = {}
        turns: dict[int, tuple[int, int, int]] = {}  # by cell: what orders it in the row
        backwards: dict[tuple[int | None, tuple[int, ...]], int] = {}  # by stage and microbatch, the first
        written: dict[SlotId, frozenset[int | str]] = {}  # by slot: whose value it is
        for place, ins in enumerate(plan.instrs):
            read: frozenset[int | str] = frozenset().union(*(written.get(slot, ()) for slot in ins.reads))
            if ins.op == "compute":
                cell = cell_of(ins.computes, self.tags)
                number = by_label.setdefault(cell.label, len(self.cells))
                if number == len(self.cells):
                    after = backwards.get((cell.stage, cell.part)) if cell.again else None
                    turns[number] = (place, 1, 0) if after is None else (turns[after][0], 0, place)
                    if cell.phase != "F":
                        backwards.setdefault((cell.stage, cell.part), number)
                    self.cells.append(cell)
                    self.places.append([])
                    self.needs.append(set())
                self.places[number].append(place)
                self.needs[number] |= read - {number}
                written |= dict.fromkeys(ins.writes, frozenset((number,)))
            elif ins.op == "send":
                self.sent[ins.node] = read
            elif ins.op == "recv":
                written[ins.writes[0]] = frozenset((ins.node,))
            elif OPS[ins.op].hands_on and read:
                written |= dict.fromkeys(ins.writes, read)
        return sorted(turns, key=turns.__getitem__)

    def timed(self, rows: list[list[int]]) -> Rows:
        """Return the cells of rows, each after its predecessor in the row and after the cells it needs.

        Cells need each other where a stage runs before and after another one: the first of them waits for its
        row alone.
        """
        needs: list[set[int]] = []
        for number, before in enumerate(self.needs):
            moved = (self.sent.get(source, ()) for source in before if isinstance(source, str))
            needs.append({s for s in (*before, *chain(*moved)) if isinstance(s, int)} - {number})
        starts, ends = dict[int, float](), dict[int, float]()  # of the cells that have run
        free: list[float] = [0] * len(rows)
        left = [*map(deque, rows)]
        while any(left):
            done = len(ends)
            for place, row in enumerate(left):
                while row and needs[row[0]] <= ends.keys():
                    cell = row.popleft()
                    starts[cell] = max([free[place], *(ends[other] for other in needs[cell])])
                    free[place] = ends[cell] = starts[cell] + self.cells[cell].cost
            if len(ends) == done:
                needs[min(row[0] for row in left if row)] &= ends.keys()
        timed = [
            replace(cell, start=starts[number], places=tuple(self.places[number]))
            for number, cell in enumerate(self.cells)
        ]
        return tuple(tuple(timed[i] for i in row) for row in rows)


def cell_of(run: Pass, tags: Mapping[str, Tags]) -> Cell:
    """Return the cell that a pass belongs to, without its start."""
    outer = tags.get(run.chunk, ())
    return Cell(
        start=0,
        cost=UNIT[run.phase],
        phase=run.phase,
        stage=outer[0][1] if outer else None,
        part=tuple(index for _, index in run.part),
        again=run.again,
    )


def pairs_of(orderings: Iterable[Ordering], tags: Mapping[str, Tags]) -> dict[str, int]:
    """Return the labels of cells that an order groups with others, each with the number of its group."""
    groups: dict[str, int] = {}
    number = 0
    for ordering in orderings:
        for group in ordering.groups:
            labels = dict.fromkeys(
                cell_of(Pass(phase=step.phase, chunk=step.chunk, part=step.part), tags).label
                for step in group
            )
            if len(labels) > 1:
                groups.update(dict.fromkeys(labels, number))
                number += 1
    return groups


def lone_unpaired(row: Iterable[Cell]) -> list[Cell]:
    """Return a row in which a cell is paired only if another cell of its pair is in the same row."""
    cells = list(row)
    count = Counter(cell.pair for cell in cells)
    return [cell if count[cell.pair] > 1 else replace(cell, pair=-1) for cell in cells]


def stage_tags(outline: CapturedModel, orderings: Iterable[Ordering]) -> Mapping[str, Tags]:
    """Return each chunk's tags, with its stage as the outermost where stages are several regions each.

    A stage is the regions whose forwards are in the same groups of
    all orders. Without orders, or where some region is in none, tags stay as they are.

    order([at(LAYER=[0, 1], MB=0, PASS="F"), ...]), order([at(LAYER=[2, 3], MB=0, PASS="F"), ...])
    -->
    LAYER=0 and LAYER=1 are stage 0, LAYER=2 and LAYER=3 are stage 1
    """
    tags = {chunk.name: chunk.tags for chunk in outline.chunks}
    groups: dict[Tags, set[tuple[int, int, Tags]]] = {}  # by the outermost tag of a chunk, if it has one
    for number, ordering in enumerate(orderings):
        for place, group in enumerate(ordering.groups):
            for step in group:
                if step.phase == "F" and step.chunk in tags:
                    groups.setdefault(tags[step.chunk][:1], set()).add((number, place, step.part))
    regions = dict.fromkeys(own[:1] for own in tags.values())
    if not groups.keys() >= regions.keys():
        return tags
    stages: dict[frozenset[tuple[int, int, Tags]], int] = {}
    numbers = {region: stages.setdefault(frozenset(groups[region]), len(stages)) for region in regions}
    if len(stages) == len(regions):
        return tags
    return {chunk: (("stage", numbers[own[:1]]), *own[1:]) for chunk, own in tags.items()}


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
