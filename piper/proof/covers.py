"""Which samples a value holds, on all devices of a program at once.

The samples are cut into cells. A cover says for each device of one program which cells its value holds, as
segments (from, to, how often). Where experts are sharded, share `s` of them works on cells of its own range,
`s * cells` further on, so that the rows of one sample at two shares are two different symbols. Where
devices share their samples, each shard has a range of its own too, as long as all shares together.

Covers are interned, and everything worked out about them is worked out once: a step on a thousand
microbatches uses the same few. So the devices of a program are walked a few times for each communicator, and
never for an instruction.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from piper.ir.devices import Devices
from piper.ir.mesh import Axis
from piper.plan.plan import Plans
from piper.proof.specification import Numbering, shard_number

Segment = tuple[int, int, int]  # from cell, to cell, how often
Cells = tuple[Segment, ...]  # on one device, in order and without overlap
Cover = int  # the number of an interned cover
Contributor = tuple[int, Cover]  # a program, and a cover of its devices
P = ParamSpec("P")
R = TypeVar("R")


def once(method: Callable[Concatenate[Any, P], R]) -> "cached_property[Callable[P, R]]":
    """Keep the results of a method by its arguments, as long as its object lives."""
    return cached_property(lambda owner: cast("Callable[P, R]", cache(partial(method, owner))))


class Covers:
    """Interns covers, and works out those of sets of devices, slices, pieces and sums."""

    def __init__(self, plans: Plans, cells: int, shares: int = 1) -> None:
        self.plans, self.cells, self.shares = plans, cells, shares
        self.where = {
            device: (number, place)
            for number, plan in enumerate(plans)
            for place, device in enumerate(plan.devices)
        }
        self._covers: list[tuple[Cells, ...]] = []
        self._numbers: dict[tuple[Cells, ...], Cover] = {}

    def on_devices(self, cover: Cover) -> tuple[Cells, ...]:
        """Return the cells that each device of the program holds."""
        return self._covers[cover]

    @once
    def of_set(
        self,
        program: int,
        devices: Devices,
        shared: int = 1,
        numbered: Numbering = (),
        experts: Axis | None = None,
    ) -> Cover | None:
        """Return the slices that a program's devices have as members of a set. None: a device is no member.

        `shared`: so many devices share their samples; `numbered`: the shards they hold, where values differ.
        `experts`: the axis over which experts are sharded; each works on all rows of its group.
        """
        position = {device: i for i, device in enumerate(devices)}
        members = [position.get(device, -1) for device in self.plans.plans[program].devices]
        slices = len(devices) // shared if shared > 0 else 0
        degree = max(1, experts.stride * experts.degree // max(1, shared)) if experts is not None else 1
        even = slices > 0 and slices * shared == len(devices) and slices % degree == 0
        if not even or min(members) < 0 or self.cells % slices:
            return None
        each = self.cells // slices * degree
        cells: list[Cells] = []
        for member in members:
            group, share = member // shared // degree, experts.coordinate(member) if experts else 0
            shard = shard_number(member, numbered)
            start = (shard * self.shares + share) * self.cells + group * each
            cells.append(((start, start + each, 1),))
        return self._intern(tuple(cells))

    @once
    def own_share(
        self,
        program: int,
        devices: Devices,
        experts: Axis | None,
        own: Numbering = (),
        summed: Numbering = (),
        every_share: bool = False,
    ) -> Cover:
        """Return the cover of all cells at each device's own share of the experts and its own place.

        `own`: axes along which a device has its own place alone; `summed`: those with all places together.
        `every_share`: at all shares of the experts instead.
        """
        position = {device: i for i, device in enumerate(devices)}
        places = [0]
        for axis, worth in summed:
            places = [place + i * worth for place in places for i in range(axis.degree)]

        @cache  # few devices differ in both
        def cells(shard: int, share: int) -> Cells:
            shares = range(experts.degree) if every_share and experts is not None else (share,)
            starts = ((shard + place) * self.shares + each for place in places for each in shares)
            return _overlaid([(start * self.cells, (start + 1) * self.cells, 1) for start in starts])

        here = [position[device] for device in self.plans.plans[program].devices]
        at_experts = [experts.coordinate(place) if experts is not None else 0 for place in here]
        shards = [shard_number(place, own) for place in here]
        return self._intern(tuple(map(cells, shards, at_experts)))

    @once
    def cut(self, cover: Cover, start: int, stop: int, of: int) -> Cover | None:
        """Return the cover of some rows. None: they are not whole cells of one slice."""
        return self._if_whole([_cut(cells, start, stop, of) for cells in self._covers[cover]])

    @once
    def joined(self, covers: tuple[Cover, ...]) -> Cover | None:
        """Return the cover of consecutive pieces. None: a piece does not begin where the one before ends."""
        return self._if_whole(
            [_joined(pieces) for pieces in zip(*(self._covers[c] for c in covers), strict=True)]
        )

    def _if_whole(self, pieces: Sequence[Cells | None]) -> Cover | None:
        """Return the cover of what each device holds. None: one of them holds nothing whole."""
        whole = tuple(cells for cells in pieces if cells is not None)
        return self._intern(whole) if len(whole) == len(pieces) else None

    @once
    def senders(self, comm: str, program: int) -> tuple[tuple[int, int], ...]:
        """Return for each device of a program the program and the place of the device it receives from."""
        sender = {target: source for source, target in reversed(self.plans.comms[comm].groups)}
        return tuple(self.where[sender[device]] for device in self.plans.plans[program].devices)

    @once
    def sending_programs(self, comm: str, program: int) -> tuple[int, ...]:
        """Return the programs that a program receives from."""
        return tuple(dict.fromkeys(sender for sender, _ in self.senders(comm, program)))

    @once
    def received(self, comm: str, program: int, sent: tuple[Contributor, ...]) -> Cover:
        """Return the cover of what a program receives, given the cover of what each sender sends."""
        given = dict(sent)
        return self._intern(tuple(self._covers[given[p]][place] for p, place in self.senders(comm, program)))

    @once
    def summed(
        self, comm: str, given: tuple[Contributor, ...], programs: tuple[int, ...]
    ) -> dict[int, Cover]:
        """Return for each program the cover of a sum over each group, of what its members contribute."""
        groups: dict[int, list[Segment]] = {}
        group_of = self.group_of(comm)
        plans = self.plans.plans
        for program, cover in given:
            for device, cells in zip(plans[program].devices, self._covers[cover], strict=True):
                groups.setdefault(group_of[device], []).extend(cells)
        sums = {group: _overlaid(segments) for group, segments in groups.items()}
        return {p: self._intern(tuple(sums.get(group_of[d], ()) for d in plans[p].devices)) for p in programs}

    @once
    def group_of(self, comm: str) -> dict[int, int]:
        """Return the number of the group that each device of a communicator is in."""
        numbers: dict[int, int] = {}
        for number, group in enumerate(self.plans.comms[comm].groups):
            for device in group:
                numbers.setdefault(device, number)
        return numbers

    def _intern(self, cells: tuple[Cells, ...]) -> Cover:
        number = self._numbers.get(cells)
        if number is None:
            number = self._numbers[cells] = len(self._covers)
            self._covers.append(cells)
        return number


def _cut(cells: Cells, start: int, stop: int, of: int) -> Cells | None:
    """Return some rows of one slice. None: the rows cut a cell, or there are several slices."""
    if len(cells) != 1 or not 0 <= start < stop <= of:
        return None
    low, high, count = cells[0]
    if (high - low) % of or count != 1:
        return None
    each = (high - low) // of
    return ((low + start * each, low + stop * each, 1),)


def _joined(pieces: Iterable[Cells]) -> Cells | None:
    """Return neighbouring slices as one. None: they are not neighbours in this order."""
    segments = [segment for piece in pieces for segment in piece]
    follows = all(a[1] == b[0] and a[2] == b[2] for a, b in pairwise(segments))
    return ((segments[0][0], segments[-1][1], segments[0][2]),) if follows else None


def _overlaid(segments: list[Segment]) -> Cells:
    """Return the sum of segments: the number of times that each cell is in them."""
    changes: dict[int, int] = {}
    for low, high, count in segments:
        changes[low] = changes.get(low, 0) + count
        changes[high] = changes.get(high, 0) - count
    levels: list[Segment] = []
    level = 0
    for low, high in pairwise(sorted(changes)):
        level += changes[low]
        if level and levels and levels[-1][1] == low and levels[-1][2] == level:
            levels[-1] = (levels[-1][0], high, level)
        elif level:
            levels.append((low, high, level))
    return tuple(levels)
