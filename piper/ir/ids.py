"""The ids of passes and slots, as data that graphs and plans share, and their text form.

Code asks an id for its fields and never reads them off its text.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, cast, get_args

from piper.ir.devices import Devices, parse, show
from piper.ir.text_fields import BadLineError, name, pairs, quoted, show_pairs

Tags = tuple[tuple[str, int], ...]  # (("PP", 0), ("EP", 2)): the annotations around a region, outermost first
Phase = Literal["F", "B", "BI", "BW"]  # forward; backward, whole or as input gradients and weight gradients
PHASES: tuple[Phase, ...] = get_args(Phase)
AGAIN: Final = "R"  # stands for the F of a forward that runs a second time

SlotKind = Literal[
    "output",  # of a chunk
    "input_gradient",  # that a chunk gives for one of its inputs
    "gradient_sum",  # of an output's gradients that come from several readers
    "saved",  # what a forward saves for its backward
    "kept",  # and for its weight gradients, which may run later
    "carried",  # from input gradients to weight gradients
    "splits",  # how many rows go to which expert
    "storage",  # that several slots share
    "gradient",  # of a bucket, by one backward
    "grad",  # of a bucket, added up
    "grad_inside",  # a device's shard of it, reduced inside its group
    "grad_shard",  # a device's shard of it, reduced
    "grad_full",  # of the parameters that a device updates in full, where devices have slices
    "param",
    "state",  # of the optimizer
    "copy",  # of what a device owns of a bucket, in memory that outlives workers
    "host",  # a copy of a value in memory of the host: its owner is the value
    "fetched",  # such a copy, brought back to the device
    "whole",  # sharded parameters, gathered
    "batch",  # a field of the batch
    "buffer",
    "constant",
    "place",  # of a device in its groups along an axis
    "host_place",  # the same, in memory of the host
    "loss",
    "weight",
    "metrics",  # sums and weights of what a loss returns beside the loss
    "term",  # of another sum of the step, which owns it: see `StepSum`
    "norm",
    "total",  # the sums of a step over all devices
    "seed",  # the gradient that each microbatch's loss starts from
]
# Slots without an owner, and slots that are named after their kind.
OF_STEP: Final[Collection[SlotKind]] = ("loss", "weight", "metrics", "norm", "total", "seed")
NAMED: Final[Collection[SlotKind]] = ("batch", "buffer", "constant", "place", "host_place")
INDEXED: Final[Mapping[SlotKind, str]] = {
    "output": "out",
    "input_gradient": "din",
    "gradient_sum": "grad",
    "storage": "storage",
    "fetched": "fetched",
}
WORDS: Final[Mapping[str, SlotKind]] = {
    **{word: kind for kind, word in INDEXED.items() if kind != "gradient_sum"},
    **{kind: kind for kind in get_args(SlotKind) if kind not in (*OF_STEP, *NAMED, *INDEXED)},
    "g": "gradient",
}
NAME = r'"(?:[^"\\]|\\.)*"|[^"\[\]<>]+'
AT = r"(?P<devices>(?:@[\d,/-]+)*)"
PART = r"(?:\[(?P<part>.*)\])?"
OWNED = re.compile(
    rf"(?P<owner>{NAME})\.(?P<word>{'|'.join(WORDS)})(?P<index>\d*)(?:\.(?P<number>\d+))?(?:<(?P<reader>{NAME})>)?"
    rf"{AT}(?P<again>\.again)?{PART}(?:\.piece(?P<piece>\d+))?"
)
LISTED = re.compile(rf"(?P<word>{'|'.join(NAMED)})\.(?P<owner>{NAME}?){AT}{PART}")
PASS = re.compile(rf"(?P<phase>BI|BW|F|B|R)\[(?P<chunk>{NAME}?)(?P<part>(?: \w+=\d+)*)\]")
PLAIN = re.compile(r"(?!(?:batch|buffer|constant|place|host_place)\.)[\w./=#@,'+*:-]+(?: [\w./=#@,'+*:-]+)*")


@lru_cache(maxsize=4096)
def show_part(part: Tags) -> str:
    """Write a microbatch: ` MB=0`, or nothing for all samples."""
    return "".join(f" {axis}={index}" for axis, index in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One phase of a chunk on one microbatch."""

    phase: Phase
    chunk: str
    part: Tags = ()
    again: bool = False  # a forward that runs a second time

    def __str__(self) -> str:
        letter = AGAIN if self.again else self.phase
        return f"{letter}[{plain(self.chunk)}{show_part(self.part)}]"


def read_pass(text: str, axes: Collection[str]) -> Pass:
    """Read a pass from its text. axes: those of microbatches, with which no chunk is tagged."""
    match = PASS.fullmatch(text)
    if match is None:
        raise BadLineError(f"{text!r} is not a pass such as F[PP=0 MB=1]")
    tail = pairs(match["part"])
    split = [pair for pair in tail if pair[0] in axes]
    chunk = name(match["chunk"]) + show_part(tuple(pair for pair in tail if pair[0] not in axes))
    phase = "F" if match["phase"] == AGAIN else match["phase"]
    return Pass(phase=cast(Phase, phase), chunk=chunk, part=tuple(split), again=match["phase"] == AGAIN)


@lru_cache(maxsize=4096)
def plain(owner: str) -> str:
    """Write an owner's name as it is where nothing in it could be taken for a part of an id, else quoted."""
    return owner if PLAIN.fullmatch(owner) else quoted(owner)


class SlotId(str):
    """The id of a slot: its kind, its owner and its microbatch, as fields.

    It is also its own text, by which it is hashed and compared: the compiler looks slots up millions of
    times, and a string keeps its hash. Equal texts are equal fields, because every name in them is quoted
    where it must be.
    """

    __slots__ = (
        "again", "base", "devices", "kind", "number", "owner", "part", "piece", "position", "reader", "run",
    )  # fmt: skip

    kind: SlotKind
    owner: str  # a chunk, a bucket, a field of the batch, a buffer, a constant or a sum
    position: int  # of an output, an input or a storage
    number: int  # of a sum, where a value has several
    reader: str  # the chunk that gives a gradient or a term, where several do
    devices: tuple[Devices, ...]  # where a value was added up, or brought to, one after another
    again: bool  # made by a forward that runs a second time
    part: Tags  # the microbatch
    run: Pass | None  # the first of the passes that it is gathered or added up for
    piece: int  # of those that a value arrives in; -1: it is the value
    base: "SlotId"  # the same for all microbatches: it says how large each of them is

    def __new__(
        cls,
        kind: SlotKind,
        owner: str = "",
        position: int = 0,
        number: int = 0,
        reader: str = "",
        devices: tuple[Devices, ...] = (),
        again: bool = False,
        part: Tags = (),
        run: Pass | None = None,
        piece: int = -1,
    ) -> "SlotId":
        base = base_slot(kind, owner, position, number, reader, devices, again)
        return base._within(part, run, piece) if part or run is not None or piece >= 0 else base

    def _within(self, part: Tags, run: Pass | None, piece: int = -1) -> "SlotId":
        """Return the slot of one microbatch, run or piece."""
        suffix = f"[{run}]" if run is not None else suffix_of(part)
        made = str.__new__(SlotId, self + suffix + (f".piece{piece}" if piece >= 0 else ""))
        made.kind, made.owner, made.position, made.number = self.kind, self.owner, self.position, self.number
        made.reader, made.devices, made.again = self.reader, self.devices, self.again
        made.part, made.run, made.piece, made.base = part, run, piece, self
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return SlotId, self.fields

    @property
    def fields(self) -> tuple[object, ...]:
        place = (self.number, self.reader, self.devices, self.again, self.part, self.run, self.piece)
        return self.kind, self.owner, self.position, *place

    @property
    def sum_name(self) -> str:
        """Return the name of the sum of the step that its terms belong to, where it holds terms of one."""
        return self.owner if self.kind == "term" else self.kind

    def at(self, part: Tags) -> "SlotId":
        """Return the slot of one microbatch."""
        return self.base._within(part, None) if part else self.base

    def of_run(self, run: Pass) -> "SlotId":
        """Return the slot that serves the passes from one on."""
        return self.base._within((), run)

    def of_piece(self, piece: int) -> "SlotId":
        """Return the slot of one of the pieces that a value arrives in."""
        return self.base._within(self.part, self.run, piece)

    def brought_to(self, devices: Devices) -> "SlotId":
        """Return the slot of the same value on other devices."""
        return self._changed((*self.devices, devices), self.again)

    def made_again(self) -> "SlotId":
        """Return the slot of the same value, made a second time."""
        return self._changed(self.devices, True)

    def _changed(self, devices: tuple[Devices, ...], again: bool) -> "SlotId":
        place = (self.part, self.run, self.piece)
        return SlotId(self.kind, self.owner, self.position, self.number, self.reader, devices, again, *place)


@lru_cache(maxsize=4096)
def suffix_of(part: Tags) -> str:
    """Write the microbatch of a slot: `[MB=0]`, or nothing for all samples."""
    return f"[{show_pairs(part)}]" if part else ""


@lru_cache(maxsize=2**15)  # compilations of one model ask for the same ones
def base_slot(
    kind: SlotKind,
    owner: str,
    position: int,
    number: int,
    reader: str,
    devices: tuple[Devices, ...],
    again: bool,
) -> SlotId:
    """Return the id of a slot for all microbatches."""
    where = "".join(f"@{show(each)}" for each in devices)
    word: str = "g" if kind == "gradient" else kind
    if kind in INDEXED:
        word = f"{INDEXED[kind]}{position}" + (f".{number}" if kind == "gradient_sum" else "")
    given_by = f"<{plain(reader)}>" if reader else ""
    text = f"{plain(owner)}.{word}{given_by}{where}{'.again' if again else ''}"
    if kind in NAMED:
        text = f"{kind}.{plain(owner) if '@' not in owner else quoted(owner)}{where}"
    base = str.__new__(SlotId, kind if kind in OF_STEP else text)
    base.kind, base.owner, base.position, base.number = kind, owner, position, number
    base.reader, base.devices, base.again = reader, devices, again
    base.part, base.run, base.piece, base.base = (), None, -1, base
    return base


def read_slot(text: str, axes: Collection[str] = ()) -> SlotId:
    """Read a slot's id from its text. axes: those that microbatches are split along."""
    if text in OF_STEP:
        return SlotId(cast(SlotKind, text))
    match = LISTED.fullmatch(text) or OWNED.fullmatch(text)
    if match is None:
        raise BadLineError(f"{text!r} is no slot")
    found = match.groupdict()
    devices = tuple(parse(each) for each in found["devices"].split("@")[1:])
    within = found["part"]
    run = read_pass(within, axes) if within and PASS.fullmatch(within) else None
    part = pairs(within) if within and run is None else ()
    word, index = found["word"], found.get("index")
    kind = WORDS[word] if word in WORDS else cast(SlotKind, word)
    if word == "grad" and index:
        kind = "gradient_sum"
    return SlotId(
        kind,
        name(found["owner"]),
        int(index or 0),
        number=int(found.get("number") or 0),
        reader=name(found.get("reader") or ""),
        devices=devices,
        again=bool(found.get("again")),
        part=part,
        run=run,
        piece=int(found.get("piece") or -1),
    )


SEED: Final = SlotId("seed")
LOSS: Final = SlotId("loss")
NORM: Final = SlotId("norm")
TOTAL: Final = SlotId("total")


def param_slot(bucket: str) -> SlotId:
    """Return the slot of a bucket's parameters between uses."""
    return SlotId("param", bucket)


def state_slot(bucket: str) -> SlotId:
    """Return the slot of the optimizer's state for a bucket."""
    return SlotId("state", bucket)


def buffer_slot(name: str) -> SlotId:
    """Return the slot of a buffer of the model."""
    return SlotId("buffer", name)


def term_slot(sum_name: str, chunk: str) -> SlotId:
    """Return the slot of what a chunk adds to a sum of the step."""
    return SlotId("term", sum_name, reader=chunk)
