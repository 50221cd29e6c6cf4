"""The text form of plans: one line per instruction, readable, and parsed back to the very same plans.

Records are written from their fields, each by its type: see `FORMS`. A field that has its default is left
out, but for those in `ALWAYS`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from piper.errors import ConfigError
from piper.ir.devices import Devices, parse, show
from piper.ir.ids import Pass, SlotId, Tags, read_pass, read_slot
from piper.ir.sharding import (
    Collective,
    Sharding,
    read_collective,
    read_sharding,
    read_shardings,
    show_collective,
    show_shardings,
)
from piper.ir.text_fields import (
    AND,
    GAP,
    BadLineError,
    Reader,
    Readers,
    build,
    flag,
    line,
    name,
    names,
    numbers,
    pairs,
    read_fields,
    show_pairs,
    shown,
)
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import OPS, PAYLOADS, Collecting, Op, Payload, Routing, Rows
from piper.plan.plan import Comm, PlacedChunk, Plan, Plans, Slot
from piper.plan.updates import Piece

T = TypeVar("T")
Shares = tuple[tuple[SlotId, int], ...]
SETS = tuple[Devices, ...]
ALONE: Mapping[object, str] = {Pass: "run", Rows: "rows"}  # payloads that are one field of a line
RECORDS: Mapping[str, type] = {"chunk": PlacedChunk, "comm": Comm, "bucket": Bucket}  # of `Plans`, by name
ELSEWHERE: Mapping[type, Collection[str]] = {  # fields that begin a line, or have lines of their own
    Instr: ("op", "node"),
    Comm: ("name",),
    Bucket: ("name",),
    Plans: ("plans", "comms", "buckets", "chunks", "why"),
}
ALWAYS: Mapping[type, Collection[str]] = {  # fields that are written also where they have their default
    Plans: ("cells", "axes"),
    Bucket: ("zero", "trainable", "copies", "siblings", "reduce_stream", "gather_stream", "origin"),
    Routing: ("outward",),
}


def show_plans(plans: Plans) -> str:
    """Return the text form of plans: its lines in the order `read_plans` expects."""
    lines = [GAP.join(["plans", *show_fields(plans)]), *(line("why", shown(why), []) for why in plans.why)]
    for kind in RECORDS:
        named = getattr(plans, f"{kind}s").items()
        lines += [line(kind, shown(called), show_fields(record)) for called, record in named]
    for plan in plans:
        lines.append(line("plan", show(plan.devices), []))
        for kind, slots in (("resident", plan.residents), ("slot", plan.slots)):
            lines += [line(kind, slot_id, show_fields(slot)) for slot_id, slot in slots.items()]
        lines += map(show_instr, plan.instrs)
    return "\n".join([*lines, ""])


def show_instr(ins: Instr) -> str:
    """Return the line of one instruction."""
    return line(ins.op, shown(ins.node), show_fields(ins))


def show_payload(payload: Payload) -> Iterator[str]:
    """Yield the fields of an instruction's payload as text."""
    if isinstance(payload, Pass | Rows):
        show_it, _ = FORMS[type(payload)]
        yield f"{ALONE[type(payload)]}={show_it(payload)}"
    elif payload is not None:
        yield from show_fields(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldText:
    """How a field of a record is written."""

    field: str
    key: str
    type: object  # of `FORMS`
    show: Callable[[Any], str] | None  # None: it is a payload, which has fields of its own
    default: object  # MISSING: it has none


@cache
def field_texts(record: type) -> tuple[FieldText, ...]:
    """Return how the fields of a record are written in its line, in order."""
    texts = []
    for field in fields(record):
        if field.name in ELSEWHERE.get(record, ()):
            continue
        kind = NUMBERS if field.name in NUMBERS else field.type
        texts.append(
            FieldText(
                field=field.name,
                key=field.metadata.get("key", field.name),
                type=kind,
                show=None if kind == Payload else form_of(kind)[0],
                default=field.default if field.default_factory is MISSING else field.default_factory(),
            )
        )
    return tuple(texts)


def show_fields(record: Any) -> Iterator[str]:  # noqa: ANN401  any record with a line
    """Yield the fields of a record as text, without those that have their default."""
    kind: type = type(record)
    always = ALWAYS.get(kind, ())
    if isinstance(record, Collecting) and record.devices:
        always = ("stride",)
    for each in field_texts(kind):
        value = getattr(record, each.field)
        if value == each.default and each.field not in always:
            continue
        if each.show is None:
            yield from show_payload(value)
        else:
            yield f"{each.key}={each.show(value)}"


def read_rows(text: str) -> Rows:
    """Read which rows travel."""
    span, _, of = text.partition("/")
    start, _, stop = span.partition(":")
    return Rows(start=int(start), stop=int(stop), of=int(of))


def show_pieces(pieces: tuple[Piece, ...]) -> str:
    """Write a bucket's parameters."""
    return AND.join(
        f"{shown(piece.name)} {'x'.join(map(str, piece.shape)) or '-'} {piece.offset} "
        f"{show_shardings(piece.shardings) or '-'}"
        for piece in pieces
    )


def read_pieces(text: str) -> tuple[Piece, ...]:
    """Read a bucket's parameters."""
    pieces = []
    for piece in text.split(AND) if text else ():
        called, shape, offset, cut = piece.rsplit(" ", 3)
        sizes = () if shape == "-" else tuple(int(size) for size in shape.split("x"))
        held = read_shardings("" if cut == "-" else cut)
        pieces.append(Piece(name=name(called), shape=sizes, offset=int(offset), shardings=held))
    return tuple(pieces)


def show_words(record: Any) -> str:  # noqa: ANN401  any record
    """Write the fields of a record in order, a word for each; sets of devices come last."""
    words: list[str] = []
    for field in fields(record):
        value, (show_it, _) = getattr(record, field.name), form_of(field.type)
        words += map(show, value) if field.type == SETS else ["-" if value is None else show_it(value)]
    return " ".join(words)


def read_words(record: type[T], words: Iterator[str]) -> T:
    """Read a record from the words that its fields take."""

    def value_of(kind: Any) -> object:  # noqa: ANN401  the type of a field
        if kind == SETS:
            return tuple(map(parse, words))
        if isinstance(kind, type) and is_dataclass(kind):
            return read_words(kind, words)
        word = next(words, "")
        return None if word == "-" else form_of(kind)[1](word)

    return record(**{field.name: value_of(field.type) for field in fields(cast(Any, record))})


def read_choice(choices: Collection[str], text: str) -> str:
    """Read one of some words."""
    if text not in choices:
        raise ValueError(f"it is one of {', '.join(choices)}")
    return text


def form_of(kind: Any) -> tuple[Callable[[Any], str], Reader]:  # noqa: ANN401  the type of a field
    """Return by what a field of a type is written and read: as `FORMS` says, or as a record of words."""
    if kind in FORMS:
        return FORMS[kind]
    if get_origin(kind) is Literal:
        return str, partial(read_choice, get_args(kind))
    record = kind if isinstance(kind, type) else get_args(kind)[0]  # of an optional one
    return show_words, lambda text: read_words(record, iter(text.split(" ")))


def read_elsewhere(text: str) -> dict[Tags, Devices]:
    """Read the microbatches that run on other devices than the first ones of their chunk."""
    cut = (each.rpartition("@") for each in text.split(AND))
    return {pairs(part): parse(devices) for part, _, devices in cut}


NUMBERS = ("waits", "origin", "bounds")  # fields with numbers that are no devices
FORMS: Mapping[object, tuple[Callable[[Any], str], Reader]] = {  # by a field's type: written and read by
    int: (str, int),
    int | None: (str, int),
    float: (repr, float),
    bool: (lambda value: str(int(value)), flag),
    str: (shown, name),
    str | None: (shown, name),
    tuple[str, ...]: (lambda found: AND.join(map(shown, found)), names),
    NUMBERS: (lambda found: " ".join(map(str, found)), numbers),
    Devices: (show, parse),
    SETS: (lambda groups: AND.join(map(show, groups)), lambda text: tuple(map(parse, names(text)))),
    Tags: (show_pairs, pairs),
    Mapping[str, int]: (lambda axes: show_pairs(tuple(axes.items())), lambda text: dict(pairs(text))),
    Mapping[Tags, Devices]: (
        lambda placed: AND.join(f"{show_pairs(part)}@{show(devices)}" for part, devices in placed.items()),
        read_elsewhere,
    ),
    Sharding: (lambda held: show_shardings([held]), read_sharding),
    tuple[Sharding, ...]: (show_shardings, read_shardings),
    Collective: (show_collective, read_collective),
    tuple[Piece, ...]: (show_pieces, read_pieces),
    Rows: (lambda rows: f"{rows.start}:{rows.stop}/{rows.of}", read_rows),
    Pass: (str, str),  # these four are read by `Reading`, which knows the axes
    Pass | None: (str, str),
    tuple[SlotId, ...]: (AND.join, str),
    Shares: (lambda shares: AND.join(f"{storage}:{nbytes}" for storage, nbytes in shares), str),
}  # fmt: skip


class Reading:
    """Plans under construction, line by line."""

    def __init__(self) -> None:
        self.axes: Collection[str] = ()
        self.slot = cache(lambda text: read_slot(text, self.axes))  # each text is parsed once
        self.shared: dict[str, object] = {}
        self.why: list[str] = []
        self.records: dict[str, dict[str, Any]] = {kind: {} for kind in RECORDS}
        self.plans: list[tuple[Devices, list[Instr], dict[SlotId, Slot], dict[SlotId, Slot]]] = []
        self.forms: dict[object, Reader] = {kind: read for kind, (_, read) in FORMS.items()}
        self.forms |= {tuple[SlotId, ...]: self.slots, Shares: self.shares}
        self.forms |= dict.fromkeys((Pass, Pass | None), lambda text: read_pass(text, self.axes))
        self.known: dict[object, Readers] = {}  # readers of lines, by record and by op

    def readers(self, record: type) -> Readers:
        """Return the readers of a record's fields, by their keys."""
        if record in ALONE:
            return {ALONE[record]: self.forms[record]}
        if record not in self.known:
            said = (each for each in field_texts(record) if each.show is not None)
            self.known[record] = {
                each.key: self.forms.get(each.type) or form_of(each.type)[1] for each in said
            }
        return self.known[record]

    def record(self, record: type[T], words: list[str], **given: object) -> T:
        """Read a record from the fields of its line; `given`: the fields that are read already."""
        return build(record, **given, **read_fields(words, self.readers(record)))

    def take(self, kind: str, first: str, words: list[str]) -> None:
        """Read one line."""
        match kind:
            case "plans":
                self.shared = read_fields([first, *words], self.readers(Plans))
                self.axes = cast(Mapping[str, int], self.shared.get("axes", {}))
            case "why":
                self.why.append(GAP.join([name(first), *words]))
            case "chunk" | "comm" | "bucket":
                named = {"name": name(first)} if "name" in ELSEWHERE.get(RECORDS[kind], ()) else {}
                self.records[kind][name(first)] = self.record(RECORDS[kind], words, **named)
            case "plan":
                self.plans.append((parse(first), [], {}, {}))
            case "slot" | "resident" if self.plans:
                _, _, slots, residents = self.plans[-1]
                (slots if kind == "slot" else residents)[self.slot(first)] = self.record(Slot, words)
            case _ if kind in OPS and self.plans:
                self.plans[-1][1].append(self.instr(cast(Op, kind), first, words))
            case _:
                raise BadLineError(f"{kind!r} begins no line here")

    def slots(self, text: str) -> tuple[SlotId, ...]:
        """Return the ids of several slots."""
        return tuple(map(self.slot, text.split(AND))) if text else ()

    def shares(self, text: str) -> Shares:
        """Return the storages that a slot shares, with their sizes."""
        cut = (share.rpartition(":") for share in text.split(AND))
        return tuple((self.slot(storage), int(nbytes)) for storage, _, nbytes in cut)

    def instr(self, op: Op, node: str, words: list[str]) -> Instr:
        """Return an instruction, with the payload that its op has."""
        kind = PAYLOADS.get(op)
        if op not in self.known:
            self.known[op] = {**self.readers(Instr), **({} if kind is None else self.readers(kind))}
        found = read_fields(words, self.known[op])
        about = {key: found.pop(key) for key in list(found) if key not in Instr.__slots__}
        return build(Instr, op=op, node=name(node), payload=payload_of(op, about), **found)

    def done(self) -> Plans:
        """Return the plans that were read."""
        plans = tuple(
            Plan(devices=devices, instrs=tuple(instrs), slots=slots, residents=residents)
            for devices, instrs, slots, residents in self.plans
        )
        found = {f"{kind}s": records for kind, records in self.records.items()}
        return build(Plans, plans=plans, why=tuple(self.why), **found, **self.shared)


def payload_of(op: Op, about: dict[str, object]) -> Payload:
    """Return the payload of an instruction, built from the fields that are particular to its op."""
    kind = PAYLOADS.get(op)
    if kind is None or (kind is Rows and not about):
        return None
    if kind in ALONE:
        if not about:
            raise BadLineError(f"{op} needs its {ALONE[kind]}")
        return cast(Payload, about[ALONE[kind]])
    by_key = {each.key: each.field for each in field_texts(kind)}
    return cast(Payload, build(kind, **{by_key[key]: value for key, value in about.items()}))


def read_plans(text: str, source: str = "plans") -> Plans:
    """Read plans back from their text form."""
    reading = Reading()
    for number, written in enumerate(text.splitlines(), 1):
        kind, *rest = written.split(GAP)
        try:
            reading.take(kind, rest[0] if rest else "", rest[1:])
        except (BadLineError, ValueError) as error:
            raise ConfigError(
                "this line cannot be read",
                by=f"{source}:{number}",
                facts={"line": written[:120], "why": str(error)},
                hint="use the text as `piper plan --text` writes it",
            ) from None
    try:
        return reading.done()
    except BadLineError as error:
        raise ConfigError(
            "the text holds no plans",
            by=source,
            facts={"why": str(error)},
            hint="its first line begins with `plans`",
        ) from None
