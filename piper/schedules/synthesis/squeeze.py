"""Closes the gaps at the two ends of a repeated building block, where fewer microbatches interlock.

Works in slots of one unit of time, for stages that are all alike: F = BI = BW = 1.
"""

from collections.abc import Sequence

from piper.schedules.synthesis.problem import F, I, Problem

FREE = -1


class SlotRow:
    """One rank's slots: which F or BI runs in each, and, in free slots, weight gradients that are owed."""

    def __init__(self, problem: Problem, slots: Sequence[int]) -> None:
        self.problem = problem
        self.slots = list(slots)
        self.owed = [0] * len(slots)  # weight gradients that could run, after each slot
        self.held = [0] * len(slots)  # forwards whose weight gradients have not run, after each slot
        self.settle(0, len(slots))

    def settle(self, first: int, last: int) -> int:
        """Update what is owed and held from one slot on, and return the peak of what changed.

        Slots after `last` are as they were: from the first of them with the same state on nothing changes.
        """
        owed, held = (self.owed[first - 1], self.held[first - 1]) if first else (0, 0)
        peak = 0
        for slot in range(first, len(self.slots)):
            operation = self.slots[slot]
            if operation == FREE:
                if owed:
                    owed, held = owed - 1, held - 1
            elif self.problem.kind[operation] == F:
                held += 1
            else:
                owed += 1
            if slot > last and (self.owed[slot], self.held[slot]) == (owed, held):
                break
            self.owed[slot], self.held[slot] = owed, held
            peak = max(peak, held)
        return peak

    def swap(self, slot: int, other: int) -> int:
        """Exchange what runs in two slots, and return the peak of what changed."""
        self.slots[slot], self.slots[other] = self.slots[other], self.slots[slot]
        return self.settle(min(slot, other), max(slot, other))


def squeezed(problem: Problem, times: Sequence[float], limit: int) -> list[float]:
    """Move each F and BI of the warm-up and the cool-down to the first free slot that the memory allows.

    times: the slot of each F and BI; no two of one rank share one. limit: the forwards that a rank may hold.
    """
    slot_of = [int(time) for time in times]
    moved = [operation for operation in range(problem.size) if problem.kind[operation] in (F, I)]
    moved.sort(key=lambda operation: (slot_of[operation], operation))
    rows = rows_of(problem, slot_of, moved)
    steady_from = slot_of[problem.number(I, 0, 0)]
    steady_to = slot_of[problem.number(F, 0, problem.microbatches - 1)]
    for operation in moved:
        now = slot_of[operation]
        if steady_from <= now <= steady_to:
            continue
        row = rows[problem.rank[operation]]
        first = earliest(problem, slot_of, operation)
        choices = [slot for slot in range(first, now) if row.slots[slot] == FREE]
        slot_of[operation] = first_that_fits(row, now, choices, limit)
    return [float(slot) for slot in slot_of]


def rows_of(problem: Problem, slot_of: Sequence[int], operations: Sequence[int]) -> list[SlotRow]:
    """Lay operations out in the slots of their ranks, with room at the end for all weight gradients."""
    length = max(slot_of) + 1 + len(operations)
    slots = [[FREE] * length for _ in range(problem.ranks)]
    for operation in operations:
        assert slots[problem.rank[operation]][slot_of[operation]] == FREE, "two operations in one slot"
        slots[problem.rank[operation]][slot_of[operation]] = operation
    return [SlotRow(problem, row) for row in slots]


def earliest(problem: Problem, slot_of: Sequence[int], operation: int) -> int:
    """Return the first slot after what an operation needs, and after its stage's previous microbatch."""
    needed = [other for other, _ in problem.before[operation]]
    if problem.microbatch[operation]:
        needed.append(operation - 3)
    return max((slot_of[other] + 1 for other in needed), default=0)


def first_that_fits(row: SlotRow, now: int, choices: Sequence[int], limit: int) -> int:
    """Move an operation to the earliest of the free slots at which the rank stays within its limit.

    An earlier F holds memory longer, so whatever does not fit in one slot fits in none before it.
    """
    low, high = 0, len(choices)  # choices from `high` on fit
    while low < high:
        middle = (low + high) // 2
        peak = row.swap(now, choices[middle])
        row.swap(choices[middle], now)
        low, high = (low, middle) if peak <= limit else (middle + 1, high)
    if high == len(choices):
        return now
    row.swap(now, choices[high])
    return choices[high]
