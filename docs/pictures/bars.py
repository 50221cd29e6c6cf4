"""Draws figures as bars: a row for each value, in groups, with the value at the end of its bar."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.view.svg import Legend, drawing, element, sheet, words

MARGIN, HEADER, BAR, GAP, LEGEND = 20.0, 62.0, 18.0, 14.0, 40.0
WIDTH, LETTER_WIDTH, VALUE = 840.0, 6.6, 190.0
SHADES = ("F0", "BI0", "B0")  # of the series, from light to dark


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One value: what it is called in the legend, how long its bar is, and the text behind it."""

    series: str
    value: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bars below each other, with a name at their left."""

    name: str
    bars: Sequence[Bar]


def bars(groups: Sequence[Group], *, title: str, about: str) -> str:
    """Draw groups of bars. Bars of one series have one shade; all bars begin at zero and share a scale."""
    series = list(dict.fromkeys(bar.series for group in groups for bar in group.bars))
    left = MARGIN + max(len(group.name) for group in groups) * LETTER_WIDTH + 12
    scale = (WIDTH - left - MARGIN - VALUE) / max(bar.value for group in groups for bar in group.bars)
    body = [words(title, MARGIN, 30, "title"), words(about, MARGIN, 48, "small faint")]
    y = HEADER
    for group in groups:
        tall = len(group.bars) * BAR
        body.append(words(group.name, left - 10, y + tall / 2 + 4, "right"))
        body += drawn(group, series, left, y, scale)
        y += tall + GAP
    if len(series) > 1:
        line = Legend(MARGIN, y + 6)
        for number, name in enumerate(series):
            line.shade(name, SHADES[number])
        body += list(line)
    height = y + (LEGEND if len(series) > 1 else 6.0)
    return drawing(
        width=WIDTH,
        height=height,
        title=title,
        about="; ".join(f"{g.name}: {', '.join(f'{b.series} {b.text}' for b in g.bars)}" for g in groups),
        style=sheet(),
        body=[element("rect", width=WIDTH, height=height, class_="page"), *body],
    )


def drawn(group: Group, series: Sequence[str], left: float, y: float, scale: float) -> Iterator[str]:
    """Draw the bars of one group, each with its text behind it."""
    for number, bar in enumerate(group.bars):
        width, top = bar.value * scale, y + number * BAR
        shade = SHADES[series.index(bar.series)]
        yield element("rect", x=left, y=top + 1, width=width, height=BAR - 2, rx=3, class_=shade)
        yield words(bar.text, left + width + 8, top + BAR / 2 + 4, "small num")
