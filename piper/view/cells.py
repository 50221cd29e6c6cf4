"""A pipeline as cells in rows: the common form from which schedules and plans are drawn."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from piper.ir.chunk import Phase, Tags
from piper.ir.devices import in_words
from piper.ir.graph import Ordering
from piper.ir.ids import Pass
from piper.plan.plan import Plans
from piper.schedules.grid import Grid
from piper.schedules.timing import UNIT, Costs, cost_of, timeline
from piper.view.text_grid import StagePhase, block_of, placed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Rows of cells, one per rank of a schedule or program of plans."""

    title: str
    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

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
        for number, (group, start) in enumerate(zip(row, starts, strict=True)):
            clock = start
            for action in group:
                cost = cost_of(costs, action)
                cells.append(
                    Cell(
                        start=clock,
                        cost=cost,
                        phase=action.phase,
                        stage=action.stage,
                        part=(action.microbatch,),
                        pair=number if len(group) > 1 else -1,
                    )
                )
                clock += cost
        rows.append(tuple(cells))
    return Pipeline(title=title, names=tuple(f"rank {i}" for i in range(len(rows))), rows=tuple(rows))


def of_plans(
    plans: Plans, tags: Mapping[str, Tags], title: str, orderings: Iterable[Ordering] = ()
) -> Pipeline:
    """Return the pipeline of plans, with transfers free. Pairs are the passes that an `order` overlaps."""
    mates = pairs_of(orderings, tags)
    rows = []
    for row in placed(plans, tags):
        rows.append(tuple(cell_of(block, mates.get(block.label, -1)) for block in row))
    kept = tuple(tuple(lone_unpaired(row)) for row in rows)
    return Pipeline(
        title=title,
        names=tuple(in_words(plan.devices) for plan in plans),
        rows=kept,
    )


def cell_of(block: StagePhase, pair: int) -> Cell:
    """Make a cell of a block of the text grid."""
    return Cell(
        start=block.start,
        cost=block.cost,
        phase=block.phase,
        stage=block.stage,
        part=block.part,
        again=block.again,
        pair=pair,
        places=tuple(block.places),
    )


def pairs_of(orderings: Iterable[Ordering], tags: Mapping[str, Tags]) -> dict[str, int]:
    """Return the labels of blocks that an order groups with others, each with the number of its group."""
    found: dict[str, int] = {}
    number = 0
    for ordering in orderings:
        for group in ordering.groups:
            labels = dict.fromkeys(
                block_of(Pass(phase=step.phase, chunk=step.chunk, part=step.part), tags).label
                for step in group
            )
            if len(labels) > 1:
                found.update(dict.fromkeys(labels, number))
                number += 1
    return found


def lone_unpaired(row: Iterable[Cell]) -> list[Cell]:
    """Return a row in which a cell is paired only if another cell of its pair is in the same row."""
    cells = list(row)
    count: dict[int, int] = {}
    for cell in cells:
        count[cell.pair] = count.get(cell.pair, 0) + 1
    return [cell if count[cell.pair] > 1 else replace(cell, pair=-1) for cell in cells]
