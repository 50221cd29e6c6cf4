"""Events and frees of one program: a stream waits for another only where a slot needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class Accesses:
    """Who last wrote each live slot, and who has read it since, by stream; the same for storages that slots share."""

    def __init__(self, slots: Mapping[str, Slot], lane: Sequence[int]) -> None:
        self._lane = lane  # the stream of each place
        self._shares = {name: [share for share, _ in slot.shares] for name, slot in slots.items() if slot.shares}
        self._writer: dict[str, int] = {}
        self._readers: dict[str, dict[int, int]] = {}  # by stream: the last place that reads

    def needed(self, place: int, draft: Draft, frees: Sequence[str]) -> set[int]:
        """The places on other streams that must be over before this one runs, or frees."""
        found: set[int] = set()
        for slot in (*draft.reads, *draft.keeps):
            if slot in self._writer:
                found.add(self._writer[slot])
        for slot in (*draft.writes, *frees):
            self._touched(slot, found)
        for slot in frees:
            for storage in self._shares.get(slot, ()):
                self._touched(storage, found)
        me = self._lane[place]
        return {other for other in found if self._lane[other] != me}

    def _touched(self, slot: str, found: set[int]) -> None:
        if slot in self._writer:
            found.add(self._writer[slot])
        if slot in self._readers:
            found.update(self._readers[slot].values())

    def record(self, place: int, draft: Draft, frees: Sequence[str]) -> None:
        """Note what an instruction does to its slots and to the storages they share; forget those it frees."""
        me = self._lane[place]
        for slot in (*draft.reads, *draft.keeps):
            self._readers.setdefault(slot, {})[me] = place
        for slot in draft.writes:
            self._writer[slot] = place
            self._readers.pop(slot, None)
        if self._shares:
            for slot in (*draft.reads, *draft.keeps, *draft.writes):
                for storage in self._shares.get(slot, ()):
                    self._readers.setdefault(storage, {})[me] = place
        for slot in frees:
            self._writer.pop(slot, None)
            self._readers.pop(slot, None)


def synchronised(
    drafts: Sequence[Draft], slots: Mapping[str, Slot], residents: Mapping[str, Slot]
) -> tuple[Instr, ...]:
    """The instructions with their events and frees.

    Each stream knows how far the others have come, by the events it has waited for; a wait that it already knows to
    be over is left out. A slot is freed by its last user, once every other stream that used it is known to be done.
    """
    freed = last_uses(drafts, residents)
    names = {name: i for i, name in enumerate(dict.fromkeys(draft.stream for draft in drafts))}
    lane = [names[draft.stream] for draft in drafts]
    known = [[-1] * len(names) for _ in names]  # by stream: how far it knows each stream, itself too, to have come
    after: list[tuple[int, ...]] = []  # the same, at the end of each instruction
    accesses = Accesses(slots, lane)
    waits: list[tuple[int, ...]] = []
    signalled: dict[int, int] = {}
    for place, draft in enumerate(drafts):
        frees = freed.get(place, ())
        mine = known[lane[place]]
        asked: list[int] = []
        for other in sorted(accesses.needed(place, draft, frees), reverse=True):
            if mine[lane[other]] >= other:  # the latest comes first: it may answer for the earlier ones
                continue
            asked.append(signalled.setdefault(other, len(signalled)))
            for stream, reached in enumerate(after[other]):
                mine[stream] = max(mine[stream], reached)
        waits.append(tuple(sorted(asked)))
        mine[lane[place]] = place
        after.append(tuple(mine))
        accesses.record(place, draft, frees)
    return tuple(
        Instr(
            op=draft.op,
            node=draft.node,
            stream=draft.stream,
            reads=draft.reads,
            writes=draft.writes,
            frees=tuple(freed.get(place, ())),
            waits=waits[place],
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


def last_uses(drafts: Sequence[Draft], residents: Mapping[str, Slot]) -> dict[int, list[str]]:
    """The slots whose last user stands at each place."""
    last: dict[str, int] = {}
    for place, draft in enumerate(drafts):
        for slot in (*draft.reads, *draft.keeps, *draft.writes):
            last[slot] = place
    freed: dict[int, list[str]] = {}
    for slot, place in last.items():
        if slot not in residents:
            freed.setdefault(place, []).append(slot)
    return freed
