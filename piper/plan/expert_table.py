"""Where experts are computed: on the devices that own them, and on those that have clones of them.

A table is for the devices of an expert group, by their places in it, and holds for a step. Parameters, their
optimizer state and checkpoints do not know of it: a clone is a copy for one step, and its gradient goes back.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from piper.ir.grouping import grouped

NOTHING = -1  # in a slot for a clone that is not used


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTable:
    """The experts in the slots of each device of a group, its own first, and each one's share of the rows.

    The rows of an expert are divided among its copies in the ratio of their shares.
    """

    experts: tuple[tuple[int, ...], ...]  # by device, then by slot
    shares: tuple[tuple[int, ...], ...]

    @property
    def own(self) -> int:
        """Return how many experts each device owns."""
        return 1 + max(expert for slots in self.experts for expert in slots) // len(self.experts)

    @property
    def moved(self) -> int:
        """Return how many experts a device gets at most as clones, or sends to others."""
        clones = [[e for e in slots[self.own :] if e != NOTHING] for slots in self.experts]
        owners = [expert // self.own for each in clones for expert in each]
        return max(*map(len, clones), *(owners.count(place) for place in range(len(self.experts))))

    def copies(self) -> dict[int, list[tuple[int, int]]]:
        """Return the slots of each expert: the device and the slot, in order."""
        places = (
            (expert, (place, slot))
            for place, slots in enumerate(self.experts)
            for slot, expert in enumerate(slots)
        )
        return grouped((expert, place) for expert, place in places if expert != NOTHING)

    def loads(self, rows: Sequence[int]) -> list[float]:
        """Return how many rows each device computes, given the rows of each expert."""
        loads = [0.0] * len(self.experts)
        for expert, copies in self.copies().items():
            total = sum(self.shares[place][slot] for place, slot in copies)
            for place, slot in copies:
                loads[place] += rows[expert] * self.shares[place][slot] / total
        return loads

    def skew(self, rows: Sequence[int]) -> float:
        """Return how many rows the busiest device computes, as a multiple of the mean."""
        total = sum(rows)
        return max(self.loads(rows)) * len(self.experts) / total if total else 1.0


def first_table(devices: int, own: int, clones: int) -> ExpertTable:
    """Return the table before rows are counted: evenly shared clones of the experts after a device's own."""
    following = [[(i * own + slot) % (devices * own) for slot in range(own + clones)] for i in range(devices)]
    return table_of([dict.fromkeys(experts, 1) for experts in following], own, clones)


def without_clones(devices: int, own: int, clones: int) -> ExpertTable:
    """Return the table in which each device computes its own experts, and no others."""
    owned = (range(place * own, (place + 1) * own) for place in range(devices))
    return table_of([dict.fromkeys(experts, 1) for experts in owned], own, clones)


def fits(table: ExpertTable, devices: int, own: int, clones: int) -> bool:
    """Return whether a table has these sizes, and gives the rows of each expert to a device that has it."""
    sizes = [len(row) for row in (*table.experts, *table.shares)]
    if sizes != [own + clones] * 2 * devices or len(table.experts) != devices:
        return False
    for place, (experts, shares) in enumerate(zip(table.experts, table.shares, strict=True)):
        used = [expert for expert in experts if expert != NOTHING]
        if experts[:own] != (*range(place * own, (place + 1) * own),) or len(set(used)) < len(used):
            return False
        pairs = zip(experts, shares, strict=True)
        if not all(
            share >= 0 and NOTHING <= e < devices * own and (share == 0 or e >= 0) for e, share in pairs
        ):
            return False
    return all(sum(table.shares[place][slot] for place, slot in each) for each in table.copies().values())


def balanced_tables(rows: Sequence[int], devices: int, clones: int) -> Iterator[ExpertTable]:
    """Yield tables with ever more clones, each as even as the one before or more so, from none on.

    rows: of each expert. Each clone takes rows from the busiest device to the one with the fewest rows that
    has room, as many as make one of the two even, of the expert of which most are left there.
    """
    own = len(rows) // devices
    table = without_clones(devices, own, clones)
    yield table
    taken: list[dict[int, int]] = [
        {expert: rows[expert] for expert in range(place * own, (place + 1) * own)} for place in range(devices)
    ]
    loads = [sum(each.values()) for each in taken]
    target = -(-sum(rows) // devices)
    while True:
        busy = max(range(devices), key=loads.__getitem__)
        free = [place for place in range(devices) if len(taken[place]) < own + clones]
        idle = min(free, key=loads.__getitem__, default=busy)
        owned = range(busy * own, (busy + 1) * own)
        left = [expert for expert in owned if taken[busy][expert] and expert not in taken[idle]]
        if not left or loads[busy] <= target or loads[idle] >= target:
            return
        expert = max(left, key=taken[busy].__getitem__)
        moved = min(taken[busy][expert], loads[busy] - target, target - loads[idle])
        taken[busy][expert] -= moved
        taken[idle][expert] = moved
        loads[busy] -= moved
        loads[idle] += moved
        yield table_of(taken, own, clones)


def table_of(taken: Sequence[Mapping[int, int]], own: int, clones: int) -> ExpertTable:
    """Return the table of the rows of experts that each device takes. An expert without rows stays."""
    experts, shares = [], []
    for place, rows in enumerate(taken):
        owned = range(place * own, (place + 1) * own)
        cloned = [expert for expert in rows if expert not in owned]
        unused = clones - len(cloned)
        experts.append((*owned, *cloned, *[NOTHING] * unused))
        at_home = [rows[e] or int(not any(e in other and other[e] for other in taken)) for e in owned]
        shares.append((*at_home, *(rows[e] for e in cloned), *[0] * unused))
    return ExpertTable(experts=tuple(experts), shares=tuple(shares))
