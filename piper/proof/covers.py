"""Which samples a value holds, on all devices of a program at once.

The samples are cut into cells. A cover says for each device of one program which cells its value holds, as
segments (from, to, how often). Where experts are sharded, share `s` of them works on cells of its own range,
`s * cells` further on, so that the rows of one sample at two shares are two different symbols. Where
devices share their samples, each shard has a range of its own too, as long as all shares together.

Covers are interned, and everything worked out about them is worked out once: a step on a thousand
microbatches uses the same few. So the devices of a program are walked a few times for each communicator, and
never for an instruction.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from piper.ir.devices import Devices
from piper.ir.mesh import Axis
from piper.plan.plan import Comm, Plans
from piper.proof.meshes import Numbering, shard_number

Segment = tuple[int, int, int]  # from cell, to cell, how often
Held = tuple[Segment, ...]  # on one device, in order and without overlap
Cover = int  # the number of an interned cover
Contributor = tuple[int, Cover]  # a program, and a cover of its devices


class Covers:
    """Interns covers, and works out those of sets of devices, slices, pieces and sums."""

    def __init__(self, plans: Plans, cells: int, shares: int = 1) -> None:
        self.plans, self.cells, self.shares = plans, cells, shares
        self.where = {
            device: (number, place)
            for number, plan in enumerate(plans)
            for place, device in enumerate(plan.devices)
        }
        self._held: list[tuple[Held, ...]] = []
        self._numbers: dict[tuple[Held, ...], Cover] = {}
        self._sets: dict[tuple[int, Devices, int, int, Numbering], Cover | None] = {}
        self._complete: dict[tuple[int, Devices, int, int, Numbering, Numbering, bool], Cover] = {}
        self._cuts: dict[tuple[Cover, int, int, int], Cover | None] = {}
        self._joins: dict[tuple[Cover, ...], Cover | None] = {}
        self._sums: dict[tuple[str, tuple[Contributor, ...]], dict[int, Cover]] = {}
        self._received: dict[tuple[str, int, tuple[Contributor, ...]], Cover] = {}
        self._groups: dict[str, dict[int, int]] = {}
        self._sending: dict[tuple[str, int], tuple[int, ...]] = {}
        self._senders: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}

    def held(self, cover: Cover) -> tuple[Held, ...]:
        """Return the cells that each device of the program holds."""
        return self._held[cover]

    def of_set(
        self, program: int, devices: Devices, degree: int = 1, shared: int = 1, numbered: Numbering = ()
    ) -> Cover | None:
        """Return the slices that a program's devices have as members of a set. None: a device is no member.

        `degree`: experts are sharded over groups of so many slices; each works on all rows of its group.
        `shared`: so many devices share their samples; `numbered`: the shards they hold, where values differ.
        """
        key = (program, devices, degree, shared, numbered)
        if key not in self._sets:
            position = {device: i for i, device in enumerate(devices)}
            members = [position.get(device, -1) for device in self.plans.plans[program].devices]
            slices = len(devices) // shared if shared > 0 else 0
            even = slices > 0 and slices * shared == len(devices) and slices % degree == 0
            inside = even and min(members) >= 0 and self.cells % slices == 0
            self._sets[key] = (
                self._intern(tuple(self._of_member(i, slices, degree, shared, numbered) for i in members))
                if inside
                else None
            )
        return self._sets[key]

    def _of_member(self, position: int, slices: int, degree: int, shared: int, numbered: Numbering) -> Held:
        each = self.cells // slices * degree
        group, share = divmod(position // shared, degree)
        return self._slice(shard_number(position, numbered), share, group * each, each)

    def _slice(self, shard: int, share: int, first: int, count: int) -> Held:
        start = (shard * self.shares + share) * self.cells + first
        return ((start, start + count, 1),)

    def everything(self, program: int, shares: int = 1) -> Cover:
        """Return the cover of all cells, at every share of the experts, on each device."""
        held = ((0, shares * self.cells, 1),)
        return self._intern((held,) * len(self.plans.plans[program].devices))

    def own_share(
        self,
        program: int,
        devices: Devices,
        degree: int,
        shared: int = 1,
        own: Numbering = (),
        summed: Numbering = (),
        every_share: bool = False,
    ) -> Cover:
        """Return the cover of all cells at each device's own share of the experts and its own place.

        `own`: axes along which a device has its own place alone; `summed`: those with all places together.
        `every_share`: at all shares of the experts instead.
        """
        key = (program, devices, degree, shared, own, summed, every_share)
        if key not in self._complete:
            position = {device: i for i, device in enumerate(devices)}
            places = [0]
            for axis, worth in summed:
                places = [place + i * worth for place in places for i in range(axis.degree)]
            cells: list[Held] = []
            for device in self.plans.plans[program].devices:
                here = position[device]
                shares = (
                    range(degree) if every_share else (Axis(degree=degree, stride=shared).coordinate(here),)
                )
                shards = [shard_number(here, own) + place for place in places]
                pieces = [self._slice(shard, share, 0, self.cells) for shard in shards for share in shares]
                cells.append(_overlaid([piece for held in pieces for piece in held]))
            self._complete[key] = self._intern(tuple(cells))
        return self._complete[key]

    def cut(self, cover: Cover, start: int, stop: int, of: int) -> Cover | None:
        """Return the cover of some rows. None: they are not whole cells of one slice."""
        key = (cover, start, stop, of)
        if key not in self._cuts:
            pieces = [_cut(cells, start, stop, of) for cells in self._held[cover]]
            whole = tuple(cells for cells in pieces if cells is not None)
            self._cuts[key] = self._intern(whole) if len(whole) == len(pieces) else None
        return self._cuts[key]

    def joined(self, covers: tuple[Cover, ...]) -> Cover | None:
        """Return the cover of consecutive pieces. None: a piece does not begin where the one before ends."""
        if covers not in self._joins:
            joins = [_joined(pieces) for pieces in zip(*(self._held[c] for c in covers), strict=True)]
            whole = tuple(cells for cells in joins if cells is not None)
            self._joins[covers] = self._intern(whole) if len(whole) == len(joins) else None
        return self._joins[covers]

    def senders(self, comm: Comm, program: int) -> tuple[tuple[int, int], ...]:
        """Return for each device of a program the program and the place of the device it receives from."""
        key = (comm.name, program)
        if key not in self._senders:
            sender = {target: source for source, target in reversed(comm.groups)}
            devices = self.plans.plans[program].devices
            self._senders[key] = tuple(self.where[sender[device]] for device in devices)
        return self._senders[key]

    def sending_programs(self, comm: Comm, program: int) -> tuple[int, ...]:
        """Return the programs that a program receives from."""
        key = (comm.name, program)
        if key not in self._sending:
            self._sending[key] = tuple(dict.fromkeys(sender for sender, _ in self.senders(comm, program)))
        return self._sending[key]

    def received(self, comm: Comm, program: int, sent: tuple[Contributor, ...]) -> Cover:
        """Return the cover of what a program receives, given the cover of what each sender sends."""
        key = (comm.name, program, sent)
        if key not in self._received:
            by_program = dict(sent)
            cells = [self._held[by_program[p]][place] for p, place in self.senders(comm, program)]
            self._received[key] = self._intern(tuple(cells))
        return self._received[key]

    def summed(self, comm: Comm, given: tuple[Contributor, ...], programs: Sequence[int]) -> dict[int, Cover]:
        """Return for each program the cover of a sum over each group, of what its members contribute."""
        key = (comm.name, given)
        if key not in self._sums:
            groups: dict[int, list[Segment]] = {}
            group_of = self.group_of(comm)
            for program, cover in given:
                for device, held in zip(self.plans.plans[program].devices, self._held[cover], strict=True):
                    groups.setdefault(group_of[device], []).extend(held)
            sums = {group: _overlaid(segments) for group, segments in groups.items()}
            self._sums[key] = {
                program: self._intern(
                    tuple(sums.get(group_of[device], ()) for device in self.plans.plans[program].devices)
                )
                for program in programs
            }
        return self._sums[key]

    def group_of(self, comm: Comm) -> dict[int, int]:
        """Return the number of the group that each device of a communicator is in."""
        if comm.name not in self._groups:
            numbers: dict[int, int] = {}
            for number, group in enumerate(comm.groups):
                for device in group:
                    numbers.setdefault(device, number)
            self._groups[comm.name] = numbers
        return self._groups[comm.name]

    def _intern(self, held: tuple[Held, ...]) -> Cover:
        number = self._numbers.get(held)
        if number is None:
            number = self._numbers[held] = len(self._held)
            self._held.append(held)
        return number


def _cut(held: Held, start: int, stop: int, of: int) -> Held | None:
    """Return some rows of one slice. None: the rows cut a cell, or there are several slices."""
    if len(held) != 1 or not 0 <= start < stop <= of:
        return None
    low, high, count = held[0]
    if (high - low) % of or count != 1:
        return None
    each = (high - low) // of
    return ((low + start * each, low + stop * each, 1),)


def _joined(pieces: Iterable[Held]) -> Held | None:
    """Return neighbouring slices as one. None: they are not neighbours in this order."""
    segments = [segment for held in pieces for segment in held]
    follows = all(a[1] == b[0] and a[2] == b[2] for a, b in pairwise(segments))
    return ((segments[0][0], segments[-1][1], segments[0][2]),) if follows else None


def _overlaid(segments: list[Segment]) -> Held:
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
