"""The moves of a rank: one action, or a pair that may interleave. Both have torch's text form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from piper.errors import ScheduleError
from piper.ir.chunk import Phase

LETTERS: Mapping[Phase, str] = MappingProxyType({"F": "F", "B": "B", "BI": "I", "BW": "W"})
PHASE_OF: Mapping[str, Phase] = MappingProxyType({letter: phase for phase, letter in LETTERS.items()})

ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Run one phase of one stage on one microbatch. As text: `2F0`, `2B0`, `2I0`, `2W0`."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.phase]}{self.microbatch}"


Group = tuple[Action, ...]  # one action; or a forward and a backward that may interleave


def group_text(group: Group) -> str:
    """Return a group as torch writes it: `2F0`, or `(0F3;7B1)OVERLAP_F_B`."""
    if len(group) == 1:
        return str(group[0])
    return f"({';'.join(map(str, group))})OVERLAP_F_B"


def parse_group(text: str, *, by: str) -> Group:
    """Parse a group; the inverse of `group_text`. `by` says where the text is from."""
    if overlap := OVERLAP.fullmatch(text):
        group = tuple(parse_action(member.strip(), by=by) for member in overlap.groups())
        if not is_overlap(group):
            raise ScheduleError(
                f"{text} overlaps {group[0]} and {group[1]}",
                by=by,
                hint="an overlapped cell holds one forward and one backward (B or I): (0F3;7B1)OVERLAP_F_B",
            )
        return group
    return (parse_action(text, by=by),)


def parse_action(text: str, *, by: str) -> Action:
    """Read one action. Nothing may come before or after it."""
    match = ACTION.fullmatch(text)
    if not match:
        start = text if len(text) <= 40 else f"{text[:37]}..."
        raise ScheduleError(
            f"{start!r} is not an action",
            by=by,
            hint="write stage, letter, microbatch: 2F0 (forward), 2B0 (backward), 2I0 and 2W0 (its input and"
            " weight halves), or two of them as (0F3;7B1)OVERLAP_F_B",
        )
    stage, letter, microbatch = match.groups()
    return Action(stage=int(stage), phase=PHASE_OF[letter], microbatch=int(microbatch))


def is_overlap(group: Group) -> bool:
    """Return whether a group is a forward and a backward that may interleave. A BW half may not."""
    phases = [action.phase for action in group]
    return len(phases) == 2 and phases.count("F") == 1 and "BW" not in phases
