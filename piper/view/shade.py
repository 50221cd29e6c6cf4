"""The look of an instruction: the phase and the microbatch it works for, which choose its colour."""

from dataclasses import dataclass

from piper.ir.ids import AGAIN, Phase, Tags
from piper.plan.instr import Instr
from piper.plan.ops import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """The phase and microbatch an instruction works for; neither, if it works for the whole step."""

    phase: Phase | None
    part: tuple[int, ...]
    again: bool = False  # a recomputed forward, or an instruction that serves one


def shade_of(ins: Instr) -> Shade:
    """Return the phase and microbatch of the pass that an instruction is or works for, or of its values."""
    part = tuple(index for _, index in part_of(ins))
    if ins.run is not None:
        return Shade(phase=ins.run.phase, part=part, again=ins.run.again)
    phase: Phase | None = "F" if ins.op == "load" else None
    if OPS[ins.op].pattern == "pair":
        (moved,) = ins.reads or ins.writes
        phase = "F" if moved.kind == "output" else "B"
    return Shade(phase=phase, part=part)


def part_of(ins: Instr) -> Tags:
    """Return the microbatch that an instruction works for."""
    if ins.run is not None:
        return ins.run.part
    slots = (*ins.reads, *ins.writes)
    return ins.part or next((slot.part for slot in slots if slot.part), ())


def caption(ins: Instr) -> str:
    """Return an instruction in one or two words, for its bar."""
    if ins.op == "compute":
        run = ins.computes
        return f"{AGAIN if run.again else run.phase} {run.chunk}"
    return OPS[ins.travels_as].caption
