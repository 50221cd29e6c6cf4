"""What an instruction looks like: the phase it works for and the part of the samples, hence its colour."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper.ids import AGAIN, PHASES, Phase, Tags
from piper.plan.instr import Instr
from piper.plan.ops import OPS
from piper.view.legend import Legend
from piper.view.paper import hue


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """The phase and part an instruction works for; neither, where it works for all of a step."""

    phase: Phase | None
    part: tuple[int, ...]
    again: bool = False  # a forward that runs a second time, or what is done for one


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
    """An instruction in one or two words, to stand in its bar."""
    if ins.op == "compute":
        run = ins.computes
        return f"{AGAIN if run.again else run.phase} {run.chunk}"
    return OPS[ins.travels_as].caption


def draw_phases(legend: Legend, shades: Sequence[Shade]) -> None:
    """The phases that occur among shades, each in the hue it has first."""
    for phase in PHASES:
        for again in (False, True):
            shade = next((shade for shade in shades if (shade.phase, shade.again) == (phase, again)), None)
            if shade is not None:
                legend.phase(phase, hue(shade.part), again=again)
