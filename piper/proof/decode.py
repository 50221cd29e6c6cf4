"""Reads what a plan writes as text: the one place where the proof of values looks into slot names and `arg`.

The proof must read these names as the runtime does, so that a plan which names the wrong thing is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from piper.ir.chunk import PHASES, Phase
from piper.plan.instr import Instr

SEED = "seed"
LOSS = "loss"
WEIGHT = "weight"
TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The payload of an exchange of rows."""

    chunk: str
    outward: bool  # to the experts; else back to the owners of the rows


def phase_and_chunk(ins: Instr) -> tuple[Phase, str] | None:
    """Return the phase and the chunk that a compute instruction names, None where it names no phase."""
    phase, _, chunk = ins.arg.partition(" ")
    return (phase, chunk) if phase in PHASES else None


def exchanged(ins: Instr) -> Exchanged:
    """Return the chunk of an exchange and its direction, as the runtime takes it."""
    way, _, chunk = ins.arg.partition(" ")
    return Exchanged(chunk=chunk, outward=way == "out")


def counted_chunk(ins: Instr) -> str:
    """Return the route whose rows a `counts` instruction counts."""
    return ins.arg


def field_of(ins: Instr) -> str:
    """Return the field of the batch that a load takes."""
    return ins.arg


def rows_of(ins: Instr) -> tuple[int, int, int]:
    """Return the rows that a send or a copy takes: from, to, out of."""
    if not ins.arg:
        return 0, 1, 1
    span, _, of = ins.arg.partition("/")
    start, _, stop = span.partition(":")
    return int(start), int(stop), int(of)


def bucket_named(ins: Instr) -> str:
    """Return the bucket that a gather or a reduction names."""
    return ins.arg


def accumulated_slot(ins: Instr) -> str:
    """Return the slot by which the runtime finds what an accumulation adds to."""
    return ins.arg


def param_slot(bucket: str) -> str:
    """Return the slot of a bucket's parameters between uses."""
    return f"{bucket}.param"


def buffer_slot(name: str) -> str:
    """Return the slot of a buffer."""
    return f"buffer.{name}"


def constant_slot(name: str) -> str:
    """Return the slot of a constant."""
    return f"constant.{name}"


def is_shard_slot(slot: str) -> bool:
    """Return whether a slot holds a shard of a gradient, by its name."""
    return slot.endswith(".grad_shard")


class GradientSlots:
    """Finds the bucket whose gradient a slot holds, by the slot's name."""

    def __init__(self, buckets: Iterable[str]) -> None:
        self._buckets = {f"{name}.{kind}": name for name in buckets for kind in ("grad", "grad_shard")}

    def bucket(self, slot: str) -> str | None:
        """Return the bucket of a slot of summed gradients, None for any other slot."""
        found = self._buckets.get(slot)
        if found is None and slot.endswith("]"):
            found = next((self._buckets[p] for p in _prefixes(slot) if p in self._buckets), None)
        return found


def _prefixes(slot: str) -> Iterable[str]:
    """Yield what stands before each opening bracket of a slot's name."""
    at = slot.find("[")
    while at >= 0:
        yield slot[:at]
        at = slot.find("[", at + 1)
