"""The optimizer's state in memory of the host, on the device only bucket by bucket, as it is updated."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from piper.errors import ScheduleError
from piper.ir.chunk_options import HostCopies
from piper.ir.ids import SlotId, param_slot, state_slot
from piper.ir.node import Node, Update
from piper.lower.offloads import CopyBack, CopyOut, fetched
from piper.lower.sequence import computes_by_set
from piper.lower.state import LoweringState, SequenceEdit
from piper.plan.bucket import Bucket
from piper.plan.plan import Slot


def add_state_offloads(state: LoweringState) -> LoweringState:
    """Update buckets whose state is on the host one by one, between two copies of their state.

    F[PP=0]  B[PP=0]  update[@0]
    -->
    F[PP=0], fetch[PP=0/0.state]  B[PP=0], fetch[PP=0/1.state], update[PP=0/0], offload[PP=0/0.state], ...
    """
    asked = state.graph.chosen(lambda options: options.offload_state)
    if not asked or not state.settings.trains:
        return state
    check_state(state, asked)
    updates = {place: node for place, node in enumerate(state.sequence) if isinstance(node, Update)}
    computes = computes_by_set(state.sequence, {node.devices for node in updates.values()})
    edit = SequenceEdit(state)
    for place, node in updates.items():
        away = [slot for slot in node.writes if state.residents[state_slot(slot.owner)].host]
        if not away:
            continue
        rest = tuple(slot for slot in node.writes if slot not in away)
        buckets = [state.buckets[slot.owner] for slot in away]
        for bucket in buckets:
            edit.values[on_device(bucket)] = Slot(nbytes=state.residents[state_slot(bucket.name)].host)
        turns = [streamed(state, node, bucket, how_of(bucket, asked)) for bucket in buckets]
        mine = computes[node.devices]
        edit.before(mine[max(0, len(mine) - how_of(buckets[0], asked).ahead)], turns[0][0])
        nodes: list[Node] = [part_of(node, rest)] if rest else []
        for number, (_, updated, out) in enumerate(turns):  # each copy to the device one update ahead
            nodes += [turns[number + 1][0]] if number + 1 < len(turns) else []
            nodes += [updated, out]
        edit.replace(place, *nodes)
    return edit.apply()


def offloaded_state_comes_back(state: LoweringState) -> Iterator[str]:
    """Yield each bucket whose state is on the host and that is not updated between two copies of it."""
    seen: dict[SlotId, list[str]] = {}
    for node in state.sequence:
        slot = node.writes[-1] if isinstance(node, CopyBack | CopyOut) else None
        if isinstance(node, Update) and node.about:
            slot = state_slot(node.about)
        if slot is not None:
            seen.setdefault(slot, []).append(type(node).__name__)
    away = {slot for slot, size in state.residents.items() if slot.kind == "state" and size.host}
    if state.settings.trains:
        for slot in away:
            once = len(seen.get(slot, ())) // 3
            if not once or sorted(seen[slot]) != sorted(["CopyBack", "Update", "CopyOut"] * once):
                yield f"{slot} is on the host, and copied or updated only by {seen.get(slot, [])}"


def streamed(
    state: LoweringState, node: Update, bucket: Bucket, how: HostCopies
) -> tuple[CopyBack, Update, CopyOut]:
    """Return the copy of a bucket's state to the device, its update, and the copy back to the host."""
    on_host, here = state_slot(bucket.name), on_device(bucket)
    nbytes, origin = state.residents[on_host].host, (how.by,)
    updated = part_of(node, (param_slot(bucket.name),))
    updated = replace(
        updated, reads=(*updated.reads, here), writes=(*updated.writes, here), about=bucket.name
    )
    # The state is not complete on the host until the last copy: what copies it elsewhere comes before.
    back = CopyBack(
        about=on_host, devices=node.devices, reads=(on_host,), writes=(here, on_host),
        stream=f"{how.stream}.in", nbytes=nbytes, origin=origin,
    )  # fmt: skip
    out = CopyOut(
        about=on_host, devices=node.devices, reads=(here,), writes=(on_host,),
        stream=f"{how.stream}.out", nbytes=nbytes, origin=origin,
    )  # fmt: skip
    return back, updated, out


def part_of(node: Update, params: tuple[SlotId, ...]) -> Update:
    """Return the update of some of the buckets of an update."""
    given = dict(zip(node.writes, node.reads, strict=False))  # the sums of the step come after the gradients
    return replace(
        node, reads=(*(given[slot] for slot in params), *node.reads[len(node.writes) :]), writes=params
    )


def on_device(bucket: Bucket) -> SlotId:
    """Return the slot of a bucket's state while it is on the device."""
    return fetched(state_slot(bucket.name), 0)


def how_of(bucket: Bucket, asked: Mapping[str, HostCopies]) -> HostCopies:
    """Return how the state of a bucket is offloaded."""
    return next(asked[chunk] for chunk in bucket.chunks if chunk in asked)


def check_state(state: LoweringState, asked: Mapping[str, HostCopies]) -> None:
    """Refuse a directive whose regions have no optimizer state."""
    for by in dict.fromkeys(how.by for how in asked.values()):
        chunks = [chunk for chunk, how in asked.items() if how.by == by]
        slots = [state_slot(name) for chunk in chunks for name in state.chunk_buckets[chunk]]
        if not any(state.residents[slot].host for slot in slots if slot in state.residents):
            raise ScheduleError(
                "there is no optimizer state to offload",
                by=state.graph.directives[by].title,
                facts={"regions": ", ".join(chunks[:3])},
                hint="select regions with parameters that train, under an optimizer that keeps state",
            )
