"""Events and frees of one program: a stream waits for another only where a slot needs it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper.ir.grouping import grouped
from piper.ir.ids import SlotId
from piper.plan.clock import StreamClock
from piper.plan.instr import Instr
from piper.plan.plan import Slot

Keeps = Mapping[int, Sequence[SlotId]]  # by place: values that are not read, but whose storage is still used


def synchronised(instrs: Sequence[Instr], keeps: Keeps, slots: Mapping[SlotId, Slot]) -> tuple[Instr, ...]:
    """Return the instructions with their events and frees.

    Each stream knows how far the others have come, by the events it has waited for; a wait that it knows to
    be over is left out. A slot is freed by its last user, once the others that used it are known to be done.
    Where a stream could run ahead and fill the memory, it is held back.
    """
    freed, dropped = last_uses(instrs, keeps, slots)
    shares = {name: [storage for storage, _ in slot.shares] for name, slot in slots.items() if slot.shares}
    clock = StreamClock(instr.stream for instr in instrs)
    stream_of, paced = clock.stream_of, paces(instrs, slots)
    writer: dict[SlotId, int] = {}  # of each live slot: the last place that writes it
    readers: dict[
        SlotId, dict[int, int]
    ] = {}  # and, by stream, the last that has read it or its storage since
    waits: list[tuple[int, ...]] = []
    signalled: dict[int, int] = {}
    for place, instr in enumerate(instrs):
        me, read = stream_of[place], (*instr.reads, *keeps.get(place, ()))
        ending = [*freed.get(place, ()), *dropped.get(place, ())]
        needed = {writer[slot] for slot in (*read, *instr.writes, *ending) if slot in writer}
        for slot in (*instr.writes, *ending):
            needed.update(readers.get(slot, {}).values())
        needed.update(paced.get(place, ()))
        asked: list[int] = []
        for other in sorted(needed, reverse=True):
            # The latest comes first: it may answer for earlier ones.
            if stream_of[other] != me and not clock.knows(me, other):
                asked.append(signalled.setdefault(other, len(signalled)))
                clock.learn(me, other)
        waits.append(tuple(sorted(asked)))
        clock.issue(place)
        for slot in read:
            readers.setdefault(slot, {})[me] = place
        for slot in instr.writes:
            writer[slot] = place
            readers.pop(slot, None)
        for slot in (*read, *instr.writes) if shares else ():
            for storage in shares.get(slot, ()):
                readers.setdefault(storage, {})[me] = place
        for slot in ending:
            writer.pop(slot, None)
            readers.pop(slot, None)
    return tuple(
        replace(instr, frees=tuple(freed.get(place, ())), waits=waits[place], signals=signalled.get(place))
        for place, instr in enumerate(instrs)
    )


def paces(instrs: Sequence[Instr], slots: Mapping[SlotId, Slot]) -> dict[int, list[int]]:
    """Return the earlier places that an instruction waits for only to limit memory.

    A gather for a run of uses is issued one compute node ahead: it may overlap that one, and starts when
    those before have ended and freed what they had gathered. A backward whose gradient is scattered starts
    when the scatters issued before it have ended, so that no whole gradients pile up behind a slow link. One
    that adds to a gradient takes no memory for it, and need not wait.
    A receive overlaps one compute node before its reader, or those issued behind it, and starts when the
    nodes before have ended: until its value arrives it takes multiprocessors from them.
    A copy back from the host starts when the computes and updates issued before it have ended, and a compute
    or an update when the copies to the host issued before it have ended and freed what they copied.
    """
    scattered = {slot for instr in instrs if instr.op == "reduce_scatter" for slot in instr.reads}
    paced: dict[int, list[int]] = {}
    computed: dict[str, int] = {}  # by stream: the last so far
    reduced: dict[str, int] = {}
    copied: dict[str, int] = {}
    computes = [place for place, instr in enumerate(instrs) if instr.op == "compute"]
    reader = first_readers(instrs)
    for place, instr in enumerate(instrs):
        if instr.op in ("compute", "update"):
            if not scattered.isdisjoint(slot for slot in instr.writes if slot not in instr.reads):
                paced[place] = list(reduced.values())
            if copied:
                paced[place] = [*paced.get(place, ()), *copied.values()]
            computed[instr.stream] = place
        elif instr.op == "recv":
            before = bisect_left(computes, reader.get(place, len(instrs))) - 1  # it overlaps the last one
            if (before := min(before, bisect_left(computes, place))) > 0:
                paced[place] = [computes[before - 1]]
        elif instr.op == "offload":
            copied[instr.stream] = place
        elif instr.op == "reduce_scatter":
            reduced[instr.stream] = place
        elif instr.op == "fetch" or (instr.op == "gather" and not slots.keys().isdisjoint(instr.writes)):
            paced[place] = list(computed.values())
    return paced


def first_readers(instrs: Sequence[Instr]) -> dict[int, int]:
    """Return, for each place that receives a value, the first place that reads it."""
    arrived: dict[SlotId, int] = {}
    reader: dict[int, int] = {}
    for place, instr in enumerate(instrs):
        for slot in instr.reads:
            if slot in arrived:
                reader.setdefault(arrived[slot], place)
        if instr.op == "recv":
            arrived.update(dict.fromkeys(instr.writes, place))
    return reader


def last_uses(
    instrs: Sequence[Instr], keeps: Keeps, slots: Mapping[SlotId, Slot]
) -> tuple[dict[int, list[SlotId]], dict[int, list[SlotId]]]:
    """Return, for each place, the slots and the shared storages whose last use is there."""
    last: dict[SlotId, int] = {}
    for place, instr in enumerate(instrs):
        for slot in (*instr.reads, *keeps.get(place, ()), *instr.writes):
            last[slot] = place
    ending = [(place, slot) for slot, place in last.items() if slot in slots]  # others outlive the step
    storages: dict[SlotId, int] = {}
    for place, slot in ending:
        for storage, _ in slots[slot].shares:
            storages[storage] = max(place, storages.get(storage, -1))
    return grouped(ending), grouped((place, storage) for storage, place in storages.items())
