"""The text form of plans: one line per instruction, readable, and parsed back to the very same plans."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import TypeVar, get_args

from piper.devices import Devices, parse, show
from piper.errors import ConfigError
from piper.plan.instr import Instr, Op
from piper.plan.plan import Bucket, Comm, Piece, Plan, Plans, Slot

GAP = "  "  # between fields; names hold single blanks only
AND = " | "  # between the members of a list
FIELD = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
OPS = frozenset(get_args(Op))
Part = tuple[tuple[str, int], ...]
T = TypeVar("T")


def show_plans(plans: Plans) -> str:
    """Write plans down."""
    return "\n".join(lines_of(plans)) + "\n"


def lines_of(plans: Plans) -> Iterator[str]:
    """The lines of the text form, in the order `read_plans` expects."""
    yield GAP.join(
        ["plans", f"seed={plans.seed!r}", f"weighted={int(plans.weighted)}", f"cells={plans.cells}",
         f"axes={show_part(tuple(plans.axes.items()))}"]
    )  # fmt: skip
    for reason in plans.why:
        yield f"why{GAP}{reason}"
    for comm in plans.comms.values():
        yield GAP.join(["comm", comm.name, f"kind={comm.kind}", f"groups={AND.join(map(show, comm.groups))}"])
    for bucket in plans.buckets.values():
        yield show_bucket(bucket)
    for plan in plans:
        yield f"plan{GAP}{show(plan.devices)}"
        for kind, slots in (("resident", plan.residents), ("slot", plan.slots)):
            for name, slot in slots.items():
                yield show_slot(kind, name, slot)
        for ins in plan.instrs:
            yield show_instr(ins)


def show_part(part: Part) -> str:
    return " ".join(f"{axis}={index}" for axis, index in part)


def show_slot(kind: str, name: str, slot: Slot) -> str:
    """One slot: its name and what it holds."""
    shown = [kind, name, f"nbytes={slot.nbytes}"]
    if slot.shares:
        shown.append(f"shares={AND.join(f'{storage}:{nbytes}' for storage, nbytes in slot.shares)}")
    return GAP.join([*shown, *(["dynamic=1"] if slot.dynamic else [])])


def show_bucket(bucket: Bucket) -> str:
    """One bucket: its parameters and how they live."""
    pieces = AND.join(f"{p.name} {'x'.join(map(str, p.shape)) or '-'} {p.offset}" for p in bucket.pieces)
    return GAP.join(
        [
            "bucket",
            bucket.name,
            f"devices={show(bucket.devices)}",
            f"groups={AND.join(map(show, bucket.groups))}",
            f"chunks={AND.join(bucket.chunks)}",
            f"dtype={bucket.dtype}",
            f"itemsize={bucket.itemsize}",
            f"zero={bucket.zero}",
            f"ways={bucket.ways}",
            f"trainable={int(bucket.trainable)}",
            f"copies={bucket.copies}",
            f"siblings={AND.join(bucket.siblings)}",
            f"reduce_stream={bucket.reduce_stream}",
            f"gather_stream={bucket.gather_stream}",
            f"origin={' '.join(map(str, bucket.origin))}",
            f"pieces={pieces}",
        ]
    )


def show_instr(ins: Instr) -> str:
    """One instruction: what it is, then only what it has."""
    shown = [ins.op, ins.node, f"stream={ins.stream}"]
    for name in ("reads", "writes", "frees"):
        if slots := getattr(ins, name):
            shown.append(f"{name}={AND.join(slots)}")
    if ins.waits:
        shown.append(f"waits={' '.join(map(str, ins.waits))}")
    if ins.signals is not None:
        shown.append(f"signals={ins.signals}")
    if ins.comm is not None:
        shown.append(f"comm={ins.comm}")
    if ins.arg:
        shown.append(f"arg={ins.arg}")
    if ins.part:
        shown.append(f"part={show_part(ins.part)}")
    if ins.devices:
        shown.append(f"devices={show(ins.devices)}")
    for name in ("nbytes", "workspace"):
        if number := getattr(ins, name):
            shown.append(f"{name}={number}")
    return GAP.join(shown)


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(AND)) if text else ()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def read_part(text: str) -> Part:
    pairs = [word.partition("=") for word in text.split()]
    return tuple((axis, int(index)) for axis, _, index in pairs)


def read_shares(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((storage, int(nbytes)) for storage, _, nbytes in (share.rpartition(":") for share in names(text)))


def read_pieces(text: str) -> tuple[Piece, ...]:
    pieces = []
    for piece in names(text):
        name, shape, offset = piece.rsplit(" ", 2)
        sizes = () if shape == "-" else tuple(int(size) for size in shape.split("x"))
        pieces.append(Piece(name=name, shape=sizes, offset=int(offset)))
    return tuple(pieces)


def read_groups(text: str) -> tuple[Devices, ...]:
    return tuple(parse(group) for group in names(text))


Reader = Callable[[str], object]
INSTR_READERS: dict[str, Reader] = {
    "stream": str, "reads": names, "writes": names, "frees": names, "waits": numbers, "signals": int, "comm": str,
    "arg": str, "part": read_part, "devices": parse, "nbytes": int, "workspace": int,
}  # fmt: skip
SLOT_READERS: dict[str, Reader] = {"nbytes": int, "shares": read_shares, "dynamic": lambda text: text == "1"}
COMM_READERS: dict[str, Reader] = {"kind": str, "groups": read_groups}
BUCKET_READERS: dict[str, Reader] = {
    "devices": parse, "groups": read_groups, "chunks": names, "dtype": str, "itemsize": int, "zero": int,
    "ways": int, "trainable": lambda text: text == "1", "copies": int, "siblings": names, "reduce_stream": str,
    "gather_stream": str, "origin": numbers, "pieces": read_pieces,
}  # fmt: skip
PLANS_READERS: dict[str, Reader] = {
    "seed": float, "weighted": lambda text: text == "1", "cells": int, "axes": lambda text: dict(read_part(text)),
}  # fmt: skip


class BadLineError(Exception):
    """A line that is not of the text form; `read_plans` says which."""


def read_fields(words: Iterable[str], readers: dict[str, Reader]) -> dict[str, object]:
    """The fields of a line, each read by its reader."""
    found: dict[str, object] = {}
    for word in words:
        match = FIELD.fullmatch(word)
        if match is None or match[1] not in readers or match[1] in found:
            raise BadLineError(f"{word!r} is not one of {', '.join(readers)}")
        try:
            found[match[1]] = readers[match[1]](match[2])
        except ValueError as error:
            raise BadLineError(f"{word!r} cannot be read: {error}") from None
    return found


class Reading:
    """Plans under construction, line by line."""

    def __init__(self) -> None:
        self.shared: dict[str, object] = {}
        self.why: list[str] = []
        self.comms: dict[str, Comm] = {}
        self.buckets: dict[str, Bucket] = {}
        self.plans: list[tuple[Devices, list[Instr], dict[str, Slot], dict[str, Slot]]] = []

    def take(self, line: str) -> None:
        """Take one line."""
        kind, name, *words = [*line.split(GAP), ""][:2] + line.split(GAP)[2:]
        match kind:
            case "plans":
                self.shared = read_fields([name, *words], PLANS_READERS)
            case "why":
                self.why.append(GAP.join([name, *words]))
            case "comm":
                self.comms[name] = build(Comm, name=name, **read_fields(words, COMM_READERS))
            case "bucket":
                self.buckets[name] = build(Bucket, name=name, **read_fields(words, BUCKET_READERS))
            case "plan":
                self.plans.append((parse(name), [], {}, {}))
            case "slot" | "resident" if self.plans:
                held = self.plans[-1][2 if kind == "slot" else 3]
                held[name] = build(Slot, **read_fields(words, SLOT_READERS))
            case _ if kind in OPS and self.plans:
                self.plans[-1][1].append(build(Instr, op=kind, node=name, **read_fields(words, INSTR_READERS)))
            case _:
                raise BadLineError(f"{kind!r} begins no line here")

    def done(self) -> Plans:
        plans = tuple(
            Plan(devices=devices, instrs=tuple(instrs), slots=slots, residents=residents)
            for devices, instrs, slots, residents in self.plans
        )
        return build(
            Plans, plans=plans, comms=self.comms, buckets=self.buckets, why=tuple(self.why), **self.shared
        )


def build(record: Callable[..., T], /, **values: object) -> T:
    """Make a record of a line's fields; one that is missing is the line's fault."""
    try:
        return record(**values)
    except TypeError:
        needed = {f.name for f in fields(record)} - set(values)  # type: ignore[arg-type]
        raise BadLineError(f"it lacks one of {', '.join(sorted(needed))}") from None


def read_plans(text: str, source: str = "plans") -> Plans:
    """Read plans back from their text form."""
    reading = Reading()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reading.take(line)
        except (BadLineError, ValueError) as error:
            raise ConfigError(
                "this line is not of a plan",
                by=f"{source}:{number}",
                facts={"line": line[:120], "why": str(error)},
                hint="use the text as `piper plan` and `train` write it",
            ) from None
    try:
        return reading.done()
    except BadLineError as error:
        raise ConfigError(
            "the text holds no plans", by=source, facts={"why": str(error)}, hint="its first line begins with `plans`"
        ) from None
