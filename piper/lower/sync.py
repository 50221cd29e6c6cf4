"""Events and frees of one program: a stream waits for another only where a slot needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper.plan.instr import Instr, Op
from piper.plan.plan import Slot


@dataclass(slots=True, kw_only=True)
class Draft:
    """An instruction before it knows whom to wait for and what to free."""

    op: Op
    node: str
    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    comm: str | None = None
    arg: str = ""
    part: tuple[tuple[str, int], ...] = ()
    devices: tuple[int, ...] = ()
    nbytes: int = 0
    workspace: int = 0


@dataclass(slots=True)
class Access:
    """Who last wrote a slot or storage, and who has read it since, by stream."""

    writer: int = -1
    readers: dict[int, int] = field(default_factory=dict)


def synchronised(drafts: Sequence[Draft], slots: Mapping[str, Slot], residents: Mapping[str, Slot]) -> tuple[Instr, ...]:
    """The instructions with their events and frees.

    Each stream knows how far the others have come, by the events it has waited for; a wait that it already knows to
    be over is left out. A slot is freed by its last user, once every other stream that used it is known to be done.
    """
    last: dict[str, int] = {}
    for place, draft in enumerate(drafts):
        for slot in (*draft.reads, *draft.keeps, *draft.writes):
            if slot not in residents:
                last[slot] = place
    freed: dict[int, list[str]] = {}
    for slot, place in last.items():
        freed.setdefault(place, []).append(slot)
    names = {name: i for i, name in enumerate(dict.fromkeys(draft.stream for draft in drafts))}
    lane = [names[draft.stream] for draft in drafts]
    known = [[-1] * len(names) for _ in names]  # by stream: the last place of each other stream it is known to follow
    after: list[tuple[int, ...]] = []  # the same, at the end of each instruction
    accesses: dict[str, Access] = {}
    waits: list[list[int]] = []
    signalled: dict[int, int] = {}
    for place, draft in enumerate(drafts):
        me = lane[place]
        needed = needs(draft, freed.get(place, ()), accesses, slots)
        mine = known[me]
        asked: list[int] = []
        for other in sorted(needed, reverse=True):  # the latest first: it may answer for the earlier ones
            if lane[other] == me or mine[lane[other]] >= other:
                continue
            asked.append(signalled.setdefault(other, len(signalled)))
            for stream, reached in enumerate(after[other]):
                mine[stream] = max(mine[stream], reached)
        waits.append(asked)
        mine[me] = place
        after.append(tuple(mine))
        record(draft, place, me, accesses, slots)
    return tuple(
        Instr(
            op=draft.op,
            node=draft.node,
            stream=draft.stream,
            reads=draft.reads,
            writes=draft.writes,
            frees=tuple(freed.get(place, ())),
            waits=tuple(sorted(waits[place])),
            signals=signalled.get(place),
            comm=draft.comm,
            arg=draft.arg,
            part=draft.part,
            devices=draft.devices,
            nbytes=draft.nbytes,
            workspace=draft.workspace,
        )
        for place, draft in enumerate(drafts)
    )


def needs(draft: Draft, frees: Sequence[str], accesses: Mapping[str, Access], slots: Mapping[str, Slot]) -> set[int]:
    """The earlier instructions that must be over before this one runs, or frees."""
    needed: set[int] = set()
    for slot in (*draft.reads, *draft.keeps):
        if slot in accesses:
            needed.add(accesses[slot].writer)
    for slot in draft.writes:
        if slot in accesses:
            needed.add(accesses[slot].writer)
            needed.update(accesses[slot].readers.values())
    for slot in frees:
        for name in (slot, *(storage for storage, _ in slots[slot].shares)):
            if name in accesses:
                needed.add(accesses[name].writer)
                needed.update(accesses[name].readers.values())
    needed.discard(-1)
    return needed


def record(draft: Draft, place: int, me: int, accesses: dict[str, Access], slots: Mapping[str, Slot]) -> None:
    """Note what this instruction does to its slots and to the storages they share."""
    for slot in (*draft.reads, *draft.keeps):
        accesses.setdefault(slot, Access()).readers[me] = place
    for slot in draft.writes:
        accesses[slot] = Access(writer=place)
    for slot in (*draft.reads, *draft.keeps, *draft.writes):
        if slot in slots:
            for storage, _ in slots[slot].shares:
                accesses.setdefault(storage, Access()).readers[me] = place
