"""Gradients between backward and update: accumulated, reduced over replicas, summed over tied copies."""

from collections.abc import Iterator, Mapping

from piper.ir.devices import Devices, columns, show
from piper.ir.dtypes import MixedPrecision
from piper.ir.ids import SlotId, Tags
from piper.ir.node import Compute, SlotNode
from piper.lower.state import LoweringState, SequenceEdit, computes_by_set, joint_runs, pass_at, use_runs
from piper.plan.bucket import Bucket
from piper.plan.ops import OfBucket
from piper.plan.plan import Slot

GRADIENTS = ("gradient", "grad")  # slots that backwards write


def add_reductions(state: LoweringState) -> LoweringState:
    """Accumulate each backward's gradients and reduce them: once a step (zero 0, 1) or after each run (2, 3).

    B[PP=0 MB=0]  B[PP=0 MB=1]
    -->
    B[PP=0 MB=0], accumulate, B[PP=0 MB=1], accumulate, reduce

    Compiled backwards that write gradients flat begin the sum and add to it themselves.
    """
    givers = gradient_givers(state)
    edit = SequenceEdit(state)
    sets = {state.sequence[place].devices for given in givers.values() for place in given}
    computes = computes_by_set(state.sequence, sets)
    regions = {chunk.name: chunk.tags for chunk in state.graph.outline.chunks}
    for bucket in state.buckets.values():
        given = givers.get(bucket.name, {})
        if not given:
            continue
        if bucket.zero >= 2:
            reduce_each_run(edit, bucket, given, computes, regions)
        else:
            reduce_once(edit, bucket, given)
    return edit.apply()


def every_gradient_is_reduced(state: LoweringState) -> Iterator[str]:
    """Yield each trained bucket whose gradient is missing, or not summed over replicas, or partly lost."""
    read = {value for node in state.sequence for value in node.reads}
    written = {value for node in state.sequence for value in node.writes}
    reduced = {(node.op, value) for node in state.sequence for value in node.writes}
    gives = gradient_givers(state)
    for bucket in state.buckets.values():
        if bucket.name not in gives:
            continue
        if bucket.gradient() not in written:
            yield f"{bucket.name} has no gradient to apply"
        for step in bucket.reductions:
            op = "reduce_scatter" if step.gives != step.gets else "all_reduce"
            if (op, bucket.gradient(step.gets)) not in reduced:
                yield f"{bucket.name} is never reduced {step.among or 'over replicas'}"
        for value in gives[bucket.name].values():
            if value not in read and value != bucket.gradient():
                yield f"the gradient {value} is lost"


def gradient_givers(state: LoweringState) -> dict[str, dict[int, SlotId]]:
    """Return, for each bucket, the places of the backwards that write its gradient, with their slots."""
    givers: dict[str, dict[int, SlotId]] = {}
    for place, node in enumerate(state.sequence):
        if isinstance(node, Compute) and node.phase in ("B", "BW"):
            for value in node.writes:
                if value.kind in GRADIENTS:
                    givers.setdefault(value.owner, {})[place] = value
    return givers


def writes_flat(state: LoweringState, place: int, value: SlotId) -> bool:
    """Return whether compiled code writes a gradient as one flat tensor, and can add it to one."""
    node = state.sequence[place]
    if value.kind not in GRADIENTS or not isinstance(node, Compute):
        return False
    written = state.graph.chunks[node.chunk].phases[node.phase].in_place
    return any(piece.name in written for piece in state.buckets[value.owner].pieces)


def accumulate(
    edit: SequenceEdit, place: int, value: SlotId, total: SlotId, begun: dict[Devices, bool]
) -> None:
    """Add one backward's gradients to a total, or begin it on the devices that have none yet.

    begun: the sets of devices that have begun it, and whether it is one flat tensor there.
    """
    source = edit.sequence[place]
    older, fresh = begun_on(source.devices, begun)
    if writes_flat(edit.state, place, value):
        if not older:
            begun[source.devices] = True
            edit.rename(place, value, total)
            return
        shared = [flat for devices, flat in begun.items() if not set(devices).isdisjoint(source.devices)]
        if all(shared) and not fresh:
            edit.add_to(place, value, total)
            return
    begun.setdefault(source.devices, True)
    run = pass_at(edit.sequence, place)
    for devices, reads in ((fresh, (value,)), (older, (value, total))):
        if devices:
            # Of sets that overlap, some begin a sum where others add: a tied parameter, or microbatches.
            some = f" @{show(devices)}" if fresh and older else ""
            node = SlotNode(
                op="accumulate",
                name=f"accumulate[{run} into {total}{some}]",
                payload=run,
                devices=devices,
                reads=reads,
                writes=(total,),
                origin=source.origin,
            )
            edit.after(place, node, rank=place)


def begun_on(devices: Devices, begun: Mapping[Devices, bool]) -> tuple[Devices, Devices]:
    """Return those of some devices that have begun a total, and those that have not."""
    if devices in begun:
        return devices, ()
    have = {device for others in begun for device in others}
    if have.isdisjoint(devices):
        return (), devices
    return tuple(d for d in devices if d in have), tuple(d for d in devices if d not in have)


def cast_workspace(precision: MixedPrecision, elements: int) -> int:
    """Return the bytes of the copy of a sum that an all-reduce sends in another type."""
    return elements * precision.travel_itemsize if precision.travel_dtype != precision.sum_dtype else 0


def reduce_gradient(
    edit: SequenceEdit, bucket: Bucket, place: int, value: SlotId, *, again: bool, last: bool, behind: int
) -> None:
    """Reduce the gradient written at a place. A reduce-scatter adds to the shard so far.

    last: no other follows in the step, so the sums are summed over the devices that hold the same.
    behind: the place after which it is issued.
    """
    first, *outer = bucket.reductions
    run, precision = pass_at(edit.sequence, place), bucket.precision
    itemsize = precision.travel_itemsize
    for step in (first, *(outer if last else ())):
        result, size = bucket.gradient(step.gets), len(step.groups[0])
        elements = sent = bucket.elements(step.gives)
        if scatters := step.gives != step.gets:  # each device keeps only its shard of the sum
            kept = bucket.elements(step.gets)
            edit.values[result] = Slot(nbytes=kept * precision.sum_itemsize)
            elements += kept
        given = value if step is first else bucket.gradient(step.gives)
        moved = bucket.cloned(step) * itemsize or sent * itemsize * (size - 1) // size
        node = SlotNode(
            op="reduce_scatter" if scatters else "all_reduce",
            name=f"reduce[{bucket.name}{step.among and ' '}{step.among} after {run}]",
            payload=OfBucket(bucket=bucket.name, run=run),
            devices=bucket.devices,
            groups=step.groups,
            reads=(given, result) if again and step is first else (given,),
            writes=(result,),
            nbytes=moved if scatters else 2 * moved,
            workspace=cast_workspace(precision, elements),
            stream=bucket.reduce_stream if step is first else f"{bucket.reduce_stream}.across",
            origin=bucket.origin,
        )
        edit.after(behind, node, rank=place)


def reduce_once(edit: SequenceEdit, bucket: Bucket, given: dict[int, SlotId]) -> None:
    """Accumulate all gradients on each device, then reduce once."""
    total = bucket.gradient("whole")
    single = len(given) == 1 and not any(writes_flat(edit.state, *giver) for giver in given.items())
    alone = single and not bucket.travels  # a gradient that nothing is added to keeps its type
    each = bucket.itemsize if alone else bucket.precision.sum_itemsize
    edit.values[total] = Slot(nbytes=bucket.numel * each)
    in_place = alone or (not bucket.travels and bucket.precision.sum_dtype == bucket.dtype)
    run = pass_at(edit.sequence, min(given))
    params = edit.state.graph.chunks[run.chunk].phases[run.phase].grad_params
    in_place = in_place and all(piece.name in params for piece in bucket.pieces)
    begun: dict[Devices, bool] = {}
    for place, value in given.items():
        if not begun and in_place:  # the first gradient can be added to as it is
            begun[edit.sequence[place].devices] = writes_flat(edit.state, place, value)
            edit.rename(place, value, total)
        else:
            accumulate(edit, place, value, total, begun)
    if bucket.reductions:
        reduce_gradient(edit, bucket, max(given), total, again=False, last=True, behind=max(given))


def reduce_each_run(
    edit: SequenceEdit,
    bucket: Bucket,
    given: dict[int, SlotId],
    computes: Mapping[Devices, list[int]],
    regions: Mapping[str, Tags],
) -> None:
    """Reduce after each run of backwards, so that no whole gradient outlives its reduction."""
    # The reduction is issued behind one more compute node, which it may overlap: it starts when the run has
    # ended, and the gradient counts as live until that node has ended too.
    runs = use_runs(given, edit.sequence, computes, regions, whole_step=bucket.keep)
    joints = [*joint_runs(runs, lambda run: run.computes[run.users[-1]])]
    for count, joint in enumerate(joints):
        places = [place for run in joint for place in run.places]
        value = given[places[0]]
        if len(places) > 1:
            value = bucket.gradient("whole").of_run(pass_at(edit.sequence, places[0]))
            edit.values[bucket.gradient("whole")] = Slot(nbytes=bucket.numel * bucket.precision.sum_itemsize)
            begun: dict[Devices, bool] = {}
            devices = [device for run in joint for device in run.devices]
            apart = len(joint) > 1 and len(devices) == len(set(devices))  # no two sets share a device
            for run in joint:
                if apart and len(run.places) == 1:  # its gradient is its devices' whole contribution
                    edit.rename(run.places[0], given[run.places[0]], value)
                    continue
                for place in run.places:
                    accumulate(edit, place, given[place], value, begun)
        behind = max(run.computes[min(run.users[-1] + 1, len(run.computes) - 1)] for run in joint)
        last = count == len(joints) - 1
        reduce_gradient(edit, bucket, max(places), value, again=count > 0, last=last, behind=behind)


def add_tied_sums(state: LoweringState) -> LoweringState:
    """Sum the gradients of a tied parameter over the sets of devices that hold a copy of it.

    reduce PP=0's copy     reduce PP=3's copy
    -->
    reduce PP=0's copy, reduce PP=3's copy, reduce both, shard by shard
    """
    edit = SequenceEdit(state)
    done: set[str] = set()
    written = {value for node in state.sequence for value in node.writes}
    for bucket in state.buckets.values():
        if not bucket.siblings or bucket.name in done or not bucket.trainable:
            continue
        family = bucket.family(state.buckets)
        done.update(member.name for member in family)
        slots = [member.gradient() for member in family]
        given = [slot for slot in slots if slot in written]
        if not given:
            continue
        for slot in slots:
            edit.values.setdefault(slot, edit.values[given[0]])
        copies = columns([member.devices for member in family])
        elements = edit.values[given[0]].nbytes // bucket.precision.sum_itemsize
        sent = 2 * elements * bucket.precision.travel_itemsize
        edit.append(
            SlotNode(
                op="all_reduce",
                name=f"reduce[{bucket.name} after tied]",
                payload=OfBucket(bucket=bucket.name),
                devices=tuple(device for column in copies for device in column),
                groups=copies,
                reads=tuple(given),  # a copy that no backward reaches adds nothing, but gets the sum
                writes=tuple(slots),
                nbytes=sent * (len(family) - 1) // len(family),
                workspace=cast_workspace(bucket.precision, elements),
                stream=bucket.reduce_stream,
                origin=tuple(dict.fromkeys(n for member in family for n in member.origin)),
            )
        )
    return edit.apply()


def every_tied_copy_is_summed(state: LoweringState) -> Iterator[str]:
    """Yield each trainable tied parameter whose gradients are not summed over its buckets."""
    sums = [node for node in state.sequence if node.op == "all_reduce" and len(node.writes) > 1]
    summed = {slot for node in sums for slot in node.writes}
    gives = gradient_givers(state)
    for bucket in state.buckets.values():
        reached = any(name in gives for name in (bucket.name, *bucket.siblings))
        if bucket.siblings and reached and bucket.gradient() not in summed:
            yield f"{bucket.name} is not summed with {', '.join(bucket.siblings)}"
