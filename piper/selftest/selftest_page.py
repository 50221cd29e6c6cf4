"""The page of a self-test: tables in Markdown or figures as JSON, what failed and why, and a verdict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.format import count, seconds, size

MARK = "# Piper self-test"  # by which the file is known
WORDS = {True: "passed", False: "**FAILED**", None: ""}
Figure = float | str
SHOW: Mapping[str, Callable[[float], str]] = {  # how figures are written; others as seconds, or as they are
    "bytes_per_s": lambda rate: f"{size(rate)}/s",
    "nbytes": size,
    "difference": "{:.1e}".format,
    "ratio": "{:.2f}x".format,
}


def cell(key: str, figure: Figure) -> str:
    """Return a figure as text."""
    if isinstance(figure, str):
        return figure
    return SHOW.get(key, seconds if key.endswith("_s") else str)(figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A line of a table."""

    name: str
    figures: Mapping[str, Figure] = field(default_factory=dict)  # by the keys of columns; some may be missing
    ok: bool | None = None  # None: it is only measured
    why: str = ""  # what is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a self-test."""

    title: str
    first: str  # the heading of the names
    columns: Mapping[str, str]  # headings, by the names of figures in JSON
    about: str = ""
    rows: tuple[ResultRow, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether nothing in it failed."""
        return all(row.ok is not False for row in self.rows)

    def markdown(self) -> Iterator[str]:
        """Yield its lines."""
        checked = any(row.ok is not None for row in self.rows)
        yield from ("", f"## {self.title}", "", *([self.about, ""] if self.about else []))
        headings = [self.first, *self.columns.values(), *(["result"] if checked else [])]
        yield line(headings)
        yield line(["---"] * len(headings))
        for row in self.rows:
            cells = [cell(key, row.figures.get(key, "")) for key in self.columns]
            yield line([row.name, *cells, *([WORDS[row.ok]] if checked else [])])
        for row in self.rows:
            if row.why:
                yield from ("", f"{row.name}: {row.why}")

    def report(self) -> dict[str, object]:
        """Return it as one object."""
        rows = [{"name": row.name, **row.figures, "ok": row.ok, "why": row.why} for row in self.rows]
        return {"title": self.title, "ok": self.ok, "seconds": self.seconds, "rows": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestPage:
    """What a self-test found."""

    place: str
    compiled: bool
    parts: tuple[Part, ...]
    skipped: tuple[str, ...]
    seconds: float
    cpu_seconds: float

    @property
    def ok(self) -> bool:
        """Return whether nothing failed."""
        return all(part.ok for part in self.parts)

    @property
    def verdict(self) -> str:
        """Return the answer in one line."""
        checked = [(part, row) for part in self.parts for row in part.rows if row.ok is not None]
        failed = [f"{part.title}: {row.name}" for part, row in checked if not row.ok]
        if failed:
            return f"FAILED: {len(failed)} of {count(len(checked), 'check')}: {'; '.join(failed)}"
        return f"Passed: {count(len(checked), 'check')}, none failed"

    def markdown(self) -> str:
        """Return the page as Markdown."""
        compiled = "both sides compiled" if self.compiled else "nothing compiled"
        took = f"{self.seconds:.0f} s, {self.cpu_seconds:.0f} s of CPU time"
        lines = [MARK, "", f"{self.place}; {compiled}; {took}."]
        for part in self.parts:
            lines += part.markdown()
        if self.skipped:
            lines += ["", "## Not tried", "", *(f"- {each}" for each in self.skipped)]
        return "\n".join([*lines, "", "## Verdict", "", f"**{self.verdict}**"]) + "\n"

    def report(self) -> dict[str, object]:
        """Return the page as one object."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "place": self.place,
            "compiled": self.compiled,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "skipped": self.skipped,
            "parts": [part.report() for part in self.parts],
        }


def line(cells: list[str]) -> str:
    """Return cells as a line of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
