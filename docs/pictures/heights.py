"""Draws the memory of devices over a step as SVG: a row for each, with its computation above its bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lanes import draw_phases

from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.simulate.account import MemoryUse, Span, Timeline
from piper.view.facts import caption, shade_of
from piper.view.svg import (
    LETTER,
    Legend,
    drawing,
    element,
    hatched,
    hatching,
    hue,
    number,
    sheet,
    words,
)

MARGIN, HEADER, BAR, HEIGHT, GAP, LEGEND = 20.0, 64.0, 26.0, 64.0, 20.0, 34.0
WIDTH, LETTER_WIDTH = 840.0, 7.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One device in one step."""

    name: str
    plan: Plan
    timeline: Timeline
    memory: MemoryUse

    @property
    def highest(self) -> int:
        """Return the peak bytes of slots that do not outlive a step."""
        return self.memory.peak - self.memory.resident


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFrame:
    """The scales of time and bytes, which all rows share."""

    left: float
    scale: float
    tall: float  # pixels per byte

    def x(self, time: float) -> float:
        return self.left + time * self.scale


def heights(rows: Sequence[MemoryRow], *, title: str) -> str:
    """Draw the rows below each other. Peaks and times are percentages of the first row's."""
    left = MARGIN + max(len(text) for row in rows for text in (row.name, "peak 100 %")) * LETTER_WIDTH + 12
    frame = MemoryFrame(
        left=left,
        scale=(WIDTH - left - MARGIN) / max(row.timeline.end for row in rows),
        tall=HEIGHT / max(1, *(row.highest for row in rows)),
    )
    each = BAR + HEIGHT + GAP
    height = HEADER + len(rows) * each + LEGEND
    body = [
        element("rect", width=WIDTH, height=height, class_="page"),
        words(title, MARGIN, 30, "title"),
        words("what a device holds apart from parameters and optimizer state", MARGIN, 48, "small faint"),
    ]
    for place, row in enumerate(rows):
        y = HEADER + place * each
        body += names(row, rows[0], frame, y)
        body += work(row, frame, y)
        body.append(curve(row, frame, y + BAR))
    body += legend(rows, height - LEGEND)
    return drawing(
        width=WIDTH,
        height=height,
        title=title,
        about="; ".join(f"{row.name}: {', '.join(relative(row, rows[0]))}" for row in rows),
        style=sheet(),
        defs=hatching(),
        body=body,
    )


def relative(row: MemoryRow, first: MemoryRow) -> tuple[str, str]:
    """Return a row's peak and time as percentages of the first row's."""
    return f"peak {row.highest / first.highest:.0%}", f"time {row.timeline.end / first.timeline.end:.0%}"


def names(row: MemoryRow, first: MemoryRow, frame: MemoryFrame, y: float) -> Iterator[str]:
    """Draw the name, the peak and the time of a row at its left."""
    yield words(row.name, frame.left - 10, y + BAR / 2 + 4, "right")
    for line, text in enumerate(relative(row, first)):
        yield words(text, frame.left - 10, y + BAR + 24 + 16 * line, "right small faint num")


def busy(row: MemoryRow) -> Iterator[tuple[Instr, Span]]:
    """Yield the compute instructions that take time, with their spans."""
    for ins, span in zip(row.plan.instrs, row.timeline.spans, strict=True):
        if ins.op == "compute" and span.end > span.start:
            yield ins, span


def work(row: MemoryRow, frame: MemoryFrame, y: float) -> Iterator[str]:
    """Draw a bar for each compute instruction."""
    for ins, span in busy(row):
        shade = shade_of(ins)
        x, width = frame.x(span.start), (span.end - span.start) * frame.scale
        box: dict[str, str | float] = {
            "x": x + 0.75,
            "y": y,
            "width": width - 1.5,
            "height": BAR - 2,
            "rx": 3,
        }
        class_ = f"{shade.phase}{hue(shade.part)}"
        inner = [element("title", ins.node), element("rect", **box, class_=class_)]
        inner += hatched(box, shade.phase, again=shade.again)
        text = caption(ins)
        if len(text) * LETTER + 4 <= width:
            inner.append(words(text, x + width / 2, y + BAR / 2 + 3, f"on{shade.phase} mid small"))
        yield element("g", "".join(inner))


def curve(row: MemoryRow, frame: MemoryFrame, y: float) -> str:
    """Draw the live bytes over time, as a step function."""
    memory, base = row.memory, y + HEIGHT
    path = [f"M{number(frame.left)} {number(base)}"]
    for time, live in zip(memory.times, memory.live, strict=True):
        path.append(f"H{number(frame.x(time))}V{number(base - (live - memory.resident) * frame.tall)}")
    path.append(f"H{number(frame.x(row.timeline.end))}V{number(base)}Z")
    floor = element("path", d=f"M{number(frame.left)} {number(base)}H{number(WIDTH - MARGIN)}", class_="line")
    return element("path", d="".join(path), class_="quiet") + floor


def legend(rows: Sequence[MemoryRow], y: float) -> Iterator[str]:
    """Draw the legend of the shades."""
    line = Legend(MARGIN, y)
    draw_phases(line, [shade_of(ins) for row in rows for ins, _ in busy(row)])
    line.shade("bytes held", "quiet")
    yield from line
