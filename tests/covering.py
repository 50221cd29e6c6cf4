"""Few cells in which every few values of different axes meet: what is run of a matrix that is too large.

Most mistakes in how parts are composed need two of them: a schedule with a kind of ZeRO, a model with a schedule. A
selection in which every such pair meets once finds those in a fraction of the product. `make matrix` runs the
selections, `make matrix-full` all cells.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations
from operator import or_
from random import Random
from typing import TypeVar

import pytest

CellT = TypeVar("CellT", bound=Hashable)
Choices = Mapping[str, Hashable]  # a cell's value on each axis
Meeting = frozenset[tuple[str, Hashable]]
ORDERS = 200  # of cells that are tried, each of which gives another selection


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
    return selection([*numbered(cells, lambda cell: meetings(choices(cell), together), given).items()])


def covering_each(
    cells: Collection[CellT],
    *descriptions: Callable[[CellT], Choices],
    given: Collection[CellT] = (),
) -> list[CellT]:
    """Select few cells in which every two choices of each description meet: the fewest of many orders of cells."""

    def meets(cell: CellT) -> set[Hashable]:
        return {
            (number, one) for number, choices in enumerate(descriptions) for one in meetings(choices(cell))
        }

    shuffled, draws = [*numbered(cells, meets, given).items()], Random(0)
    fewest = selection(shuffled)
    for _ in range(ORDERS):
        draws.shuffle(shuffled)
        fewest = min(fewest, selection(shuffled), key=len)
    return [cell for cell in cells if cell in fewest]


def numbered(
    cells: Iterable[CellT], meets: Callable[[CellT], Iterable[Hashable]], given: Iterable[CellT]
) -> dict[CellT, int]:
    """Return the meetings of each cell that no given one has, as bits of one number: there are many sets to compare."""
    places: dict[Hashable, int] = {}

    def bits(cell: CellT) -> int:
        return sum(1 << places.setdefault(one, len(places)) for one in meets(cell))

    elsewhere = reduce(or_, map(bits, given), 0)
    return {cell: bits(cell) & ~elsewhere for cell in dict.fromkeys(cells)}


def selection(having: Sequence[tuple[CellT, int]]) -> list[CellT]:
    """Select cells that have every meeting which some cell has."""
    wanted = reduce(or_, (met for _, met in having), 0)
    # What a cell adds never grows, so what it added when last looked at is a bound, and few cells need a new look.
    bounds = [(-met.bit_count(), number) for number, (_, met) in enumerate(having)]
    heapify(bounds)
    chosen: list[tuple[CellT, int]] = []
    left = wanted
    while left:
        bound, number = heappop(bounds)
        cell, met = having[number]
        adds = (left & met).bit_count()
        if adds < -bound:
            heappush(bounds, (-adds, number))
            continue
        chosen.append((cell, met))
        left &= ~met
    return without_needless(chosen, wanted)


def without_needless(chosen: Sequence[tuple[CellT, int]], wanted: int) -> list[CellT]:
    """Leave out cells all of whose meetings later ones have too."""
    later = [*accumulate((met for _, met in reversed(chosen)), or_, initial=0)][-2::-1]
    kept: list[CellT] = []
    had = 0
    for (cell, met), after in zip(chosen, later, strict=True):
        if wanted & ~(had | after):
            kept.append(cell)
            had |= met
    return kept


def selected(cells: Iterable[CellT], chosen: Collection[CellT]) -> list[object]:
    """Return a test's parameters: the chosen cells belong to the matrix, the others to the exhaustive tests.

    A cell that is a tuple holds several arguments.
    """
    picked = frozenset(chosen)
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)),
            id="-".join(map(str, cell)) if isinstance(cell, tuple) else str(cell),
            marks=pytest.mark.matrix if cell in picked else pytest.mark.exhaustive,
        )
        for cell in cells
    ]
