"""Writes SVG: elements, coordinates, and the frame that every drawing shares."""

from collections.abc import Iterable
from math import ceil
from xml.sax.saxutils import escape, quoteattr

FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif"


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
