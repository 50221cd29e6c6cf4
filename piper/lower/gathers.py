"""ZeRO-3: gathers parameters before each run of uses and frees them after it, also between microbatches."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from piper.ir.devices import Devices
from piper.ir.ids import SlotId
from piper.ir.node import Compute, Gather, Node
from piper.lower.buckets import param_slot
from piper.lower.sequence import UseRun, computes_by_set, meetings, runs, same_members, woven
from piper.lower.state import LoweringState
from piper.plan.plan import Bucket, Slot
from piper.plan.weight_rows import gathered_nbytes


def add_gathers(work: LoweringState) -> LoweringState:
    """Gather a sharded bucket for every run of neighbouring uses, one compute node ahead of it or two.

    F[PP=0]  B[PP=1]  B[PP=0]
    -->
    gather PP=0, F[PP=0], gather PP=1, B[PP=1], gather PP=0, B[PP=0]      (each one node earlier, to overlap)
    """
    sharded = [bucket for bucket in work.buckets.values() if bucket.zero == 3]
    if not sharded:
        return work
    sequence = list(work.sequence)
    slots = {param_slot(bucket): bucket.name for bucket in sharded}
    users: dict[str, dict[Devices, None]] = {bucket.name: {} for bucket in sharded}
    readers: dict[str, set[int]] = {bucket.name: set() for bucket in sharded}  # by their places
    for place, node in enumerate(sequence):
        for value in node.reads:
            if value in slots:
                users[slots[value]][node.devices] = None
                readers[slots[value]].add(place)
    places = computes_by_set(sequence, {devices for sets in users.values() for devices in sets})
    reads_shards = {
        devices: [not slots.keys().isdisjoint(sequence[place].reads) for place in found]
        for devices, found in places.items()
    }
    before: dict[int, list[Node]] = {}
    values = dict(work.values)
    renamed: dict[int, dict[SlotId, SlotId]] = {}
    for bucket in sharded:
        arriving = gathered_nbytes(bucket) if bucket.gathered_as else 0  # held until it is made wide
        values[whole(bucket)] = Slot(nbytes=bucket.nbytes + arriving)
        found = [
            run
            for alike in same_members(users[bucket.name])
            for run in uses(readers[bucket.name], sequence, alike, places[alike[0]], reads_shards[alike[0]])
        ]
        for met in meetings(found, lambda run: run.places[0], places):
            first = sequence[met[0].places[0]]
            assert isinstance(first, Compute), "computes use parameters"
            slot = whole(bucket).of_run(first.run)
            gather = Gather(
                bucket=bucket.name,
                run=first.run,
                devices=bucket.devices,
                reads=(param_slot(bucket),),
                writes=(slot,),
                stream=bucket.gather_stream,
                origin=bucket.origin,
            )
            before.setdefault(min(run.beside for run in met), []).append(gather)
            for place in (place for run in met for place in run.places):
                renamed.setdefault(place, {})[param_slot(bucket)] = slot
    for place, names in renamed.items():
        node = sequence[place]
        sequence[place] = replace(node, reads=tuple(names.get(value, value) for value in node.reads))
    return replace(work, sequence=woven(sequence, before, {}), values=values)


def sharded_parameters_are_gathered(work: LoweringState) -> Iterator[str]:
    """Yield each compute node that reads a shard where it needs the whole bucket."""
    shards = {param_slot(bucket) for bucket in work.buckets.values() if bucket.zero == 3}
    for node in work.sequence:
        if isinstance(node, Compute):
            for value in node.reads:
                if value in shards:
                    yield f"{node.name} reads the shard {value}"


def ahead_of(use: int, reads_shards: Sequence[bool]) -> int:
    """Return the compute node that a gather may overlap: the one before the use, or two before.

    It is two before where the one before reads no gathered parameters. So at most two chunks are gathered at
    a time: one in use, and one prefetched.
    """
    before = max(0, use - 1)
    return before if reads_shards[before] else max(0, before - 1)


def whole(bucket: Bucket) -> SlotId:
    """Return the slot of a bucket's gathered parameters."""
    return SlotId("whole", bucket.name)


def uses(
    readers: Collection[int],
    sequence: list[Node],
    alike: list[Devices],
    places: list[int],
    reads_shards: Sequence[bool],
) -> Iterator[UseRun]:
    """Yield the runs of neighbouring compute nodes on the same devices that read a bucket.

    A weight-gradient node (BW) does not read parameters, so it ends a run. readers: the places of all nodes
    that read it.
    """
    mine = [place in readers and sequence[place].devices in alike for place in places]
    for run in runs(mine):
        yield UseRun(
            devices=alike[0],
            places=tuple(places[use] for use in run),
            beside=places[ahead_of(run[0], reads_shards)],
        )
