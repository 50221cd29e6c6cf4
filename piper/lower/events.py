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


class Accesses:
    """The last writer of each live slot or shared storage, and its readers since, by stream."""

    def __init__(self, slots: Mapping[SlotId, Slot], stream_of: Sequence[int], keeps: Keeps) -> None:
        self._keeps = keeps
        self._stream_of = stream_of  # the stream of each place
        self._shares = {
            name: [share for share, _ in slot.shares] for name, slot in slots.items() if slot.shares
        }
        self._writer: dict[SlotId, int] = {}
        self._readers: dict[SlotId, dict[int, int]] = {}  # by stream: the last place that reads

    def needed(self, place: int, instr: Instr, ending: Sequence[SlotId]) -> set[int]:
        """Return the places on other streams that must be over before this instruction runs and frees."""
        used = (*instr.reads, *self._keeps.get(place, ()), *instr.writes, *ending)
        places = {self._writer[slot] for slot in used if slot in self._writer}
        for slot in (*instr.writes, *ending):
            places.update(self._readers.get(slot, {}).values())
        me = self._stream_of[place]
        return {other for other in places if self._stream_of[other] != me}

    def record(self, place: int, instr: Instr, ending: Sequence[SlotId]) -> None:
        """Note what an instruction does to its slots and their storages; forget those that end with it."""
        me = self._stream_of[place]
        read = (*instr.reads, *self._keeps.get(place, ()))
        for slot in read:
            self._readers.setdefault(slot, {})[me] = place
        for slot in instr.writes:
            self._writer[slot] = place
            self._readers.pop(slot, None)
        if self._shares:
            for slot in (*read, *instr.writes):
                for storage in self._shares.get(slot, ()):
                    self._readers.setdefault(storage, {})[me] = place
        for slot in ending:
            self._writer.pop(slot, None)
            self._readers.pop(slot, None)


def synchronised(instrs: Sequence[Instr], keeps: Keeps, slots: Mapping[SlotId, Slot]) -> tuple[Instr, ...]:
    """Return the instructions with their events and frees.

    Each stream knows how far the others have come, by the events it has waited for; a wait that it knows to
    be over is left out. A slot is freed by its last user, once the others that used it are known to be done.
    Where a stream could run ahead and fill the memory, it is held back.
    """
    freed, dropped = last_uses(instrs, keeps, slots)
    clock = StreamClock(instr.stream for instr in instrs)
    stream_of = clock.stream_of
    accesses = Accesses(slots, stream_of, keeps)
    paced = paces(instrs, slots)
    waits: list[tuple[int, ...]] = []
    signalled: dict[int, int] = {}
    for place, instr in enumerate(instrs):
        ending = [*freed.get(place, ()), *dropped.get(place, ())]
        asked: list[int] = []
        needed = accesses.needed(place, instr, ending)
        needed.update(other for other in paced.get(place, ()) if stream_of[other] != stream_of[place])
        for other in sorted(needed, reverse=True):
            # The latest comes first: it may answer for earlier ones.
            if not clock.knows(stream_of[place], other):
                asked.append(signalled.setdefault(other, len(signalled)))
                clock.learn(stream_of[place], other)
        waits.append(tuple(sorted(asked)))
        clock.issue(place)
        accesses.record(place, instr, ending)
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
