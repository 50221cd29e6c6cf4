"""Draws the streams of one device as SVG: one lane per stream, one bar per instruction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.ir.ids import PHASES
from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.simulate.account import Span, Timeline
from piper.view.facts import Shade, caption, shade_of
from piper.view.svg import Legend, drawing, element, hatched, hatching, hue, number, sheet, words

MARGIN, HEADER, LANE, FOOT = 20.0, 62.0, 30.0, 52.0
TIGHT, LOOSE = 8.0, 26.0  # between lanes: arrows need space
WIDTH = 960.0
LETTER_WIDTH = 6.7
MOST_ARROWS = 60  # bars: with more, arrows would hide them
SHORTEST = 1.5  # pixels: an instruction never vanishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One instruction in its lane."""

    ins: Instr
    span: Span
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFrame:
    """The positions of times and streams in the picture."""

    streams: tuple[str, ...]
    left: float
    low: float  # the time at the left edge
    scale: float
    gap: float

    def x(self, time: float) -> float:
        return self.left + (time - self.low) * self.scale

    def y(self, stream: str) -> float:
        return HEADER + self.streams.index(stream) * (LANE + self.gap)


def lanes(plan: Plan, timeline: Timeline, *, title: str, only: Sequence[int] = ()) -> str:
    """Draw when a device's streams are busy. only: the places of the instructions to draw; empty: all.

    Arrows go from an instruction that signals to those of other streams that wait for it, unless there are
    too many.
    """
    chosen = only or range(len(plan.instrs))
    bars = [Bar(ins=plan.instrs[i], span=timeline.spans[i], place=i) for i in chosen]
    arrowed = len(bars) <= MOST_ARROWS
    frame = frame_of(bars, LOOSE if arrowed else TIGHT)
    height = frame.y(frame.streams[-1]) + LANE + FOOT
    body = [
        element("rect", width=WIDTH, height=height, class_="page"),
        words(title, MARGIN, 30, "title"),
        words(summary(bars, frame), MARGIN, 48, "small faint"),
    ]
    for stream in frame.streams:
        y, room = frame.y(stream), WIDTH - frame.left - MARGIN
        body.append(words(stream, frame.left - 10, y + LANE / 2 + 4, "right"))
        body.append(element("rect", x=frame.left, y=y, width=room, height=LANE, rx=3, class_="idle"))
    for bar in bars:
        body += draw_bar(bar, frame)
    body += arrows(bars, frame) if arrowed else ()
    body += legend(bars, height - FOOT + 20, arrowed=arrowed)
    return drawing(
        width=WIDTH,
        height=height,
        title=title,
        about=summary(bars, frame) + ": " + "; ".join(f"{bar.ins.stream} {bar.ins.node}" for bar in bars),
        style=sheet(),
        defs=hatching(),
        body=body,
    )


def frame_of(bars: Sequence[Bar], gap: float) -> LaneFrame:
    """Fit the bars into the picture, the compute stream first, the others as they come."""
    found = dict.fromkeys(bar.ins.stream for bar in bars)
    streams = sorted(found, key=lambda stream: stream != "compute")
    left = MARGIN + max(len(stream) for stream in streams) * LETTER_WIDTH + 12
    low = min(bar.span.start for bar in bars)
    high = max(bar.span.end for bar in bars)
    scale = (WIDTH - left - MARGIN) / max(high - low, 1e-12)
    return LaneFrame(streams=tuple(streams), left=left, low=low, scale=scale, gap=gap)


def summary(bars: Sequence[Bar], frame: LaneFrame) -> str:
    """Return how many instructions and streams are drawn, in words."""
    return f"{len(bars)} instructions on {len(frame.streams)} streams"


def draw_bar(bar: Bar, frame: LaneFrame) -> Iterator[str]:
    """Draw the bar of an instruction, with its caption where it fits."""
    x, y = frame.x(bar.span.start), frame.y(bar.ins.stream)
    width = max((bar.span.end - bar.span.start) * frame.scale, SHORTEST)
    shade = shade_of(bar.ins)
    class_ = f"{shade.phase}{hue(shade.part)}" if shade.phase else "quiet"
    inset = min(0.6, width / 4)
    box: dict[str, str | float] = {
        "x": x + inset,
        "y": y + 0.6,
        "width": width - 2 * inset,
        "height": LANE - 1.2,
        "rx": 3,
    }
    inner = [element("title", f"{bar.place}: {bar.ins.node}"), element("rect", **box, class_=class_)]
    inner += hatched(box, shade.phase, again=shade.again)
    text = next((t for t in texts(bar.ins) if len(t) * LETTER_WIDTH + 6 <= width), "")
    if text:
        ink = f"on{shade.phase}" if shade.phase else ""
        inner.append(words(text, x + width / 2, y + LANE / 2 + 4, f"{ink} mid small".strip()))
    yield element("g", "".join(inner))


def texts(ins: Instr) -> Iterator[str]:
    """Yield the captions that a bar may have, the longest first."""
    whole = caption(ins)
    part = " ".join(f"{axis}={index}" for axis, index in ins.part)
    if part:
        yield f"{whole} {part}"
    yield whole
    yield whole.split()[0]


def arrows(bars: Sequence[Bar], frame: LaneFrame) -> Iterator[str]:
    """Draw an arrow from each instruction that signals to those of other streams that wait for it."""
    signallers = {bar.ins.signals: bar for bar in bars if bar.ins.signals is not None}
    for bar in bars:
        for event in bar.ins.waits:
            source = signallers.get(event)
            if source is None or source.ins.stream == bar.ins.stream:
                continue
            down = frame.y(bar.ins.stream) > frame.y(source.ins.stream)
            x1, x2 = frame.x(source.span.end) - 3, frame.x(bar.span.start) + 4
            y1 = frame.y(source.ins.stream) + (LANE if down else 0)
            y2 = frame.y(bar.ins.stream) + (0 if down else LANE)
            bend = (y1 + y2) / 2
            path = "M{} {}C{} {} {} {} {} {}".format(*map(number, (x1, y1, x1, bend, x2, bend, x2, y2)))
            yield element("path", d=path, class_="arrow", stroke_width=1.2)
            tip = f"M{number(x2)} {number(y2)}l-3 {-5 if down else 5}h6z"
            yield element("path", d=tip, class_="head")


def legend(bars: Sequence[Bar], y: float, *, arrowed: bool) -> Iterator[str]:
    """Draw the legend of the shades and arrows."""
    line = Legend(MARGIN, y)
    shades = [shade_of(bar.ins) for bar in bars]
    draw_phases(line, shades)
    if any(shade.phase is None for shade in shades):
        line.shade("for the whole step", "quiet")
    if arrowed:
        line.remark("an arrow is an event that another stream waits for")
    yield from line


def draw_phases(legend: Legend, shades: Sequence[Shade]) -> None:
    """Add to a legend the phases that occur among shades, each in the hue that it has first."""
    for phase in PHASES:
        for again in (False, True):
            shade = next((shade for shade in shades if (shade.phase, shade.again) == (phase, again)), None)
            if shade is not None:
                legend.phase(phase, hue(shade.part), again=again)
