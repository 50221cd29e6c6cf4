"""The text form of plans: one line per instruction, readable, and parsed back to the very same plans."""

from collections.abc import Collection, Iterator, Mapping
from typing import cast

from piper.devices import Devices, parse, show
from piper.errors import ConfigError
from piper.ids import Pass, SlotId, Tags, read_pass, read_slot
from piper.plan.instr import Adding, Collecting, Field, Instr, OfBucket, OfChunk, Payload, Routing, Rows
from piper.plan.ops import OPS, Op
from piper.plan.plan import Bucket, Comm, Piece, PlacedChunk, Plan, Plans, Slot
from piper.plan.sharding_text import (
    read_collective,
    read_sharding,
    read_shardings,
    show_collective,
    show_shardings,
)
from piper.protection import APART, Protection
from piper.text_fields import (
    AND,
    GAP,
    BadLineError,
    Readers,
    build,
    each_line,
    flag,
    line,
    name,
    names,
    numbers,
    pairs,
    read_fields,
    show_names,
    show_pairs,
    shown,
)

PAYLOADS: Mapping[Op, type] = {
    "load": Field,
    "compute": Pass,
    "send": Rows,
    "copy": Rows,
    "counts": Routing,
    "exchange": Routing,
    "collect": Collecting,
    "slice": Collecting,
    "gather": OfBucket,
    "accumulate": Adding,
    "all_reduce": OfBucket,
    "reduce_scatter": OfBucket,
    "broadcast": OfChunk,
}  # the other ops need nothing beyond their slots


def show_plans(plans: Plans) -> str:
    """Return the text form of plans."""
    return "\n".join(lines_of(plans)) + "\n"


def lines_of(plans: Plans) -> Iterator[str]:
    """Yield the lines of the text form, in the order `read_plans` expects."""
    axes = show_pairs(tuple(plans.axes.items()))
    shared = [f"weighted={int(plans.weighted)}", f"cells={plans.cells}", f"axes={axes}"]
    shared += [f"copies={plans.copies}"] if plans.copies > 1 else []
    shared += [f"protection={show_protection(plans.protection)}"] if plans.protection else []
    yield line("plans", f"seed={plans.seed!r}", shared)
    for reason in plans.why:
        yield line("why", shown(reason), [])
    for chunk, placed in plans.chunks.items():
        said = [f"tags={show_pairs(placed.tags)}", f"devices={show(placed.devices)}"]
        if placed.elsewhere:
            others = [f"{show_pairs(part)}@{show(devices)}" for part, devices in placed.elsewhere.items()]
            said.append(f"elsewhere={AND.join(others)}")
        yield line("chunk", shown(chunk), said)
    for comm in plans.comms.values():
        groups = AND.join(map(show, comm.groups))
        yield line("comm", shown(comm.name), [f"kind={comm.kind}", f"groups={groups}"])
    for bucket in plans.buckets.values():
        yield show_bucket(bucket)
    for plan in plans:
        yield line("plan", show(plan.devices), [])
        for kind, slots in (("resident", plan.residents), ("slot", plan.slots)):
            for slot_id, slot in slots.items():
                yield show_slot(kind, slot_id, slot)
        for ins in plan.instrs:
            yield show_instr(ins)


def show_slot(kind: str, slot_id: SlotId, slot: Slot) -> str:
    """Return the line of one slot: its id and what it holds."""
    held = [f"nbytes={slot.nbytes}"]
    if slot.shares:
        held.append(f"shares={AND.join(f'{storage}:{nbytes}' for storage, nbytes in slot.shares)}")
    held += ["dynamic=1"] if slot.dynamic else []
    held += [f"host={slot.host}"] if slot.host else []
    if slot.sharding.ways > 1:
        held += [f"sharding={show_shardings([slot.sharding])}", f"placed={show(slot.placed)}"]
    return line(kind, slot_id, held)


def show_bucket(bucket: Bucket) -> str:
    """Return the line of one bucket: its parameters, devices and sharding."""
    pieces = AND.join(
        f"{shown(piece.name)} {'x'.join(map(str, piece.shape)) or '-'} {piece.offset} "
        f"{show_shardings(piece.shardings) or '-'}"
        for piece in bucket.pieces
    )
    said = [
        f"devices={show(bucket.devices)}",
        f"groups={AND.join(map(show, bucket.groups))}",
        f"chunks={show_names(bucket.chunks)}",
        f"dtype={bucket.dtype}",
        f"itemsize={bucket.itemsize}",
        f"zero={bucket.zero}",
        f"trainable={int(bucket.trainable)}",
        f"copies={bucket.copies}",
        f"siblings={show_names(bucket.siblings)}",
        f"reduce_stream={bucket.reduce_stream}",
        f"gather_stream={bucket.gather_stream}",
        *([f"reduced_as={bucket.reduced_as}"] if bucket.reduced_as else []),
        *([f"gathered_as={bucket.gathered_as}"] if bucket.gathered_as else []),
        f"origin={' '.join(map(str, bucket.origin))}",
        *([f"bounds={' '.join(map(str, bucket.bounds))}"] if bucket.bounds else []),
        f"pieces={pieces}",
    ]
    return line("bucket", shown(bucket.name), said)


def show_instr(ins: Instr) -> str:
    """Return the line of one instruction, without the fields that are empty."""
    said = {
        "stream": ins.stream,
        "reads": AND.join(ins.reads),
        "writes": AND.join(ins.writes),
        "frees": AND.join(ins.frees),
        "waits": " ".join(map(str, ins.waits)),
        "signals": "" if ins.signals is None else str(ins.signals),
        "comm": shown(ins.comm) if ins.comm else "",
        **show_payload(ins.payload),
        "nbytes": str(ins.nbytes or ""),
        "workspace": str(ins.workspace or ""),
    }
    return line(ins.op, shown(ins.node), [f"{key}={text}" for key, text in said.items() if text])


def show_payload(payload: Payload) -> dict[str, str]:
    """Return the fields of an instruction's payload as text, by name."""
    match payload:
        case Pass():
            return {"run": str(payload)}
        case Field():
            return {
                "field": shown(payload.name),
                "part": show_pairs(payload.part),
                "devices": show(payload.devices),
                "degree": str(payload.degree) if payload.degree > 1 else "",
                "slices": show_shardings(payload.slices),
            }
        case Rows():
            return {"rows": f"{payload.start}:{payload.stop}/{payload.of}"}
        case Routing():
            return {"run": str(payload.run), "outward": str(int(payload.outward))}
        case Collecting():
            return {
                "run": str(payload.run),
                "how": show_collective(payload.how),
                "devices": show(payload.devices),
                "stride": str(payload.stride) if payload.devices else "",
            }
        case OfBucket():
            return {"bucket": shown(payload.bucket), "run": str(payload.run or "")}
        case Adding():
            return {"run": str(payload.run)}
        case OfChunk():
            return {"chunk": shown(payload.chunk)}
        case None:
            return {}


def read_rows(text: str) -> Rows:
    """Read which rows travel."""
    span, _, of = text.partition("/")
    start, _, stop = span.partition(":")
    return Rows(start=int(start), stop=int(stop), of=int(of))


def read_pieces(text: str) -> tuple[Piece, ...]:
    """Read a bucket's parameters."""
    pieces = []
    for piece in text.split(AND) if text else ():
        called, shape, offset, cut = piece.rsplit(" ", 3)
        sizes = () if shape == "-" else tuple(int(size) for size in shape.split("x"))
        held = read_shardings("" if cut == "-" else cut)
        pieces.append(Piece(name=name(called), shape=sizes, offset=int(offset), shardings=held))
    return tuple(pieces)


def show_protection(asked: Protection) -> str:
    """Write how copies of the state are kept."""
    return f"{asked.copies} {asked.apart} {asked.every} {asked.devices_per_machine or '-'}"


def read_protection(text: str) -> Protection:
    """Read how copies of the state are kept."""
    copies, apart, every, machine = text.split(" ")
    if apart not in APART:
        raise ValueError(f"{apart} is no distance between copies")
    return Protection(
        copies=int(copies),
        apart=apart,
        every=int(every),
        devices_per_machine=None if machine == "-" else int(machine),
    )


def read_elsewhere(text: str) -> dict[Tags, Devices]:
    """Return the microbatches that run on other devices than the first ones of their chunk."""
    cut = (each.rpartition("@") for each in text.split(AND))
    return {pairs(part): parse(devices) for part, _, devices in cut}


def read_groups(text: str) -> tuple[Devices, ...]:
    """Read groups of devices."""
    return tuple(parse(group) for group in names(text))


INSTR: Readers = {
    "stream": str,
    "waits": numbers,
    "signals": int,
    "comm": name,
    "nbytes": int,
    "workspace": int,
    "field": name,
    "part": pairs,
    "devices": parse,
    "rows": read_rows,
    "outward": flag,
    "how": read_collective,
    "degree": int,
    "stride": int,
    "slices": read_shardings,
    "bucket": name,
    "chunk": name,
}
SLOT: Readers = {"nbytes": int, "dynamic": flag, "host": int, "sharding": read_sharding, "placed": parse}
CHUNK: Readers = {"tags": pairs, "devices": parse, "elsewhere": read_elsewhere}
COMM: Readers = {"kind": str, "groups": read_groups}
BUCKET: Readers = {
    "devices": parse,
    "groups": read_groups,
    "chunks": names,
    "dtype": str,
    "itemsize": int,
    "zero": int,
    "trainable": flag,
    "copies": int,
    "siblings": names,
    "reduce_stream": str,
    "gather_stream": str,
    "reduced_as": str,
    "gathered_as": str,
    "origin": numbers,
    "bounds": numbers,
    "pieces": read_pieces,
}
SHARED: Readers = {
    "seed": float,
    "weighted": flag,
    "cells": int,
    "copies": int,
    "axes": lambda text: dict(pairs(text)),
    "protection": read_protection,
}


class Reading:
    """Plans under construction, line by line."""

    def __init__(self) -> None:
        self.axes: Collection[str] = ()
        self.slot_ids: dict[str, SlotId] = {}
        self.shared: dict[str, object] = {}
        self.why: list[str] = []
        self.chunks: dict[str, PlacedChunk] = {}
        self.comms: dict[str, Comm] = {}
        self.buckets: dict[str, Bucket] = {}
        self.plans: list[tuple[Devices, list[Instr], dict[SlotId, Slot], dict[SlotId, Slot]]] = []
        self.held: Readers = {**SLOT, "shares": self.shares}
        slots: Readers = dict.fromkeys(("reads", "writes", "frees"), self.slots)
        self.said: Readers = {**slots, **INSTR, "run": lambda text: read_pass(text, self.axes)}

    def take(self, kind: str, first: str, words: list[str]) -> None:
        """Read one line."""
        match kind:
            case "plans":
                self.shared = read_fields([first, *words], SHARED)
                self.axes = cast(Mapping[str, int], self.shared.get("axes", {}))
            case "why":
                self.why.append(GAP.join([name(first), *words]))
            case "chunk":
                self.chunks[name(first)] = build(PlacedChunk, **read_fields(words, CHUNK))
            case "comm":
                self.comms[name(first)] = build(Comm, name=name(first), **read_fields(words, COMM))
            case "bucket":
                self.buckets[name(first)] = build(Bucket, name=name(first), **read_fields(words, BUCKET))
            case "plan":
                self.plans.append((parse(first), [], {}, {}))
            case "slot" | "resident" if self.plans:
                _, _, slots, residents = self.plans[-1]
                held = slots if kind == "slot" else residents
                held[self.slot(first)] = build(Slot, **read_fields(words, self.held))
            case _ if kind in OPS and self.plans:
                self.plans[-1][1].append(self.instr(cast(Op, kind), first, words))
            case _:
                raise BadLineError(f"{kind!r} begins no line here")

    def slot(self, text: str) -> SlotId:
        """Return the id of a slot. Each text is parsed once."""
        if text not in self.slot_ids:
            self.slot_ids[text] = read_slot(text, self.axes)
        return self.slot_ids[text]

    def slots(self, text: str) -> tuple[SlotId, ...]:
        """Return the ids of several slots."""
        return tuple(map(self.slot, text.split(AND))) if text else ()

    def shares(self, text: str) -> tuple[tuple[SlotId, int], ...]:
        """Return the storages that a slot shares, with their sizes."""
        cut = (share.rpartition(":") for share in text.split(AND))
        return tuple((self.slot(storage), int(nbytes)) for storage, _, nbytes in cut)

    def instr(self, op: Op, node: str, words: list[str]) -> Instr:
        """Return an instruction, with the payload that its op has."""
        found = read_fields(words, self.said)
        about = {key: found.pop(key) for key in list(found) if key not in Instr.__slots__}
        return build(Instr, op=op, node=name(node), payload=payload_of(op, about), **found)

    def done(self) -> Plans:
        """Return the plans that were read."""
        plans = tuple(
            Plan(devices=devices, instrs=tuple(instrs), slots=slots, residents=residents)
            for devices, instrs, slots, residents in self.plans
        )
        found = {"comms": self.comms, "buckets": self.buckets, "chunks": self.chunks, "why": tuple(self.why)}
        return build(Plans, plans=plans, **found, **self.shared)


def payload_of(op: Op, about: dict[str, object]) -> Payload:
    """Return the payload of an instruction, built from the fields that are particular to its op."""
    kind = PAYLOADS.get(op)
    if kind is None or (kind is Rows and not about):
        if about:
            raise BadLineError(f"{op} has no {min(about)}")
        return None
    if kind is Pass or kind is Rows:
        only = [*about.values()]
        if len(only) != 1 or not isinstance(only[0], kind):
            raise BadLineError(f"{op} needs its {'run' if kind is Pass else 'rows'}, and nothing else")
        return cast(Payload, only[0])
    if kind is Field:
        called = {"name": about.pop("field")} if "field" in about else {}
        about = {"part": (), "devices": (), **about, **called}
    return cast(Payload, build(kind, **about))


def read_plans(text: str, source: str = "plans") -> Plans:
    """Read plans back from their text form."""
    reading = Reading()
    each_line(text, reading.take, source=source, hint="use the text as `piper plan --text` writes it")
    try:
        return reading.done()
    except BadLineError as error:
        raise ConfigError(
            "the text holds no plans",
            by=source,
            facts={"why": str(error)},
            hint="its first line begins with `plans`",
        ) from None
