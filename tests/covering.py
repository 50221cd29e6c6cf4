"""Few cells in which every few values of different axes meet: what is run of a matrix that is too large.

Most mistakes in how parts are composed need two of them: a schedule with a kind of ZeRO, a model with a schedule. A
selection in which every such pair meets once finds those in a fraction of the product. `make matrix` runs the
selections, `make matrix-full` all cells.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import TypeVar

import pytest

CellT = TypeVar("CellT", bound=Hashable)
Choices = Mapping[str, Hashable]  # a cell's value on each axis
Meeting = frozenset[tuple[str, Hashable]]


def meetings(choices: Choices, together: int = 2) -> set[Meeting]:
    """Return every `together` of a cell's choices."""
    return {frozenset(some) for some in combinations(choices.items(), together)}


def covering(
    cells: Iterable[CellT],
    choices: Callable[[CellT], Choices],
    together: int = 2,
    *,
    given: Iterable[CellT] = (),
) -> list[CellT]:
    """Select cells in which any values of `together` axes meet that meet in some cell of the product.

    Each time the cell is taken that adds the most, the first of several: always the same selection. given: cells
    that another test runs.
    """
    places: dict[
        Meeting, int
    ] = {}  # sets of meetings are bits of one number: there are many of them to compare

    def bits(cell: CellT) -> int:
        return sum(1 << places.setdefault(one, len(places)) for one in meetings(choices(cell), together))

    meets = [(cell, bits(cell)) for cell in dict.fromkeys(cells)]
    left = (1 << len(places)) - 1
    for cell in given:
        left &= ~bits(cell)
    # What a cell adds never grows, so what it added when last looked at is a bound, and few cells need a new look.
    bounds = [(-meeting.bit_count(), number) for number, (_, meeting) in enumerate(meets)]
    heapify(bounds)
    chosen: list[CellT] = []
    while left:
        bound, number = heappop(bounds)
        cell, meeting = meets[number]
        adds = (left & meeting).bit_count()
        if adds < -bound:
            heappush(bounds, (-adds, number))
            continue
        chosen.append(cell)
        left &= ~meeting
    return chosen


def covering_each(
    cells: Collection[CellT],
    *descriptions: Callable[[CellT], Choices],
    given: Iterable[CellT] = (),
) -> list[CellT]:
    """Select cells in which every two choices of each description meet, for one description after the other."""
    chosen: list[CellT] = []
    for choices in descriptions:
        chosen += covering(cells, choices, given=[*given, *chosen])
    return chosen


def selected(
    cells: Iterable[CellT], chosen: Collection[CellT], group: Callable[[CellT], str] | None = None
) -> list[object]:
    """Return a test's parameters: the chosen cells belong to the matrix, the others to the exhaustive tests.

    A cell that is a tuple holds several arguments. group: the tests that one worker runs, because they share captures.
    """
    picked = frozenset(chosen)
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)),
            id="-".join(map(str, cell)) if isinstance(cell, tuple) else str(cell),
            marks=[
                pytest.mark.matrix if cell in picked else pytest.mark.exhaustive,
                *([pytest.mark.xdist_group(group(cell))] if group else []),
            ],
        )
        for cell in cells
    ]
