"""The style sheet of drawings: the same classes on light and on dark paper."""

from collections.abc import Mapping

from piper.ir.chunk import Phase
from piper.view.colours import DARK, HUES, LIGHT, Paper
from piper.view.svg_writer import FONT, element

RISING, FALLING = "url(#hatch)", "url(#again)"  # lines over weight gradients, and over recomputed forwards
HATCH_OPACITY, AGAIN_OPACITY = 0.4, 0.3


def sheet() -> str:
    """Return the style sheet. It uses no CSS variables, because converters do not know them."""
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
