"""The colours of drawings: a hue per microbatch, a lightness per phase, for light and dark paper.

Eight hues repeat. Neighbours stay distinct for people with protanopia and deuteranopia too, phases differ by
lightness and hatching, and every cell carries its number, so that nothing is shown by hue alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from piper.ir.chunk import Phase

HUES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ink:
    """The fill colours of one phase, one per hue, and the colour of the text on them."""

    fills: tuple[str, ...]
    text: str


def ink(text: str, fills: str) -> Ink:
    """Build an ink. fills: its colours, separated by spaces."""
    return Ink(fills=tuple(fills.split()), text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """One colour scheme of drawings."""

    page: str
    text: str
    faint: str  # secondary text: at least 4.5 to 1 on the page
    line: str  # rules and ticks
    idle: str  # a bubble
    pair: str  # the outline of an overlapped pair
    hatch: str  # drawn over weight gradients
    quiet: str  # instructions of neither forward nor backward
    phases: Mapping[Phase, Ink]


LIGHT = Paper(
    page="#ffffff",
    text="#1d2430",
    faint="#5b6573",
    line="#d5dae1",
    idle="#ffffff",
    pair="#1d2430",
    hatch="#ffffff",
    quiet="#dfe3e9",
    phases=MappingProxyType(
        {
            "F": ink("#1d2430", "#c3dbfe #b6e8bf #dfd0ff #fecac9 #a3e4ff #f0d6a0 #fec6e4 #ffcead"),
            "B": ink("#ffffff", "#1c71e2 #00873c #8952d3 #ce3344 #047ea0 #946f07 #bd388f #b25b00"),
            "BI": ink("#1d2430", "#72aafe #60c279 #b794f4 #f58284 #0bbaea #d1a127 #e783bd #ec8f4a"),
            "BW": ink("#ffffff", "#1c71e2 #00873c #8952d3 #ce3344 #047ea0 #946f07 #bd388f #b25b00"),
        }
    ),
)
DARK = Paper(
    page="#14181f",
    text="#e8ebf0",
    faint="#9aa5b4",
    line="#323a46",
    idle="#14181f",
    pair="#ffffff",
    hatch="#14181f",
    quiet="#3a434f",
    phases=MappingProxyType(
        {
            "F": ink("#ffffff", "#22477d #115629 #503975 #742d31 #045066 #5c4300 #6c2e54 #6e3602"),
            "B": ink("#10141a", "#84b6ff #6ccd83 #c29fff #fe8f90 #23c6f7 #ddac37 #f38ec9 #f89a56"),
            "BI": ink("#ffffff", "#3370c7 #01873d #8059bb #b9454c #017d9f #8f6b02 #ac4785 #ac5701"),
            "BW": ink("#10141a", "#84b6ff #6ccd83 #c29fff #fe8f90 #23c6f7 #ddac37 #f38ec9 #f89a56"),
        }
    ),
)
