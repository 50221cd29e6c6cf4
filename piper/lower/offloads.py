"""Activations in host memory: copied out where their next use is far away, and back before it."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from piper.errors import ScheduleError
from piper.ir.devices import Devices
from piper.ir.graph import OffloadedChunk
from piper.ir.ids import SlotId, SlotKind, Tags
from piper.ir.node import Compute, LocalNode, Node, Transfer
from piper.lower.sequence import computes_by_set, woven
from piper.lower.state import LoweringState
from piper.plan.plan import Slot

KINDS: tuple[SlotKind, ...] = ("output", "saved", "kept", "carried")
BUNDLES: tuple[SlotKind, ...] = ("saved", "kept", "carried")
SLACK = 1  # compute nodes between both copies at least: without one, no memory is gained


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOut(LocalNode):
    """Copy values to memory of the host. Their memory on the device is free when the copy is over."""

    op = "offload"

    @property
    def name(self) -> str:
        return f"offload[{self.reads[0]}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBack(LocalNode):
    """Copy values from memory of the host back to the device, ahead of their next use."""

    op = "fetch"

    @property
    def name(self) -> str:
        return f"fetch[{self.writes[0]}]"


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
    asked: OffloadedChunk
    chunk: str
    uses: dict[SlotId, list[int]] = field(default_factory=dict)


def add_offloads(work: LoweringState) -> LoweringState:
    """Copy activations out where they are not used for a while, and rename what later nodes read.

    F[MB=0]  F[MB=1]  F[MB=2]  B[MB=2]  B[MB=1]  B[MB=0]
    -->
    F[MB=0]  F[MB=1], offload[MB=0]  F[MB=2]  B[MB=2], fetch[MB=0]  B[MB=1]  B[MB=0]
    """
    asked = {chunk: how for (what, chunk), how in work.graph.offloaded.items() if what == "activations"}
    if not asked or not work.settings.trains:
        return work
    families = families_of(work, asked)
    places = computes_by_set(work.sequence, {family.devices for family in families})
    weaving = _Weaving(work)
    for family in families:
        weaving.add(family, list(absences(family, places[family.devices])), work)
    check_something(work, asked, families, weaving)
    return weaving.woven()


def offloaded_values_come_back(work: LoweringState) -> Iterator[str]:
    """Yield each read of a value that was copied out, and each copy that never comes back."""
    gone: dict[SlotId, str] = {}
    waiting: dict[SlotId, str] = {}
    for node in work.sequence:
        for value in node.reads:
            if value in gone:
                yield f"{node.name} reads {value}, which {gone[value]} has copied out"
            waiting.pop(value, None)
        if isinstance(node, CopyOut):
            gone |= dict.fromkeys(node.reads, node.name)
            waiting |= dict.fromkeys(node.writes, node.name)
    for value, name in waiting.items():
        yield f"{value} of {name} is never copied back"


def families_of(work: LoweringState, asked: Mapping[str, OffloadedChunk]) -> list[Family]:
    """Return the values that backwards or recomputed forwards of the selected chunks read, with their uses.

    What eager autograd holds on to cannot be moved: neither what such a chunk saves, nor its inputs.
    """
    eager = {chunk.name for chunk in work.graph.outline.chunks if chunk.kept_inputs}
    fixed = {value for node in work.sequence if isinstance(node, Compute) for value in node.keeps}
    wanted: dict[SlotId, str] = {}
    for node in work.sequence:
        if isinstance(node, Compute) and (node.phase != "F" or node.again) and node.chunk in asked:
            for value in node.reads:
                if value.kind in KINDS and value not in work.residents:
                    wanted.setdefault(value, node.chunk)
    families: list[Family] = []
    known: dict[SlotId, Family] = {}  # by value and by storage
    for node in work.sequence:
        mine: list[Family] = []
        for value in node.writes:
            slot = work.values.get(value.base)
            if slot is None or value.kind not in KINDS or (value not in wanted and not slot.shares):
                continue
            keys = [value, *(storage.at(value.part) for storage, _ in slot.shares)]
            family = next((known[key] for key in keys if key in known), None)
            if family is None:
                devices = node.target if isinstance(node, Transfer) else node.devices
                chunk = wanted.get(value, "")
                family = Family([], devices, asked[chunk] if chunk else next(iter(asked.values())), chunk)
                mine.append(family)
            elif not family.chunk and value in wanted:
                family.chunk, family.asked = wanted[value], asked[wanted[value]]
            family.values.append(value)
            known |= dict.fromkeys(keys, family)
        families += mine
    families = [
        family
        for family in families
        if family.chunk
        and fixed.isdisjoint(family.values)
        and not any(value.owner in eager and value.kind in BUNDLES for value in family.values)
        and not any(work.values[value.base].dynamic for value in family.values)
    ]
    find_uses(work.sequence, families)
    return families


def find_uses(sequence: Sequence[Node], families: Sequence[Family]) -> None:
    """Note the places that write or read the values of each family."""
    owner = {value: family for family in families for value in family.values}
    for place, node in enumerate(sequence):
        for value in (*node.writes, *node.reads):
            if value in owner:
                owner[value].uses.setdefault(value, []).append(place)


def absences(family: Family, computes: list[int]) -> Iterator[Away]:
    """Yield the times between two uses that are long enough for both copies.

    computes: the places of the compute nodes of the family's devices.
    """
    ahead = family.asked.ahead
    places = sorted({place for found in family.uses.values() for place in found})
    for last, following in pairwise(places):
        low, high = bisect_right(computes, last), bisect_left(computes, following)
        if high - low >= 2 * ahead + SLACK:
            uses = family.uses.items()
            alive = [value for value, found in uses if found[0] <= last and found[-1] >= following]
            out, back = computes[low + ahead - 1], computes[high - ahead]
            yield Away(values=tuple(alive), last=last, next=following, out=out, back=back)


class _Weaving:
    """The copies to insert into the sequence, with the slots that they write."""

    def __init__(self, work: LoweringState) -> None:
        self.work = work
        self.values = dict(work.values)
        self.outs: dict[tuple[object, ...], tuple[Away, Family, list[SlotId]]] = {}
        self.backs: dict[tuple[object, ...], tuple[Away, Family, list[tuple[SlotId, SlotId]]]] = {}
        self.renamed: dict[int, dict[SlotId, SlotId]] = {}
        self.moved: dict[str, int] = {}  # bytes by chunk, of all microbatches
        self.stayed: dict[str, dict[str, None]] = {}  # the reasons, by chunk

    def add(self, family: Family, found: list[Away], work: LoweringState) -> None:
        """Add the copies of a family, or note why its values stay."""
        if not found:
            self.stayed.setdefault(family.chunk, {})["they are read again too soon"] = None
            return
        longest_first = sorted(found[0].values, key=lambda value: family.uses[value][-1], reverse=True)
        sizes = host_sizes(longest_first, work.values)
        if sum(sizes.values()) < max(1, family.asked.least):
            self.stayed.setdefault(family.chunk, {})["they are too small"] = None
            return
        self.moved[family.chunk] = self.moved.get(family.chunk, 0) + sum(sizes.values())
        turns = tuple((away.out, away.back) for away in found)
        key = (family.devices, family.asked, turns)
        self.outs.setdefault(key, (found[0], family, []))[2].extend(found[0].values)
        for value, nbytes in sizes.items():
            self.values[on_host(value).base] = Slot(nbytes=0, host=nbytes)
        for turn, away in enumerate(found):
            pairs = [(value, fetched(value, turn)) for value in away.values]
            self.backs.setdefault((key, turn), (away, family, []))[2].extend(pairs)
            until = found[turn + 1].next if turn + 1 < len(found) else len(work.sequence)
            for value, new in pairs:
                self.values[new.base] = moved_slot(work.values[value.base], turn)
                for place in family.uses[value]:
                    if away.next <= place < until:
                        self.renamed.setdefault(place, {})[value] = new

    def woven(self) -> LoweringState:
        """Return the state with all the copies in its sequence."""
        sequence = list(self.work.sequence)
        for place, names in self.renamed.items():
            node = sequence[place]
            sequence[place] = replace(node, reads=tuple(names.get(value, value) for value in node.reads))
        before: dict[int, list[tuple[int, Node]]] = {}
        after: dict[int, list[tuple[int, Node]]] = {}
        for away, family, values in self.outs.values():
            hosts = tuple(map(on_host, values))
            moving = sum(self.values[host.base].host for host in hosts)
            out = CopyOut(
                devices=family.devices, reads=tuple(values), writes=hosts, nbytes=moving,
                stream=f"{family.asked.stream}.out", origin=(family.asked.by,),
            )  # fmt: skip
            after.setdefault(away.out, []).append((away.last, out))
        for away, family, pairs in self.backs.values():
            hosts = tuple(on_host(value) for value, _ in pairs)
            moving = sum(self.values[host.base].host for host in hosts)
            back = CopyBack(
                devices=family.devices, reads=hosts, writes=tuple(new for _, new in pairs), nbytes=moving,
                stream=f"{family.asked.stream}.in", origin=(family.asked.by,),
            )  # fmt: skip
            before.setdefault(away.back, []).append((away.next, back))
        why = [
            f"{chunk}: some saved activations stay on the device, because {' or '.join(reasons)}"
            for chunk, reasons in self.stayed.items()
        ]
        return replace(
            self.work,
            sequence=woven(sequence, in_turn(before), in_turn(after)),
            values=self.values,
            why=(*self.work.why, *why),
        )


def in_turn(found: dict[int, list[tuple[int, Node]]]) -> dict[int, list[Node]]:
    """Return the nodes at each place in the order of the uses that they belong to."""
    return {
        place: [node for _, node in sorted(nodes, key=lambda entry: entry[0])]
        for place, nodes in found.items()
    }


def host_sizes(values: Sequence[SlotId], slots: Mapping[SlotId, Slot]) -> dict[SlotId, int]:
    """Return the bytes of each value on the host. A storage that several share counts for the first.

    values: the one that is used last comes first, because its copy holds the storage until then.
    """
    seen: set[tuple[SlotId, Tags]] = set()
    sizes: dict[SlotId, int] = {}
    for value in values:
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


def moved_slot(slot: Slot, turn: int) -> Slot:
    """Return the slot of a value that came back: as large as before, in storages of its own."""
    return replace(slot, shares=tuple((fetched(storage, turn), nbytes) for storage, nbytes in slot.shares))


def check_something(
    work: LoweringState, asked: Mapping[str, OffloadedChunk], families: Sequence[Family], weaving: _Weaving
) -> None:
    """Refuse a directive that selects no region with activations that can be offloaded."""
    for by in dict.fromkeys(how.by for how in asked.values()):
        chunks = [chunk for chunk, how in asked.items() if how.by == by]
        mine = [family for family in families if family.asked.by == by]
        if not mine:
            raise ScheduleError(
                "nothing that these regions save can be offloaded",
                by=work.graph.directives[by].title,
                facts={"regions": ", ".join(chunks[:3])},
                hint="select regions whose backward reads activations; rows that are routed, and what eager "
                "autograd saves, stay on the device",
            )
        small = any("they are too small" in weaving.stayed.get(chunk, ()) for chunk in chunks)
        if not small and not any(chunk in weaving.moved for chunk in chunks):
            ahead = asked[chunks[0]].ahead
            raise ScheduleError(
                "everything that these regions save is read again too soon",
                by=work.graph.directives[by].title,
                facts={
                    "regions": ", ".join(chunks[:3]),
                    "needed": f"{2 * ahead + SLACK} compute nodes of the device between two uses "
                    f"(ahead={ahead})",
                },
                hint="select earlier stages, split into more microbatches, or leave offload out",
            )
