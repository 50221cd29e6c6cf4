"""What an instruction looks like: the phase it works for and the part of the samples, hence its colour."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper.ir.chunk import PHASES, Phase
from piper.plan.instr import Instr
from piper.view.grid import AGAIN
from piper.view.legend import Legend
from piper.view.paper import hue

PHASE = re.compile(r"\b(BI|BW|F|B|R)\[")
VERBS = {
    "load": "load",
    "send": "send",
    "recv": "receive",
    "counts": "counts",
    "exchange": "all-to-all",
    "gather": "gather",
    "accumulate": "add",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "norm": "norm",
    "total": "total",
    "update": "update",
    "broadcast": "broadcast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """The phase and part an instruction works for; neither, where it works for all of a step."""

    phase: Phase | None
    part: tuple[int, ...]
    again: bool = False  # a forward that runs a second time, or what is done for one


def shade_of(ins: Instr, axes: Iterable[str]) -> Shade:
    """Read phase and part off an instruction, or off the node it is named for."""
    match = PHASE.search(ins.node)
    again = match is not None and match[1] == AGAIN
    letter = "F" if again else match and match[1]
    phase = next((phase for phase in PHASES if phase == letter), None)
    if phase is None and ins.op in ("send", "recv"):
        phase = "B" if re.search(r"\.din\d", ins.node) else "F"
    if phase is None and ins.op in ("counts", "load"):
        phase = "F"  # a backward goes the way that its forward found
    part = tuple(index for _, index in ins.part)
    if not part:
        found = (re.findall(rf"\b{re.escape(axis)}=(\d+)", ins.node) for axis in axes)
        part = tuple(int(indices[-1]) for indices in found if indices)
    return Shade(phase=phase, part=part, again=again)


def caption(ins: Instr) -> str:
    """An instruction in one or two words, to stand in its bar."""
    if ins.op == "compute":
        phase, _, chunk = ins.arg.partition(" ")
        return f"{AGAIN if ins.again else phase} {chunk}"
    return VERBS.get(ins.op, ins.op)


def draw_phases(legend: Legend, shades: Sequence[Shade]) -> None:
    """The phases that occur among shades, each in the hue it has first."""
    for phase in PHASES:
        for again in (False, True):
            shade = next((shade for shade in shades if (shade.phase, shade.again) == (phase, again)), None)
            if shade is not None:
                legend.phase(phase, hue(shade.part), again=again)
