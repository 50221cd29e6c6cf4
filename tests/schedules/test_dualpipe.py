"""DualPipe in both directions: against the published steps and an independent clock, and what it refuses."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper import schedules
from piper.errors import ScheduleError
from piper.schedules.grid import grid_for
from piper.schedules.timing import StageCosts, makespan, timeline
from piper.schedules.torch_csv import parse_csv, to_csv
from tests.schedules.activations import peak_activations

Costs = tuple[int, int, int]  # F, I, W


class Moves:
    """Numbers the moves of a rank in its near direction (0), which enters on its side, and the far one (1)."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        half, lower = min(rank, ranks - 1 - rank), rank < ranks // 2
        self.stage = (half, ranks - 1 - half)
        self.count = {"F": [0, 0], "B": [0, 0]}
        for kind in self.count:
            self.count[kind][1 if lower else 0] = microbatches // 2
        self.owed: list[str] = []

    def _next(self, kind: str, direction: int, letter: str) -> str:
        self.count[kind][direction] += 1
        return f"{self.stage[direction]}{letter}{self.count[kind][direction] - 1}"

    def forward(self, direction: int) -> str:
        return self._next("F", direction, "F")

    def backward(self, direction: int) -> str:
        return self._next("B", direction, "B")

    def inputs(self, direction: int) -> str:
        cell = self._next("B", direction, "I")
        self.owed.append(cell.replace("I", "W"))
        return cell

    def pair(self, forward: int, backward: int) -> str:
        return f"({self.forward(forward)};{self.backward(backward)})OVERLAP_F_B"


def published(rank: int, ranks: int, microbatches: int) -> list[str]:
    """The eight steps of a rank as DeepSeek publishes them."""
    do = Moves(rank, ranks, microbatches)
    half = min(rank, ranks - 1 - rank)
    below = ranks // 2 - half - 1
    row = [do.forward(0) for _ in range(2 * below)]  # 1: nF0
    for _ in range(half + 1):  # 2: nF0F1
        row += [do.forward(0), do.forward(1)]
    for _ in range(below):  # 3: nB1W1F1
        row += [do.inputs(1), do.owed.pop(0), do.forward(1)]
    for turn in range(microbatches // 2 - ranks + half + 1):  # 4: nF0B1F1B0
        apart = turn == 0 and below == 0
        row += [do.forward(0), do.backward(1)] if apart else [do.pair(0, 1)]
        row.append(do.pair(1, 0))
    for _ in range(below):  # 5: nB1F1B0
        row += [do.backward(1), do.pair(1, 0)]
    for turn in range(2 * (half + 1)):  # 6: nB1B0, whose second half is split
        whole = turn < half + 1
        row.append((do.backward if whole else do.inputs)(1 - turn % 2))
    for _ in range(below):  # 7: nWB0
        row += [do.owed.pop(0), do.inputs(0)]
    return row + do.owed  # 8: nW


SIZES = [(2, 4), (2, 10), (4, 8), (4, 12), (6, 12), (6, 20), (8, 16), (8, 20), (16, 40)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_rank_runs_the_published_steps(ranks: int, microbatches: int) -> None:
    rows = to_csv(grid_for("dualpipe", ranks, microbatches)).splitlines()
    assert [row.split(",") for row in rows] == [published(rank, ranks, microbatches) for rank in range(ranks)]


def parsed(cell: str) -> list[tuple[int, str, int]]:
    members = cell.removesuffix(")OVERLAP_F_B").removeprefix("(").split(";")
    found = []
    for member in members:
        letter = next(char for char in member if char in "FBIW")
        stage, microbatch = member.split(letter)
        found.append((int(stage), letter, int(microbatch)))
    return found


def needed(action: tuple[int, str, int], last: int) -> Iterator[tuple[str, int, int]]:
    stage, letter, microbatch = action
    if letter == "F" and stage:
        yield "h", stage - 1, microbatch
    if letter in "BI":
        yield "h", stage, microbatch
        if stage < last:
            yield "g", stage + 1, microbatch
    if letter == "W":
        yield "g", stage, microbatch


def clock(rows: list[list[str]], costs: Costs) -> tuple[int, list[int]]:
    """The end of the step and the time that each rank computes, by trying all ranks in turn until none moves.

    A pair is one piece: it starts when both members can, and both have ended when it has.
    """
    f, i, w = costs
    cost = {"F": f, "B": i + w, "I": i, "W": w}
    done: dict[tuple[str, int, int], int] = {}
    free, busy, at = [0] * len(rows), [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            actions = parsed(row[at[rank]])
            wants = [value for action in actions for value in needed(action, len(rows) - 1)]
            if any(value not in done for value in wants):
                continue
            start = max([free[rank], *(done[value] for value in wants)])
            length = sum(cost[letter] for _, letter, _ in actions)
            for stage, letter, microbatch in actions:
                if letter != "W":
                    done["h" if letter == "F" else "g", stage, microbatch] = start + length
            free[rank], busy[rank], at[rank], moved = start + length, busy[rank] + length, at[rank] + 1, True
    assert at == [len(row) for row in rows], "some rank waits for ever"
    return max(free), busy


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 1)])
def test_the_published_bubble(ranks: int, microbatches: int, costs: Costs) -> None:
    rows = [row.split(",") for row in to_csv(grid_for("dualpipe", ranks, microbatches)).splitlines()]
    f, i, w = costs
    b = i + w
    end, busy = clock(rows, costs)
    assert busy == [microbatches * (f + b)] * ranks
    assert end - busy[0] == (ranks // 2 - 1) * ((f + b) + b - 3 * w)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12))
def test_each_direction_enters_at_its_own_end(half: int, more: int) -> None:
    ranks, microbatches = 2 * half, 4 * half + 2 * more
    grid = grid_for("dualpipe", ranks, microbatches)
    for rank, row in enumerate(grid.rows):
        for group in row:
            for action in group:
                down = action.microbatch < microbatches // 2
                assert rank == (action.stage if down else ranks - 1 - action.stage)
    assert max(peak_activations(grid)) <= ranks + 1
    assert parse_csv(to_csv(grid), by="s.csv") == grid


def test_transfers_take_time_in_both_directions() -> None:
    """Two ranks: whichever way a microbatch goes, its activation and its gradient cross once."""
    grid = grid_for("dualpipe", 2, 4)
    assert makespan(grid) == 12
    starts = timeline(grid, StageCosts.even(2, hop=0.5)).starts
    assert starts[0] == starts[1] == (0, 1.5, 2.5, 3.5, 6, 9, 11.5, 12.5)


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_an_odd_number_of_ranks(ranks: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.dualpipe(ranks, 20)
    assert str(caught.value) == (
        f"dualpipe: ranks={ranks} is odd\n"
        "  needs: an even number: the two directions meet between the two ranks in the middle\n"
        "  hint:  use one rank more or less, or dualpipe_v, which takes any number"
    )


@pytest.mark.parametrize(("microbatches", "parts"), [(1, 16), (14, 16), (15, 16), (17, 18), (21, 22)])
def test_microbatches_that_cannot_fill_both_directions(microbatches: int, parts: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.dualpipe(8, microbatches)
    assert str(caught.value) == (
        f"dualpipe: microbatches={microbatches} cannot fill both directions of ranks=8\n"
        "  needs: an even number of microbatches, at least 16: 8 in each direction\n"
        f"  hint:  split into {parts} parts, or use zbv, which takes any number"
    )
