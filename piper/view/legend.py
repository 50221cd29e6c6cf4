"""The legend below a drawing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.chunk import Phase
from piper.view.css import hatched
from piper.view.svg_writer import element, words

PHASES: Mapping[Phase, str] = {
    "F": "forward",
    "B": "backward",
    "BI": "input gradients",
    "BW": "weight gradients",
}
LETTER = 6.1  # pixels


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
