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
            "F": ink("#1d2430", "#c6e5ff #f0ccb1 #fdd3ea #d9d7ad #b7edf3 #f7c7c2 #e6daff #b3e0cb"),
            "B": ink("#ffffff", "#3675b2 #95530c #a05481 #706900 #00818e #9d4843 #7c60aa #007a55"),
            "BI": ink("#1d2430", "#7cb6f1 #d5945e #e196c0 #aea856 #4fc4d1 #df8a83 #bba2ea #5db994"),
            "BW": ink("#ffffff", "#3675b2 #95530c #a05481 #706900 #00818e #9d4843 #7c60aa #007a55"),
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
            "F": ink("#ffffff", "#30506f #5b391c #663e55 #484416 #13575e #603431 #52456b #194d3a"),
            "B": ink("#10141a", "#76b3f1 #d49057 #e091be #aca54e #43c2cf #de857e #b99ee9 #55b790"),
            "BI": ink("#ffffff", "#4472a1 #885629 #94597b #6b6620 #0c7d87 #904d49 #77629b #237356"),
            "BW": ink("#10141a", "#76b3f1 #d49057 #e091be #aca54e #43c2cf #de857e #b99ee9 #55b790"),
        }
    ),
)
