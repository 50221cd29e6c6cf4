"""Draws the pipeline grid as SVG: a colour per microbatch, a shade per phase, bubbles left white.

`grid(of_schedule(...))` draws a schedule, `grid(of_plans(...))` the plans of a program.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from piper.view.cells import Cell, Pipeline
from piper.view.svg_writer import (
    Legend,
    drawing,
    element,
    hatched,
    hatching,
    hue,
    number,
    phase_name,
    sheet,
    words,
)

MARGIN, HEADER, ROW, GAP = 20.0, 60.0, 34.0, 8.0
AXIS, LEGEND = 30.0, 30.0
WIDEST, NARROWEST, ROOM = 30.0, 5.0, 1180.0  # pixels of a unit of time; of all units together
LETTER_WIDTH = 6.6  # of the names beside the rows, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The positions in the picture: the left edge of time 0, the width of a unit, and the right edge."""

    left: float
    unit: float
    right: float
    width: float

    def x(self, time: float) -> float:
        return self.left + time * self.unit

    def y(self, row: int) -> float:
        return HEADER + row * (ROW + GAP)


def grid(pipeline: Pipeline) -> str:
    """Draw a pipeline: one row per device, time to the right."""
    left = MARGIN + max(len(name) for name in pipeline.names) * LETTER_WIDTH + 10
    unit = min(WIDEST, max(NARROWEST, ROOM / max(pipeline.end, 1)))  # a page's width, if cells do not vanish
    right = left + pipeline.end * unit
    frame = Frame(left=left, unit=unit, right=right, width=max(right + MARGIN, 420))
    bottom = frame.y(len(pipeline.rows)) - GAP
    height = bottom + AXIS + LEGEND + MARGIN
    body = [
        element("rect", width=frame.width, height=height, class_="page"),
        words(pipeline.title, MARGIN, 30, "title"),
        words(summary(pipeline), MARGIN, 48, "small faint"),
    ]
    for row, name in enumerate(pipeline.names):
        body += draw_row(pipeline, frame, row, name)
    body += axis(pipeline, frame, bottom)
    body += legend(pipeline, bottom + AXIS + 12)
    return drawing(
        width=frame.width,
        height=height,
        title=pipeline.title,
        about=about(pipeline),
        style=sheet(),
        defs=hatching(),
        body=body,
    )


def summary(pipeline: Pipeline) -> str:
    """Return the length of a pipeline and its idle fraction, in words."""
    return f"{number(pipeline.end)} units of time, {pipeline.idle:.0%} idle"


def about(pipeline: Pipeline) -> str:
    """Describe the picture in words."""
    rows = (
        f"{name}: " + " ".join(cell.label for cell in row)
        for name, row in zip(pipeline.names, pipeline.rows, strict=True)
    )
    return f"{summary(pipeline)}. " + "; ".join(rows)


def draw_row(pipeline: Pipeline, frame: Frame, row: int, name: str) -> Iterator[str]:
    """Draw one device: its name, a white background for bubbles, its cells, and outlines of pairs."""
    y = frame.y(row)
    yield words(name, frame.left - 10, y + ROW / 2 + 4, "right num")
    yield element("rect", x=frame.left, y=y, width=frame.right - frame.left, height=ROW, rx=3, class_="idle")
    shared = pipeline.stages_share_rows
    for cell in pipeline.rows[row]:
        yield from draw_cell(cell, frame, y, with_stage=shared)
    for low, high in pair_spans(pipeline.rows[row]):
        yield element(
            "rect",
            x=frame.x(low) - 0.4,
            y=y - 1,
            width=(high - low) * frame.unit + 0.8,
            height=ROW + 2,
            rx=4,
            class_="pair",
        )


def draw_cell(cell: Cell, frame: Frame, y: float, *, with_stage: bool) -> Iterator[str]:
    """Draw a cell with its microbatch, and with its stage where the row runs several."""
    x, width = frame.x(cell.start), cell.cost * frame.unit
    inset = 0.75 if frame.unit > 8 else 0.3
    box: dict[str, str | float] = {
        "x": x + inset,
        "y": y + inset,
        "width": width - 2 * inset,
        "height": ROW - 2 * inset,
        "rx": 3 if frame.unit > 8 else 1,
    }
    stage = "" if cell.stage is None else f"stage {cell.stage}, "
    name = phase_name(cell.phase, again=cell.again)
    name_line = f"{cell.label}: {name}, {stage}microbatch {cell.microbatch or 'whole'}"
    inner = [element("title", name_line), element("rect", **box, class_=f"{cell.phase}{hue(cell.part)}")]
    inner += hatched(box, cell.phase, again=cell.again)
    if frame.unit >= 13:
        ink = f"on{cell.phase} mid num"
        low = 9.0 if with_stage else 4.5
        inner.append(words(cell.microbatch, x + width / 2, y + ROW / 2 + low, f"{ink} big"))
        if with_stage and cell.stage is not None:
            inner.append(words(f"s{cell.stage}", x + width / 2, y + 12, f"{ink} tiny"))
    yield element("g", "".join(inner))


def pair_spans(row: tuple[Cell, ...]) -> Iterator[tuple[float, float]]:
    """Yield the start and end of each overlapped pair; of each member, if they do not run back to back."""
    mates: dict[int, list[Cell]] = {}
    for cell in row:
        if cell.pair >= 0:
            mates.setdefault(cell.pair, []).append(cell)
    for cells in mates.values():
        low, high = min(c.start for c in cells), max(c.start + c.cost for c in cells)
        if high - low == sum(cell.cost for cell in cells):
            yield low, high
        else:
            yield from ((cell.start, cell.start + cell.cost) for cell in cells)


def axis(pipeline: Pipeline, frame: Frame, bottom: float) -> Iterator[str]:
    """Draw the ticks of time below the rows."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if s * frame.unit >= 40 or s == 1000)
    y = bottom + 8
    yield element("path", d=f"M{number(frame.left)} {number(y)}H{number(frame.right)}", class_="line")
    for time in range(0, int(pipeline.end) + 1, step):
        x = number(frame.x(time))
        yield element("path", d=f"M{x} {number(y)}v4", class_="line")
        yield words(str(time), frame.x(time), y + 15, "small faint mid num")


def legend(pipeline: Pipeline, y: float) -> Iterator[str]:
    """Draw the legend of the shades and outlines."""
    line = Legend(MARGIN, y)
    for phase, again in pipeline.phases:
        line.phase(phase, again=again)
    if any(cell.pair >= 0 for row in pipeline.rows for cell in row):
        line.shade("overlapped pair", "pair")
    line.shade("idle", "idle")
    line.remark("a colour per microbatch")
    yield from line
