"""The style sheet of drawings: the same classes on light and on dark paper."""

from piper.view.colours import DARK, HUES, LIGHT, Paper
from piper.view.xml import FONT, element

HATCH = "url(#hatch)"


def sheet() -> str:
    """Classes for everything a drawing holds. Plain rules, because converters know no CSS variables."""
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
    """What differs between the two papers."""
    found = [
        f".page{{fill:{paper.page}}}",
        f"text{{fill:{paper.text}}}",
        f".faint{{fill:{paper.faint}}}",
        f".line,.frame{{stroke:{paper.line}}}",
        f".idle{{fill:{paper.idle};stroke:{paper.line}}}",
        f".pair{{stroke:{paper.pair}}}",
        f".hatch{{stroke:{paper.hatch}}}",
        f".quiet{{fill:{paper.quiet}}}",
        f".arrow{{stroke:{paper.faint};fill:none}}",
        f".head{{fill:{paper.faint}}}",
    ]
    for phase, ink in paper.phases.items():
        found.append(f".on{phase}{{fill:{ink.text}}}")
        found += [f".{phase}{hue}{{fill:{fill}}}" for hue, fill in enumerate(ink.fills)]
    return found


def hatching() -> str:
    """The pattern over weight gradients: thin diagonal lines, the same in every drawing."""
    line = element("path", d="M0 6L6 0", class_="hatch", stroke_width=1, stroke_opacity=0.4)
    return element("pattern", line, id="hatch", width=6, height=6, patternUnits="userSpaceOnUse")


def hue(part: tuple[int, ...]) -> int:
    """The hue of a part of the samples: they go round, the last axis fastest."""
    return part[-1] % HUES if part else 0
