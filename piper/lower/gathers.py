"""ZeRO-3: gathers parameters before each run of uses and frees them after it, also between microbatches."""

from collections.abc import Iterator, Sequence

from piper.ir.ids import Pass, SlotId, param_slot
from piper.ir.node import Compute, SlotNode
from piper.lower.state import LoweringState, SequenceEdit, UseRun, computes_by_set, joint_runs, use_runs
from piper.plan.bucket import Bucket, gathered_nbytes
from piper.plan.ops import OfBucket
from piper.plan.plan import Slot


def add_gathers(state: LoweringState) -> LoweringState:
    """Gather a sharded bucket for every run of neighbouring uses, one compute node ahead of it or two.

    A weight-gradient node (BW) does not read parameters, so it ends a run.

    F[PP=0]  B[PP=1]  B[PP=0]
    -->
    gather PP=0, F[PP=0], gather PP=1, B[PP=1], gather PP=0, B[PP=0]      (each one node earlier, to overlap)
    """
    sharded = {param_slot(bucket.name): bucket for bucket in state.buckets.values() if bucket.gather_for_use}
    sequence = state.sequence
    readers: dict[SlotId, list[int]] = {slot: [] for slot in sharded}
    for place, node in enumerate(sequence):
        for value in node.reads:
            if value in sharded:
                readers[value].append(place)
    computes = computes_by_set(
        sequence, {sequence[place].devices for places in readers.values() for place in places}
    )
    reads_shards = {
        devices: [not sharded.keys().isdisjoint(sequence[place].reads) for place in places]
        for devices, places in computes.items()
    }
    regions = {chunk.name: chunk.tags for chunk in state.graph.outline.chunks}
    edit = SequenceEdit(state)
    for shard, bucket in sharded.items():
        arriving = gathered_nbytes(bucket) if bucket.gathered_as else 0  # held until it is made wide
        gathered = SlotId("whole", bucket.name)
        edit.values[gathered] = Slot(nbytes=bucket.nbytes + arriving)
        runs = use_runs(readers[shard], sequence, computes, regions, whole_step=bucket.keep)
        for joint in joint_runs(runs, lambda run: run.computes[run.users[0]]):
            first = sequence[joint[0].places[0]]
            assert isinstance(first, Compute), "buckets are used by compute nodes"
            slot = gathered.of_run(first.run)
            ahead = min(ahead_of(run, reads_shards[run.devices]) for run in joint)
            edit.before(ahead, gather_of(bucket, first.run, slot))
            for place in (place for run in joint for place in run.places):
                edit.rename(place, shard, slot)
    return edit.apply()


def gather_of(bucket: Bucket, run: Pass | None, slot: SlotId) -> SlotNode:
    """Return the gather of a bucket's shards into a slot: for the uses from a pass on, or after an update."""
    how = bucket.gather_for_use if run else bucket.gather_updated
    assert how is not None, "every device has all of it"
    size = len(how.groups[0])
    gathered = gathered_nbytes(bucket) if how.gets == "whole" else bucket.elements(how.gets) * bucket.itemsize
    return SlotNode(
        op="gather",
        name=f"gather[{bucket.name} for {run or 'update'}]",
        devices=bucket.devices,
        groups=how.groups,
        reads=(param_slot(bucket.name),),
        writes=(slot,),
        payload=OfBucket(bucket=bucket.name, run=run),
        nbytes=bucket.cloned(how) * bucket.itemsize or gathered * (size - 1) // size,
        stream=bucket.gather_stream,
        origin=bucket.origin,
    )


def sharded_parameters_are_gathered(state: LoweringState) -> Iterator[str]:
    """Yield each compute node that reads a shard where it needs the whole bucket."""
    shards = {param_slot(bucket.name) for bucket in state.buckets.values() if bucket.gather_for_use}
    for node in state.sequence:
        if isinstance(node, Compute):
            for value in node.reads:
                if value in shards:
                    yield f"{node.name} reads the shard {value}"


def ahead_of(run: UseRun, reads_shards: Sequence[bool]) -> int:
    """Return the place of the compute node that a gather may overlap: the one before the run, or two before.

    It is two before where the one before reads no gathered parameters. So at most two chunks are gathered at
    a time: one in use, and one prefetched.
    """
    before = max(0, run.users[0] - 1)
    return run.computes[before if reads_shards[before] else max(0, before - 1)]
