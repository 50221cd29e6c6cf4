"""Writes SVG: elements, what all drawings share (a style sheet, shades and a legend), and the pipeline grid.

The grid has a colour per microbatch and a shade per phase, and leaves bubbles white: `grid(of_schedule(...))`
draws a schedule, `grid(of_plans(...))` the plans of a program.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from xml.sax.saxutils import escape, quoteattr

from piper.ir.chunk import Phase
from piper.view.cells import Cell, Pipeline

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


MARK = 'aria-labelledby="title about"'  # shows that Piper wrote a drawing, which may then be replaced
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif"
RISING, FALLING = "url(#hatch)", "url(#again)"  # lines over weight gradients, and over recomputed forwards
HATCH_OPACITY, AGAIN_OPACITY = 0.4, 0.3
PHASES: Mapping[Phase, str] = {
    "F": "forward",
    "B": "backward",
    "BI": "input gradients",
    "BW": "weight gradients",
}
LETTER = 6.1  # pixels


def number(value: float) -> str:
    """Write a coordinate with at most two decimals and no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(tag: str, body: str | None = None, /, **attributes: str | float) -> str:
    """Write one element. An underscore in an attribute's name becomes a dash; `class_` becomes `class`."""
    words = [tag]
    for name, value in attributes.items():
        text = value if isinstance(value, str) else number(value)
        words.append(f"{name.rstrip('_').replace('_', '-')}={quoteattr(text)}")
    opening = " ".join(words)
    return f"<{opening}/>" if body is None else f"<{opening}>{body}</{tag}>"


def words(text: str, x: float, y: float, class_: str = "", **attributes: str | float) -> str:
    """Write a line of text with its baseline at `y`."""
    named = {"class_": class_} if class_ else {}
    return element("text", escape(text), x=x, y=y, **named, **attributes)


def drawing(
    *, width: float, height: float, title: str, about: str, style: str, body: Iterable[str], defs: str = ""
) -> str:
    """Write a whole SVG file, with a title and a description for screen readers."""
    width, height = ceil(width), ceil(height)  # whole pixels, so that a PNG has no seam
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title about" '
        f'viewBox="0 0 {number(width)} {number(height)}" width="{number(width)}" height="{number(height)}">'
    )
    lines = [
        opening,
        element("title", escape(title), id="title"),
        element("desc", escape(about), id="about"),
        f"<style>{style}</style>",
    ]
    if defs:
        lines.append(f"<defs>{defs}</defs>")
    return "\n".join([*lines, *body, "</svg>"]) + "\n"


def sheet() -> str:
    """Return the style sheet for light and dark paper, without CSS variables: converters know none."""
    shapes = [
        f"text{{font-family:{FONT};font-size:12px}}",
        ".title{font-size:15px;font-weight:600}",
        ".small{font-size:11px}",
        ".tiny{font-size:9px}",
        ".big{font-size:13px;font-weight:600}",
        ".mid{text-anchor:middle}",
        ".right{text-anchor:end}",
        ".num{font-variant-numeric:tabular-nums}",
        ".pair{fill:none;stroke-width:1.8}",
        ".frame{fill:none;stroke-width:1}",
    ]
    return "".join([*shapes, *rules(LIGHT), "@media(prefers-color-scheme:dark){", *rules(DARK), "}"])


def rules(paper: Paper) -> list[str]:
    """Return the rules for the colours of one scheme."""
    found = [
        f".page{{fill:{paper.page}}}",
        f"text{{fill:{paper.text}}}",
        f".faint{{fill:{paper.faint}}}",
        f".line,.frame{{stroke:{paper.line}}}",
        f".idle{{fill:{paper.idle};stroke:{paper.line}}}",
        f".pair{{stroke:{paper.pair}}}",
        f".hatch{{stroke:{paper.hatch}}}",
        f".again{{stroke:{paper.phases['F'].text}}}",
        f".quiet{{fill:{paper.quiet}}}",
        f".arrow{{stroke:{paper.faint};fill:none}}",
        f".head{{fill:{paper.faint}}}",
    ]
    for phase, ink in paper.phases.items():
        found.append(f".on{phase}{{fill:{ink.text}}}")
        found += [f".{phase}{hue}{{fill:{fill}}}" for hue, fill in enumerate(ink.fills)]
    return found


def hatching() -> str:
    """Return the patterns that `hatched` fills with: thin diagonal lines, rising and falling."""
    return "".join(
        element(
            "pattern",
            element("path", d=path, class_=name, stroke_width=1, stroke_opacity=opacity),
            id=name,
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for name, path, opacity in (
            ("hatch", "M0 6L6 0", HATCH_OPACITY),
            ("again", "M0 0L6 6", AGAIN_OPACITY),
        )
    )


def hatched(box: Mapping[str, str | float], phase: Phase | None, *, again: bool) -> list[str]:
    """Return the hatching to draw over a box; empty for a phase that needs none.

    Without it weight gradients would look like backwards, and a recomputed forward like the first.
    """
    fill = FALLING if again else RISING if phase == "BW" else None
    return [element("rect", **box, fill=fill)] if fill else []


def hue(part: tuple[int, ...]) -> int:
    """Return the hue of a microbatch, which its index along the last axis chooses."""
    return part[-1] % HUES if part else 0


def phase_name(phase: Phase, *, again: bool) -> str:
    """Return the name of a phase in words."""
    return f"{PHASES[phase]} again" if again else PHASES[phase]


@dataclass(slots=True)
class Legend:
    """Samples of shades with their names, from left to right."""

    x: float
    y: float
    drawn: list[str] = field(default_factory=list)

    def phase(self, phase: Phase, hue: int = 0, *, again: bool = False) -> None:
        """Add the shade of a phase. again: of a recompute."""
        rest = hatched(self._box(), phase, again=again)
        name = phase_name(phase, again=again)
        self._named(name, [element("rect", **self._box(), class_=f"{phase}{hue}"), *rest])

    def shade(self, name: str, class_: str) -> None:
        """Add the shade of a CSS class. The outline of `idle` is half a pixel smaller, to be sharp."""
        inset = 0.5 if class_ == "idle" else 0.0
        self._named(name, [element("rect", **self._box(inset), class_=class_)])

    def remark(self, text: str) -> None:
        """Add words without a sample. They come last."""
        self.drawn.append(words(text, self.x, self.y + 11, "small faint"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.drawn)

    def _box(self, inset: float = 0.0) -> dict[str, float]:
        return {"x": self.x, "y": self.y + inset, "width": 16, "height": 14 - 2 * inset, "rx": 3}

    def _named(self, name: str, sample: list[str]) -> None:
        self.drawn += [*sample, words(name, self.x + 22, self.y + 11, "small")]
        self.x += 22 + len(name) * LETTER + 14


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
