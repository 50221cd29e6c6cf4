"""Writes SVG: elements, and what all drawings share: a frame, a style sheet, shades and a legend."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from xml.sax.saxutils import escape, quoteattr

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
