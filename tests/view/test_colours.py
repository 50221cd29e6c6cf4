"""The colours can be read: text on every fill, and neighbouring microbatches apart for every kind of sight."""

from itertools import pairwise
from math import dist

import pytest

from piper.view.svg import AGAIN_OPACITY, DARK, HUES, LIGHT, Paper

Rgb = tuple[float, float, float]
Matrix = tuple[Rgb, Rgb, Rgb]
WHOLE: Matrix = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
DEUTERANOPIA: Matrix = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
PROTANOPIA: Matrix = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)


def linear(colour: str) -> Rgb:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return red, green, blue


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(over: str, under: str, opacity: float) -> str:
    """A colour through which another one shows."""
    pairs = ((int(over[i : i + 2], 16), int(under[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * opacity + b * (1 - opacity)):02x}" for a, b in pairs)


def seen(colour: str, sight: Matrix) -> Rgb:
    """A colour in OKLab, as someone with this sight sees it."""
    rgb = linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in sight
    )
    l = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)  # noqa: E741
    m = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    s = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )


def apart(one: str, other: str, sight: Matrix) -> float:
    return dist(seen(one, sight), seen(other, sight))


@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_text_on_every_fill_has_the_contrast_that_small_text_needs(paper: Paper) -> None:
    for ink in paper.phases.values():
        assert len(ink.fills) == HUES
        assert min(contrast(fill, ink.text) for fill in ink.fills) >= 4.5
    assert contrast(paper.text, paper.page) >= 7
    assert contrast(paper.faint, paper.page) >= 4.5


@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_lines_over_a_forward_are_seen_and_leave_its_number_readable(paper: Paper) -> None:
    ink = paper.phases["F"]
    for fill in ink.fills:
        line = mixed(ink.text, fill, AGAIN_OPACITY)
        assert contrast(line, fill) > 1.7
        assert contrast(line, ink.text) > 3


@pytest.mark.parametrize("sight", [WHOLE, DEUTERANOPIA, PROTANOPIA])
@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_neighbouring_microbatches_differ_for_every_sight(paper: Paper, sight: Matrix) -> None:
    for ink in paper.phases.values():
        for one, other in pairwise([*ink.fills, ink.fills[0]]):
            assert apart(one, other, sight) > 0.05, f"{one} and {other} look alike"


@pytest.mark.parametrize("sight", [WHOLE, DEUTERANOPIA, PROTANOPIA])
@pytest.mark.parametrize("paper", [LIGHT, DARK])
def test_phases_of_one_microbatch_differ_by_lightness(paper: Paper, sight: Matrix) -> None:
    for hue in range(HUES):
        shades = [seen(paper.phases[phase].fills[hue], sight)[0] for phase in ("F", "BI", "B")]
        assert min(abs(a - b) for a, b in pairwise(shades)) > 0.08
