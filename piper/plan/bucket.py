"""Buckets: parameters that live, travel and are updated together, and which devices have which shard."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Literal

from piper.ir.devices import Devices
from piper.ir.dtypes import MixedPrecision
from piper.ir.grouping import grouped
from piper.ir.ids import SlotId, SlotKind
from piper.ir.sharding import whole_sizes
from piper.plan.updates import Ownership, Piece

Extent = Literal["whole", "held", "owned"]
# ^ of a bucket on a device: all of it, the shard of parameters that it holds between uses, what it updates

MEMORY = attrgetter(  # what says what each device has of a bucket, and not what a program does with it
    *("devices", "groups", "inside", "across", "slices", "dtype", "reduced_as", "gathered_as"),
    *("zero", "bounds", "clones", "pieces"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCollective:
    """A collective in groups of a bucket's devices: which elements each member gives, and which it gets."""

    groups: tuple[Devices, ...]
    gives: Extent
    gets: Extent
    among: str = ""  # in words, where it is not among replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that live, travel and are updated together, and which devices hold, sum and update what.

    With zero > 0 each member of a group owns an equal shard of the flat, padded bucket. With `bounds` a shard
    holds whole parameters, for an optimizer that needs them so. `reductions`, `gather_for_use` and
    `gather_updated` say which devices communicate, `owned` and `held` what each has, and `update` what each
    updates.

    With `clones` a device holds its own experts, and for a step also copies of experts of other devices that
    lie `inside` the same group. `gather_for_use` sends them, and the first of `reductions` sends their
    gradients back to be summed. Both move whole experts: those that an `ExpertTable` names.

    With `slices` a device computes with slices of parameters, and updates some of them in full.
    """

    name: str
    devices: Devices
    groups: tuple[Devices, ...]  # devices that share the update of their elements, or update the same
    chunks: tuple[str, ...]  # the chunks that read it
    dtype: str
    itemsize: int
    zero: int = 0
    trainable: bool = True
    copies: int = 1  # how many devices hold each element of the gradient that is clipped and applied
    siblings: tuple[str, ...] = ()  # the other buckets of a tied parameter
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    reduced_as: str = ""  # the type its gradients travel in between replicas; empty: that of their sum
    keep: bool = False  # its gathered parameters and whole gradients stay until their last use in the step
    gathered_as: str = ""  # "fp8": rounded row by row when its shards are gathered; empty: as it is
    origin: tuple[int, ...] = ()  # the directives that made it so
    inside: tuple[Devices, ...] = ()  # groups that gather parameters, where `groups` share only their updates
    across: tuple[Devices, ...] = ()  # devices of different groups that sum their shards: replicas of groups
    bounds: tuple[int, ...] = ()  # where each shard begins, and the end, in elements. Empty: equal shards
    clones: int = 0  # experts of other devices that each device has room for
    slices: tuple[Devices, ...] = ()  # devices that have the slices of the same parameters, in groups of
    # which each member updates some in full: `bounds` cuts each shard for them. Empty: they update slices
    pieces: tuple[Piece, ...]

    @property
    def parts(self) -> int:
        """Return into how many parts, with an owner each, the shard of parameters on a device is cut."""
        if self.clones:
            return self.group_size
        return self.group_size // len(self.inside[0]) if self.inside else 1

    @property
    def owners(self) -> tuple[Devices, ...]:
        """Return the devices that hold the same shard of parameters and update a part of it each."""
        starts = range(0, self.group_size, self.parts)
        return tuple(group[start : start + self.parts] for group in self.groups for start in starts)

    @property
    def reductions(self) -> tuple[ShardCollective, ...]:
        """Return how gradients become what each device applies: a first sum after each run of backwards."""
        # The others follow the last run of a step.
        if self.group_size == 1 and not self.clones:
            return ()
        if not self.zero:
            return (ShardCollective(groups=self.groups, gives="whole", gets="whole"),)
        shard: Extent = "held" if self.parts > 1 else "owned"
        steps = [ShardCollective(groups=self.inside or self.groups, gives="whole", gets=shard)]
        if self.parts > 1:
            steps.append(ShardCollective(groups=self.owners, gives="held", gets="owned", among="over owners"))
        if self.across:
            steps.append(
                ShardCollective(groups=self.across, gives="owned", gets="owned", among="across groups")
            )
        return tuple(steps)

    @property
    def gather_for_use(self) -> ShardCollective | None:
        """Return which devices gather parameters before chunks read them. None: every device has them."""
        if self.zero < 3:
            return None
        return ShardCollective(groups=self.inside or self.groups, gives="held", gets="whole")

    @property
    def gather_updated(self) -> ShardCollective | None:
        """Return which devices gather what each has updated. None: a device updates all that it holds."""
        if self.parts > 1:
            return ShardCollective(groups=self.owners, gives="owned", gets="held", among="over owners")
        return ShardCollective(groups=self.groups, gives="owned", gets="whole") if 0 < self.zero < 3 else None

    @property
    def update(self) -> "Bucket":
        """Return the bucket as its optimizer sees it: what its devices have, or some parameters in full.

        Each parameter that is updated in full has an owner among the devices of a group of ZeRO that have
        slices of it. `owned`: what a device updates, and has the optimizer's state for.
        """
        if not self.slices:
            return self
        count = self.slice_count
        having = {device: group for group in self.slices for device in group}
        first = [group for group in self.groups if having[group[0]][0] == group[0]]
        joint = tuple(tuple(each for device in group for each in having[device]) for group in first)
        pieces = (
            replace(p, shape=whole_sizes(p.shape, p.shardings), offset=p.offset * count, shardings=())
            for p in self.pieces
        )
        return replace(
            self,
            groups=joint if self.zero else self.slices,
            zero=max(1, self.zero),
            pieces=tuple(pieces),
            bounds=tuple(bound * count for bound in self.bounds),
            slices=(),
        )

    @property
    def ownership(self) -> Ownership:
        """Return who updates which elements."""
        shardings = tuple(sharding for piece in self.pieces for sharding in piece.shardings)
        return Ownership(
            devices=self.devices, groups=self.groups, sharded=bool(self.zero), shardings=shardings
        )

    @property
    def distinct(self) -> tuple[Devices, ...]:
        """Return the devices that update different elements, in a group for each slice of the parameters."""
        owners = self.ownership.owners().items()
        return tuple(map(tuple, grouped((cut, devices[0]) for (cut, _), devices in owners).values()))

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @property
    def own_numel(self) -> int:
        """Return the elements of its parameters, without copies of those of other devices."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def padded(self) -> int:
        """Return the elements of the flat bucket, padded to divide evenly among its group."""
        if self.bounds:
            return self.own_numel
        return -(-self.own_numel // self.group_size) * self.group_size

    def rank(self, device: int) -> int:
        """Return the place of a device in its group."""
        return next(group for group in self.groups if device in group).index(device)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return where the shard of a member of a group begins and ends in the flat bucket."""
        if shards := self.shards:
            return shards[rank], shards[rank + 1]
        length = self.padded // self.group_size
        return rank * length, (rank + 1) * length

    def owned(self, device: int) -> tuple[int, int]:
        """Return where the shard of a device begins and ends in the flat bucket. Without ZeRO it is all."""
        return self.shard(self.rank(device)) if self.zero else (0, self.own_numel)

    def owner(self, piece: Piece) -> int:
        """Return the member of a group whose shard a parameter begins in."""
        return next(rank for rank in range(self.group_size) if piece.offset < self.shard(rank)[1])

    def pieces_in(self, low: int, high: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield the parameters that lie between two elements, each with where that begins and ends."""
        for piece in self.pieces:
            start, stop = max(piece.offset, low), min(piece.offset + piece.numel, high)
            if start < stop:
                yield piece, start, stop

    @property
    def shards(self) -> tuple[int, ...]:
        """Return where the shard of each member of a group begins, and the end. Empty: they are equal."""
        return self.bounds[:: self.slice_count]

    @property
    def slice_count(self) -> int:
        """Return how many devices have slices of the same parameters, and update some of them in full."""
        return len(self.slices[0]) if self.slices else 1

    def slice_sizes(self, device: int) -> list[int]:
        """Return how much a device has of what each device with other slices updates in full, in elements."""
        first = self.rank(device) * self.slice_count if self.zero else 0
        own = self.bounds[first : first + self.slice_count + 1]
        return [stop - start for start, stop in pairwise(own)]

    @property
    def applied(self) -> SlotId:
        """Return the slot of the gradient that an update applies."""
        return SlotId("grad_full", self.name) if self.slices else self.gradient()

    def gradient(self, extent: Extent = "owned") -> SlotId:
        """Return the slot of its gradient on a device: the sum of what it owns, or one before it."""
        kinds: Mapping[Extent, SlotKind] = {
            "whole": "grad",
            "held": "grad_inside",
            "owned": "grad_shard" if self.zero else "grad",
        }
        return SlotId(kinds[extent], self.name)

    def elements(self, extent: Extent = "owned") -> int:
        """Return the most elements that a device has: all, the shard that it holds, or what it updates."""
        if not self.zero or extent == "whole":
            return self.padded if self.zero and not self.clones else self.numel
        parts = self.parts if extent == "held" else 1
        if not self.bounds:
            return self.padded // self.group_size * parts
        return max(stop - start for start, stop in pairwise(self.shards[::parts]))

    def cloned(self, how: ShardCollective) -> int:
        """Return the elements of clones that a device gets or gives in a collective. 0: it moves shards."""
        return self.numel - self.own_numel if "whole" in (how.gives, how.gets) else 0

    def sizes(self, how: ShardCollective, device: int) -> list[int]:
        """Return the elements of the shard that each device of a group has which takes part with one."""
        count = len(how.groups[0])
        first = self.rank(device) // count * count
        if "owned" in (how.gives, how.gets):
            ranges = [self.shard(rank) for rank in range(first, first + count)]
        else:
            ranges = [self.gathered(rank) for rank in range(count)]
        return [stop - start for start, stop in ranges]

    def held(self, device: int) -> tuple[int, int]:
        """Return where what a device holds of the parameters between uses begins and ends."""
        if self.zero < 3:
            return 0, self.elements("whole")
        return self.gathered(self.rank(device) // self.parts)

    def gathered(self, rank: int) -> tuple[int, int]:
        """Return where the shard that a member of a group gives to `gather_for_use` begins and ends."""
        return self.shard(rank * self.parts)[0], self.shard((rank + 1) * self.parts - 1)[1]

    @property
    def ways(self) -> int:
        """Return how many groups hold different slices, or the same slice of which they compute the same."""
        return len(self.groups) // (len(self.across[0]) if self.across else 1)

    def family(self, buckets: "Mapping[str, Bucket]") -> "list[Bucket]":
        """Return all buckets of a tied parameter, this one first."""
        return [self, *(buckets[name] for name in self.siblings)]

    @property
    def travels(self) -> bool:
        """Return whether this bucket's gradient is sent to other devices, for which it is contiguous."""
        return self.group_size > 1 or bool(self.siblings or self.slices)

    @property
    def numel(self) -> int:
        """Return the elements that chunks read, and give gradients of: those of clones too."""
        if not self.clones:
            return self.own_numel
        return self.own_numel // self.experts * (self.experts + self.clones)

    @property
    def experts(self) -> int:
        """Return the experts that a device holds, where there are clones."""
        return self.pieces[0].shape[0]

    @property
    def table_sizes(self) -> tuple[int, int, int]:
        """Return the devices of a table of its experts, the experts of each, and its slots for clones."""
        return len(self.inside[0]), self.experts, self.clones

    def lies_as(self, other: "Bucket") -> bool:
        """Return whether a bucket of another program has the same parameters in the same memory."""
        return MEMORY(self) == MEMORY(other)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole bucket, as a device holds it when gathered."""
        return self.elements("whole") * self.itemsize

    @property
    def held_nbytes(self) -> int:
        """Return the bytes of parameters that a device holds between uses."""
        return self.elements("held" if self.gather_for_use else "whole") * self.itemsize

    def kept_nbytes(self, state_bytes: int) -> int:
        """Return the bytes that a device keeps to update it: the optimizer's state, and a master copy."""
        return self.update.elements() * self.kept_itemsize(state_bytes) if self.trainable else 0

    def kept_itemsize(self, state_bytes: int) -> int:
        """Return the bytes that are kept to update an element. state_bytes: those of the optimizer."""
        master = self.precision.sum_itemsize if self.has_master else 0
        return state_bytes + (self.precision.master_bytes if self.splits else master)

    @property
    def precision(self) -> MixedPrecision:
        """Return the types of its parameters, of their gradients and of their master copies."""
        return MixedPrecision(dtype=self.dtype, reduced_as=self.reduced_as, gathered_as=self.gathered_as)

    @property
    def splits(self) -> bool:
        """Return whether a device keeps what rounding leaves of its parameters, in place of a master copy."""
        return self.trainable and self.precision.splits and not self.slices

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer trains a copy of its parameters: in a longer type, or in full."""
        return self.trainable and not self.splits and (self.precision.has_master or bool(self.slices))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Neighbouring elements of a bucket: some whole rows, or a part of one, which other shards hold too."""

    start: int
    stop: int
    row: int  # the first one, counted over all matrices of the bucket
    count: int


def runs_of_rows(bucket: Bucket, start: int, stop: int) -> Iterator[RowRun]:
    """Yield the rows between two elements of a flat bucket. What pads its end belongs to no row."""
    before = 0
    for piece in bucket.pieces:
        rows, width = piece.shape
        low, high = max(piece.offset, start), min(piece.offset + piece.numel, stop)
        while low < high:
            row, column = divmod(low - piece.offset, width)
            count = 1 if column else max(1, (high - low) // width)
            end = min(high, low - column + count * width)
            yield RowRun(start=low, stop=end, row=before + row, count=count)
            low = end
        before += rows


def rows_of_shards(bucket: Bucket) -> list[tuple[int, int]]:
    """Return the first row of each shard that is gathered and the one after its last."""
    rows = []
    for rank in range(bucket.group_size // bucket.parts):
        runs = list(runs_of_rows(bucket, *bucket.gathered(rank)))
        rows.append((runs[0].row, runs[-1].row + runs[-1].count) if runs else (0, 0))
    return rows


def gathered_nbytes(bucket: Bucket) -> int:
    """Return the bytes of a whole bucket as it is gathered: in fp8 its elements, and a scale for each row."""
    if not bucket.gathered_as:
        return bucket.nbytes
    rows = rows_of_shards(bucket)
    most = max(last - first for first, last in rows)
    return bucket.padded + len(rows) * most * max(4, bucket.itemsize)
