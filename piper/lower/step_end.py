"""The start and the end of a step: batch fields loaded at first use, then losses, norms and updates."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from piper.ir.devices import Devices, show
from piper.ir.ids import NORM, TOTAL, SlotId, buffer_slot, param_slot, show_part
from piper.ir.node import Compute, SlotNode, Transfer
from piper.ir.sharding import shardings_on
from piper.ir.step_sums import StepSum, step_sums
from piper.lower.gathers import gather_of
from piper.lower.placements import classes_of, placements_of
from piper.lower.reductions import accumulate
from piper.lower.state import LoweringState, SequenceEdit
from piper.lower.transfers import output_slot
from piper.plan.bucket import Bucket
from piper.plan.ops import Field, OfBucket, OfChunk
from piper.plan.plan import Slot


def reshard(bucket: Bucket, source: SlotId, target: SlotId) -> SlotNode:
    """Return the node that reshards a gradient into full ones, or the updated parameters into slices."""
    back = source == target
    itemsize = bucket.itemsize if back else bucket.precision.sum_itemsize
    slices, full = bucket.elements() * itemsize, bucket.update.elements() * itemsize
    return SlotNode(
        op="reshard",
        name=f"reshard[{bucket.name} {'from' if back else 'for'} update @{show(bucket.devices)}]",
        devices=bucket.devices,
        groups=bucket.slices,
        payload=OfBucket(bucket=bucket.name),
        reads=(source,),
        writes=(target,),
        stream=bucket.gather_stream if back else bucket.reduce_stream,
        nbytes=slices * (bucket.slice_count - 1) // bucket.slice_count,
        workspace=full + (slices if back else 0),  # what is sent, or what arrives
        origin=bucket.origin,
    )


def add_loads(state: LoweringState) -> LoweringState:
    """Load each field of the batch right before its first reader on each set of devices.

    F[PP=0 MB=0] reads batch.tokens
    -->
    load[tokens MB=0], F[PP=0 MB=0]
    """
    edit = SequenceEdit(state)
    loaded: set[SlotId] = set()
    for place, node in enumerate(state.sequence):
        if not isinstance(node, Compute):
            continue
        for value in node.reads:
            if value.kind == "batch" and value not in loaded:
                loaded.add(value)
                mesh = state.graph.mesh(node)
                placements = state.graph.policy(node.chunk).field_placements(value.owner)
                field = Field(
                    name=value.owner,
                    part=node.part,
                    devices=node.devices,
                    degree=mesh.degree,
                    slices=shardings_on(mesh, placements),
                )
                load = SlotNode(
                    op="load", name=f"load[{value.owner}{show_part(node.part)} @{show(node.devices)}]",
                    devices=node.devices, writes=(value,), stream="load", payload=field,
                    nbytes=state.values[value.base].nbytes, origin=node.origin,
                )  # fmt: skip
                edit.before(place, load)
    return edit.apply()


def every_field_is_loaded(state: LoweringState) -> Iterator[str]:
    """Yield each batch value that is read before it is loaded, or loaded twice."""
    seen: set[SlotId] = set()
    for node in state.sequence:
        for value in node.reads:
            if value.kind == "batch" and value not in seen:
                yield f"{node.name} reads {value} before it is loaded"
        if node.op == "load":
            seen.update(node.writes)


def add_losses(state: LoweringState) -> LoweringState:
    """Add each microbatch's loss, weight and metrics to the step's sums, as soon as they are computed.

    F[PP=1 MB=0]  F[PP=1 MB=1]
    -->
    F[PP=1 MB=0], accumulate, F[PP=1 MB=1], accumulate
    """
    edit = SequenceEdit(state)
    for each in step_sums(state.graph, clip=state.settings.clip):
        if (source := each.source) is None:
            continue
        edit.values[each.slot] = Slot(nbytes=8 * each.length)
        result = output_slot(source.chunk, source.index)
        begun: dict[Devices, bool] = {}
        for place, node in enumerate(state.sequence):
            if not isinstance(node, Compute) or node.again:  # a recomputed forward is counted already
                continue
            if node.phase == "F" and node.chunk == source.chunk:
                value = next(value for value in node.writes if value.base == result)
                accumulate(edit, place, value, each.slot, begun)
    return edit.apply()


def every_sum_is_added_up(state: LoweringState) -> Iterator[str]:
    """Yield each sum of the step to which no node adds the results of microbatches."""
    written = {value for node in state.sequence for value in node.writes}
    for each in step_sums(state.graph, clip=state.settings.clip):
        if each.source is not None and each.slot not in written:
            yield f"{each.slot} is never added up"


def add_updates(state: LoweringState) -> LoweringState:
    """End the step: total the norm and the losses, update, then gather parameters and broadcast buffers.

    reduce ...
    -->
    reduce ..., norm, total, update, gather (zero 1, 2), broadcast (buffers)

    Where an optimizer needs parameters in full of which devices have slices: reshard, update, reshard.
    """
    written = {value for node in state.sequence for value in node.writes}
    trained = [b for b in state.buckets.values() if b.gradient() in written]
    everyone = state.graph.devices()
    edit = SequenceEdit(state)
    groups = device_groups(state, trained)
    sums = step_sums(state.graph, clip=state.settings.clip)
    held = terms_of(state, sums)
    waits_for_total = any(each.steers for each in sums)
    for devices, buckets in groups.items():
        reads = [b.gradient() for b in buckets]
        reads += [slot for slot, holders in held.items() if devices[0] in holders]
        name = f"norm[@{show(devices)}]"
        edit.append(SlotNode(op="norm", name=name, devices=devices, reads=tuple(reads), writes=(NORM,)))
    sliced = [bucket for bucket in trained if bucket.slices]
    for bucket in sliced:
        edit.append(reshard(bucket, bucket.gradient(), bucket.applied))
        edit.values[bucket.applied] = Slot(nbytes=bucket.update.elements() * bucket.precision.sum_itemsize)
    size = 8 * sum(each.length for each in sums)
    # Where all devices sum the gradients of a bucket, their communicator is used again.
    stream = next((bucket.reduce_stream for bucket in trained if bucket.groups == (everyone,)), "reduce")
    total = SlotNode(
        op="total", name="total", devices=everyone, groups=(everyone,), reads=(NORM,), writes=(TOTAL,),
        nbytes=size, stream=stream,
    )  # fmt: skip
    edit.append(total)
    for devices, buckets in groups.items():
        if buckets:
            edit.append(
                SlotNode(
                    op="update",
                    name=f"update[@{show(devices)}]",
                    devices=devices,
                    reads=(*(b.applied for b in buckets), *((TOTAL,) if waits_for_total else ())),
                    writes=tuple(param_slot(b.name) for b in buckets),
                    origin=tuple(dict.fromkeys(n for b in buckets for n in b.origin)),
                )
            )
    edit.append(*(reshard(b, param_slot(b.name), param_slot(b.name)) for b in sliced))
    edit.append(*(gather_of(b, None, param_slot(b.name)) for b in trained if b.gather_updated))
    edit.append(*broadcasts(state))
    edit.values[NORM] = Slot(nbytes=size)
    residents = {**state.residents, TOTAL: Slot(nbytes=size)}  # the step's result: the runtime reads it
    return replace(edit.apply(), residents=residents)


def terms_of(state: LoweringState, sums: Iterable[StepSum]) -> dict[SlotId, set[int]]:
    """Return the slots that hold terms of a step's sums, in the order of these, and the devices of each."""
    held: dict[str, dict[SlotId, set[int]]] = {each.name: {} for each in sums}
    for node in state.sequence:
        for slot in node.writes:
            if slot.sum_name in held:
                held[slot.sum_name].setdefault(slot, set()).update(node.devices)
    return {slot: devices for slots in held.values() for slot, devices in slots.items()}


def every_gradient_is_applied(state: LoweringState) -> Iterator[str]:
    """Yield each final gradient that some device of its bucket does not apply after its last write."""
    applied: dict[SlotId, set[int]] = {}
    for node in state.sequence:
        if node.op == "update":
            for value in node.reads:
                applied.setdefault(value, set()).update(node.devices)
    written = {value for node in state.sequence for value in node.writes}
    for bucket in state.buckets.values():
        slot = bucket.applied
        if slot in written and applied.get(slot, set()) != set(bucket.devices):
            yield f"{slot} is applied on {sorted(applied.get(slot, set()))}, not on {bucket.devices}"


def device_groups(state: LoweringState, trained: list[Bucket]) -> dict[Devices, list[Bucket]]:
    """Return the groups of devices that run the same nodes, with the buckets that each group updates."""
    sets: dict[Devices, None] = {}
    for node in state.sequence:
        for devices in (node.source, node.target) if isinstance(node, Transfer) else (node.devices,):
            sets.setdefault(devices)
    for bucket in trained:
        sets.setdefault(bucket.devices)
    members = {devices: frozenset(devices) for devices in sets}
    return {devices: [b for b in trained if devices[0] in members[b.devices]] for devices in classes_of(sets)}


def broadcasts(state: LoweringState) -> Iterator[SlotNode]:
    """Yield a broadcast of the first replica's buffers for each replicated chunk that writes buffers."""
    placements = placements_of(state.graph)
    for chunk in state.graph.outline.chunks:
        placement = placements[chunk.name]
        if chunk.mutated and len(placement.devices) > 1:
            slots = tuple(buffer_slot(name) for name in chunk.mutated)
            yield SlotNode(
                op="broadcast",
                name=f"broadcast[{chunk.name}]",
                stream="reduce",
                devices=placement.devices,
                groups=(placement.devices,),
                payload=OfChunk(chunk=chunk.name),
                reads=slots,
                writes=slots,
                nbytes=sum(state.residents[slot].nbytes for slot in slots),
                origin=placement.origin,
            )
