"""The text form of plans: one line per instruction, readable, and parsed back to the very same plans."""

from collections.abc import Iterator
from typing import get_args

from piper.devices import Devices, parse, show
from piper.errors import ConfigError
from piper.fields import (
    AND,
    GAP,
    BadLineError,
    Readers,
    build,
    each_line,
    flag,
    join,
    line,
    names,
    numbers,
    pairs,
    quote,
    read_fields,
    show_pairs,
    unquote,
)
from piper.plan.instr import Instr, Op
from piper.plan.plan import Bucket, Comm, Piece, Plan, Plans, Slot

OPS = frozenset(get_args(Op))


def show_plans(plans: Plans) -> str:
    """Write plans down."""
    return "\n".join(lines_of(plans)) + "\n"


def lines_of(plans: Plans) -> Iterator[str]:
    """The lines of the text form, in the order `read_plans` expects."""
    axes = show_pairs(tuple(plans.axes.items()))
    shared = [f"weighted={int(plans.weighted)}", f"cells={plans.cells}", f"axes={axes}"]
    yield line("plans", f"seed={plans.seed!r}", shared)
    for reason in plans.why:
        yield line("why", reason, [])
    for comm in plans.comms.values():
        yield line("comm", comm.name, [f"kind={comm.kind}", f"groups={AND.join(map(show, comm.groups))}"])
    for bucket in plans.buckets.values():
        yield show_bucket(bucket)
    for plan in plans:
        yield line("plan", show(plan.devices), [])
        for kind, slots in (("resident", plan.residents), ("slot", plan.slots)):
            for name, slot in slots.items():
                yield show_slot(kind, name, slot)
        for ins in plan.instrs:
            yield show_instr(ins)


def show_slot(kind: str, name: str, slot: Slot) -> str:
    """One slot: its name and what it holds."""
    shown = [f"nbytes={slot.nbytes}"]
    if slot.shares:
        shown.append(f"shares={join(f'{storage}:{nbytes}' for storage, nbytes in slot.shares)}")
    return line(kind, name, [*shown, *(["dynamic=1"] if slot.dynamic else [])])


def show_bucket(bucket: Bucket) -> str:
    """One bucket: its parameters and how they live."""
    pieces = join(f"{p.name} {'x'.join(map(str, p.shape)) or '-'} {p.offset}" for p in bucket.pieces)
    shown = [
        f"devices={show(bucket.devices)}",
        f"groups={AND.join(map(show, bucket.groups))}",
        f"chunks={join(bucket.chunks)}",
        f"dtype={bucket.dtype}",
        f"itemsize={bucket.itemsize}",
        f"zero={bucket.zero}",
        f"ways={bucket.ways}",
        f"trainable={int(bucket.trainable)}",
        f"copies={bucket.copies}",
        f"siblings={join(bucket.siblings)}",
        f"reduce_stream={bucket.reduce_stream}",
        f"gather_stream={bucket.gather_stream}",
        f"origin={' '.join(map(str, bucket.origin))}",
        f"pieces={pieces}",
    ]
    return line("bucket", bucket.name, shown)


def show_instr(ins: Instr) -> str:
    """One instruction: what it is, then only what it has."""
    fields = {
        "stream": ins.stream,
        "reads": join(ins.reads),
        "writes": join(ins.writes),
        "frees": join(ins.frees),
        "waits": " ".join(map(str, ins.waits)),
        "signals": "" if ins.signals is None else str(ins.signals),
        "comm": quote(ins.comm or ""),
        "arg": quote(ins.arg),
        "part": show_pairs(ins.part),
        "devices": show(ins.devices),
        "nbytes": str(ins.nbytes or ""),
        "workspace": str(ins.workspace or ""),
    }
    shown = [f"{key}={text}" for key, text in fields.items() if text]
    return line(ins.op, ins.node, shown)


def read_shares(text: str) -> tuple[tuple[str, int], ...]:
    """Read the storages that a slot shares."""
    return tuple(
        (storage, int(nbytes)) for storage, _, nbytes in (share.rpartition(":") for share in names(text))
    )


def read_pieces(text: str) -> tuple[Piece, ...]:
    """Read a bucket's parameters."""
    pieces = []
    for piece in names(text):
        name, shape, offset = piece.rsplit(" ", 2)
        sizes = () if shape == "-" else tuple(int(size) for size in shape.split("x"))
        pieces.append(Piece(name=name, shape=sizes, offset=int(offset)))
    return tuple(pieces)


def read_groups(text: str) -> tuple[Devices, ...]:
    """Read groups of devices."""
    return tuple(parse(group) for group in names(text))


INSTR: Readers = {
    "stream": str,
    "reads": names,
    "writes": names,
    "frees": names,
    "waits": numbers,
    "signals": int,
    "comm": unquote,
    "arg": unquote,
    "part": pairs,
    "devices": parse,
    "nbytes": int,
    "workspace": int,
}
SLOT: Readers = {"nbytes": int, "shares": read_shares, "dynamic": flag}
COMM: Readers = {"kind": str, "groups": read_groups}
BUCKET: Readers = {
    "devices": parse,
    "groups": read_groups,
    "chunks": names,
    "dtype": str,
    "itemsize": int,
    "zero": int,
    "ways": int,
    "trainable": flag,
    "copies": int,
    "siblings": names,
    "reduce_stream": str,
    "gather_stream": str,
    "origin": numbers,
    "pieces": read_pieces,
}
SHARED: Readers = {"seed": float, "weighted": flag, "cells": int, "axes": lambda text: dict(pairs(text))}


class Reading:
    """Plans under construction, line by line."""

    def __init__(self) -> None:
        self.shared: dict[str, object] = {}
        self.why: list[str] = []
        self.comms: dict[str, Comm] = {}
        self.buckets: dict[str, Bucket] = {}
        self.plans: list[tuple[Devices, list[Instr], dict[str, Slot], dict[str, Slot]]] = []

    def take(self, kind: str, name: str, words: list[str]) -> None:
        """Take one line."""
        match kind:
            case "plans":
                self.shared = read_fields([name, *words], SHARED)
            case "why":
                self.why.append(GAP.join([name, *words]))
            case "comm":
                self.comms[name] = build(Comm, name=name, **read_fields(words, COMM))
            case "bucket":
                self.buckets[name] = build(Bucket, name=name, **read_fields(words, BUCKET))
            case "plan":
                self.plans.append((parse(name), [], {}, {}))
            case "slot" | "resident" if self.plans:
                _, _, slots, residents = self.plans[-1]
                held = slots if kind == "slot" else residents
                held[name] = build(Slot, **read_fields(words, SLOT))
            case _ if kind in OPS and self.plans:
                self.plans[-1][1].append(build(Instr, op=kind, node=name, **read_fields(words, INSTR)))
            case _:
                raise BadLineError(f"{kind!r} begins no line here")

    def done(self) -> Plans:
        """The plans that were read."""
        plans = tuple(
            Plan(devices=devices, instrs=tuple(instrs), slots=slots, residents=residents)
            for devices, instrs, slots, residents in self.plans
        )
        return build(
            Plans, plans=plans, comms=self.comms, buckets=self.buckets, why=tuple(self.why), **self.shared
        )


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
