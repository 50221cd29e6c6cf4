"""Values in memory of the host: activations between uses that are far apart, and the optimizer's state.

The state is on the device only bucket by bucket, as it is updated.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from piper.errors import ScheduleError
from piper.ir.chunk_options import HostCopies
from piper.ir.devices import Devices, show
from piper.ir.ids import SlotId, SlotKind, Tags, param_slot, state_slot
from piper.ir.node import Compute, Node, SlotNode, Transfer
from piper.lower.state import LoweringState, SequenceEdit, computes_by_set
from piper.plan.bucket import Bucket
from piper.plan.plan import Slot

KINDS: tuple[SlotKind, ...] = ("output", "saved", "kept", "carried")
BUNDLES: tuple[SlotKind, ...] = ("saved", "kept", "carried")
TOO_SMALL = "they are too small"
SLACK = 1  # compute nodes between both copies at least: without one, no memory is gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A time that values spend on the host: between two uses, by their places in the sequence."""

    values: tuple[SlotId, ...]
    last: int  # the use before
    next: int  # the use after
    out: int  # the compute node behind which they are copied out
    back: int  # the compute node before which they are copied back


@dataclass(slots=True)
class Family:
    """Values whose memory is freed together, because they share storages, and all places that use them."""

    values: list[SlotId]
    devices: Devices
    asked: HostCopies
    chunk: str
    uses: dict[SlotId, list[int]] = field(default_factory=dict)
    sent: int = -1  # the last place where one is sent: until then they stay, as a copy would travel twice


def add_offloads(state: LoweringState) -> LoweringState:
    """Copy activations out where they are not used for a while, and rename what later nodes read.

    F[MB=0]  F[MB=1]  F[MB=2]  B[MB=2]  B[MB=1]  B[MB=0]
    -->
    F[MB=0]  F[MB=1], offload[MB=0]  F[MB=2]  B[MB=2], fetch[MB=0]  B[MB=1]  B[MB=0]
    """
    asked = state.graph.chosen(lambda options: options.offload)
    if not asked or not state.settings.trains:
        return state
    families = families_of(state, asked)
    computes = computes_by_set(state.sequence, {family.devices for family in families})
    edit = SequenceEdit(state)
    moved: dict[tuple[object, ...], list[tuple[Family, list[Away]]]] = {}  # those that are copied together
    stayed: dict[str, dict[str, None]] = {}  # the reasons, by chunk
    for family in families:
        absences = list(absences_of(family, computes[family.devices]))
        sizes = host_sizes(family, absences[0].values, state.values) if absences else {}
        if sum(sizes.values()) < max(1, family.asked.least):
            reason = TOO_SMALL if absences else "they are read again too soon"
            stayed.setdefault(family.chunk, {})[reason] = None
            continue
        edit.values |= {on_host(value).base: Slot(nbytes=0, host=size) for value, size in sizes.items()}
        turns = tuple((away.out, away.back) for away in absences)
        moved.setdefault((family.devices, family.asked, turns), []).append((family, absences))
    for together in moved.values():
        add_copies(edit, together)
    moving = {family.chunk for together in moved.values() for family, _ in together}
    check_something(state, asked, families, moving, stayed)
    edit.why += [
        f"{chunk}: some saved activations stay on the device, because {' or '.join(reasons)}"
        for chunk, reasons in stayed.items()
    ]
    return edit.apply()


def offloaded_values_come_back(state: LoweringState) -> Iterator[str]:
    """Yield each read of a value that was copied out, and each copy that never comes back."""
    gone: dict[SlotId, str] = {}
    waiting: dict[SlotId, str] = {}
    for node in state.sequence:
        for value in node.reads:
            if value in gone:
                yield f"{node.name} reads {value}, which {gone[value]} has copied out"
            waiting.pop(value, None)
        if node.op == "offload":
            gone |= dict.fromkeys(node.reads, node.name)
            waiting |= dict.fromkeys(node.writes, node.name)
    for value, name in waiting.items():
        yield f"{value} of {name} is never copied back"


def families_of(state: LoweringState, asked: Mapping[str, HostCopies]) -> list[Family]:
    """Return the values that the selected chunks read again, and those that share memory with them.

    What eager autograd holds on to cannot be moved: neither what such a chunk saves, nor its inputs.
    """
    eager = {chunk.name for chunk in state.graph.outline.chunks if chunk.kept_inputs}
    fixed = {value for node in state.sequence if isinstance(node, Compute) for value in node.keeps}
    wanted = wanted_by(state, asked)
    families: list[Family] = []
    known: dict[SlotId, Family] = {}  # by value and by storage
    for place, node in enumerate(state.sequence):
        for value in node.writes:
            slot = state.values.get(value.base)
            if slot is None or value.kind not in KINDS or (value not in wanted and not slot.shares):
                continue
            keys = [value, *(storage.at(value.part) for storage, _ in slot.shares)]
            family = next((known[key] for key in keys if key in known), None)
            if family is None:
                devices = node.target if isinstance(node, Transfer) else node.devices
                chunk = wanted.get(value, "")
                family = Family([], devices, asked[chunk] if chunk else next(iter(asked.values())), chunk)
                families.append(family)
            elif not family.chunk and value in wanted:
                family.chunk, family.asked = wanted[value], asked[wanted[value]]
            family.values.append(value)
            known |= dict.fromkeys(keys, family)
        for value in (*node.writes, *node.reads):
            if value in known:
                known[value].uses.setdefault(value, []).append(place)
                if isinstance(node, Transfer) and value in node.reads:
                    known[value].sent = place
    return [
        family
        for family in families
        if family.chunk
        and fixed.isdisjoint(family.values)
        and not any(value.owner in eager and value.kind in BUNDLES for value in family.values)
        and not any(state.values[value.base].dynamic for value in family.values)
    ]


def wanted_by(state: LoweringState, asked: Mapping[str, HostCopies]) -> dict[SlotId, str]:
    """Return the values that backwards and reruns of selected chunks read, each with the first of these."""
    wanted: dict[SlotId, str] = {}
    for node in state.sequence:
        if isinstance(node, Compute) and (node.phase != "F" or node.again) and node.chunk in asked:
            for value in node.reads:
                if value.kind in KINDS and value not in state.residents:
                    wanted.setdefault(value, node.chunk)
    return wanted


def absences_of(family: Family, computes: list[int]) -> Iterator[Away]:
    """Yield the times between two uses that are long enough for both copies."""
    ahead = family.asked.ahead
    places = sorted({place for uses in family.uses.values() for place in uses})
    for last, following in pairwise(places):
        low, high = bisect_right(computes, last), bisect_left(computes, following)
        if last >= family.sent and high - low >= 2 * ahead + SLACK:
            yield Away(
                values=tuple(
                    v for v, uses in family.uses.items() if uses[0] <= last and uses[-1] >= following
                ),
                last=last,
                next=following,
                out=computes[low + ahead - 1],
                back=computes[high - ahead],
            )


def add_copies(edit: SequenceEdit, together: list[tuple[Family, list[Away]]]) -> None:
    """Add the copies of families that are away at the same times, and rename what later nodes read."""
    family, turns = together[0]
    stream, origin = family.asked.stream, (family.asked.by,)

    def nbytes(hosts: tuple[SlotId, ...]) -> int:
        return sum(edit.values[host.base].host for host in hosts)

    values = tuple(value for _, absences in together for value in absences[0].values)
    hosts = tuple(map(on_host, values))
    out = SlotNode(
        op="offload", name=f"offload[{values[0]}]", devices=family.devices, reads=values, writes=hosts,
        nbytes=nbytes(hosts), stream=f"{stream}.out", origin=origin,
    )  # fmt: skip
    edit.after(turns[0].out, out, rank=turns[0].last)
    for turn, away in enumerate(turns):
        values = tuple(value for _, absences in together for value in absences[turn].values)
        hosts, returned = tuple(map(on_host, values)), tuple(fetched(value, turn) for value in values)
        back = SlotNode(
            op="fetch", name=f"fetch[{returned[0]}]", devices=family.devices, reads=hosts, writes=returned,
            nbytes=nbytes(hosts), stream=f"{stream}.in", origin=origin,
        )  # fmt: skip
        edit.before(away.back, back, rank=away.next)
        for member, absences in together:
            rename_returned(edit, member, absences, turn)


def rename_returned(edit: SequenceEdit, family: Family, absences: list[Away], turn: int) -> None:
    """Let the nodes after a turn read what came back then, until the next turn."""
    away = absences[turn]
    until = absences[turn + 1].next if turn + 1 < len(absences) else len(edit.sequence)
    for value in away.values:
        returned = fetched(value, turn)
        slot = edit.state.values[value.base]  # as large as before, in storages of its own
        shares = tuple((fetched(storage, turn), nbytes) for storage, nbytes in slot.shares)
        edit.values[returned.base] = replace(slot, shares=shares)
        for place in family.uses[value]:
            if away.next <= place < until:
                edit.rename(place, value, returned)


def host_sizes(family: Family, values: Sequence[SlotId], slots: Mapping[SlotId, Slot]) -> dict[SlotId, int]:
    """Return the bytes of each value on the host. A storage that several share counts for the one used last.

    The copy of that one holds the storage until then.
    """
    seen: set[tuple[SlotId, Tags]] = set()
    sizes: dict[SlotId, int] = {}
    for value in sorted(values, key=lambda value: family.uses[value][-1], reverse=True):
        slot = slots[value.base]
        fresh = [(storage, nbytes) for storage, nbytes in slot.shares if (storage, value.part) not in seen]
        seen.update((storage, value.part) for storage, _ in fresh)
        sizes[value] = slot.nbytes + sum(nbytes for _, nbytes in fresh)
    return sizes


def on_host(value: SlotId) -> SlotId:
    """Return the slot of the copy of a value in memory of the host."""
    return SlotId("host", value.base, part=value.part)


def fetched(value: SlotId, turn: int) -> SlotId:
    """Return the slot of a value, or the storage, that came back from the host, for the turn-th time."""
    return SlotId("fetched", value.base, turn, part=value.part)


def check_something(
    state: LoweringState,
    asked: Mapping[str, HostCopies],
    families: Sequence[Family],
    moving: Collection[str],
    stayed: Mapping[str, Collection[str]],
) -> None:
    """Refuse a directive that selects no region with activations that can be offloaded."""
    for by in dict.fromkeys(how.by for how in asked.values()):
        chunks = [chunk for chunk, how in asked.items() if how.by == by]
        mine = [family for family in families if family.asked.by == by]
        if not mine:
            raise ScheduleError(
                "nothing that these regions save can be offloaded",
                by=state.graph.directives[by].title,
                facts={"regions": ", ".join(chunks[:3])},
                hint="select regions whose backward reads activations; rows that are routed, and what eager "
                "autograd saves, stay on the device",
            )
        small = any(TOO_SMALL in stayed.get(chunk, ()) for chunk in chunks)
        if not small and not any(chunk in moving for chunk in chunks):
            ahead = asked[chunks[0]].ahead
            raise ScheduleError(
                "everything that these regions save is read again too soon",
                by=state.graph.directives[by].title,
                facts={
                    "regions": ", ".join(chunks[:3]),
                    "needed": f"{2 * ahead + SLACK} compute nodes of the device between two uses "
                    f"(ahead={ahead})",
                },
                hint="select earlier stages, split into more microbatches, or leave offload out",
            )


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
    updates = {
        place: node
        for place, node in enumerate(state.sequence)
        if isinstance(node, SlotNode) and node.op == "update"
    }
    computes = computes_by_set(state.sequence, {node.devices for node in updates.values()})
    edit = SequenceEdit(state)
    for place, node in updates.items():
        away = [slot for slot in node.writes if state.residents[state_slot(slot.owner)].host]
        if not away:
            continue
        rest = tuple(slot for slot in node.writes if slot not in away)
        buckets = [state.buckets[slot.owner] for slot in away]
        for on_host in (state_slot(bucket.name) for bucket in buckets):
            edit.values[fetched(on_host, 0)] = Slot(nbytes=state.residents[on_host].host)
        hows = [next(asked[chunk] for chunk in bucket.chunks if chunk in asked) for bucket in buckets]
        turns = [streamed(state, node, *each) for each in zip(buckets, hows, strict=True)]
        mine = computes[node.devices]
        edit.before(mine[max(0, len(mine) - hows[0].ahead)], turns[0][0])
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
        slot = node.writes[-1] if node.writes else None
        if slot is not None and slot.kind == "fetched" and node.op == "update":
            slot = state_slot(node.writes[0].owner)
        if slot is not None and node.op in ("update", "offload", "fetch"):
            seen.setdefault(slot, []).append(node.op)
    away = {slot for slot, size in state.residents.items() if slot.kind == "state" and size.host}
    if state.settings.trains:
        for slot in away:
            once = len(seen.get(slot, ())) // 3
            if not once or sorted(seen[slot]) != sorted(["fetch", "update", "offload"] * once):
                yield f"{slot} is on the host, and copied or updated only by {seen.get(slot, [])}"


def streamed(
    state: LoweringState, node: SlotNode, bucket: Bucket, how: HostCopies
) -> tuple[SlotNode, SlotNode, SlotNode]:
    """Return the copy of a bucket's state to the device, its update, and the copy back to the host."""
    on_host, here = state_slot(bucket.name), fetched(state_slot(bucket.name), 0)
    nbytes, origin = state.residents[on_host].host, (how.by,)
    updated = part_of(node, (param_slot(bucket.name),))
    where = f"@{show(node.devices)}"
    updated = replace(
        updated,
        name=f"update[{bucket.name} {where}]",
        reads=(*updated.reads, here),
        writes=(*updated.writes, here),
    )
    # The state is not complete on the host until the last copy: what copies it elsewhere comes before.
    back = SlotNode(
        op="fetch", name=f"fetch[{on_host} {where}]", devices=node.devices, reads=(on_host,),
        writes=(here, on_host), stream=f"{how.stream}.in", nbytes=nbytes, origin=origin,
    )  # fmt: skip
    out = SlotNode(
        op="offload", name=f"offload[{on_host} {where}]", devices=node.devices, reads=(here,),
        writes=(on_host,), stream=f"{how.stream}.out", nbytes=nbytes, origin=origin,
    )  # fmt: skip
    return back, updated, out


def part_of(node: SlotNode, params: tuple[SlotId, ...]) -> SlotNode:
    """Return the update of some of the buckets of an update."""
    given = dict(zip(node.writes, node.reads, strict=False))  # the sums of the step come after the gradients
    return replace(
        node, reads=(*(given[slot] for slot in params), *node.reads[len(node.writes) :]), writes=params
    )


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
