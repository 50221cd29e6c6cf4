"""The page of a self-test: tables in Markdown, what failed and why, and a verdict."""

from collections.abc import Iterator
from dataclasses import dataclass

from piper.ir.format import count

MARK = "# Piper self-test"  # by which the file is known


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A line of a table."""

    cells: tuple[str, ...]
    ok: bool | None = None  # None: it is only measured
    why: str = ""  # what is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a self-test."""

    title: str
    columns: tuple[str, ...]
    about: str = ""
    rows: tuple[ResultRow, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether nothing in it failed."""
        return all(row.ok is not False for row in self.rows)


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
        failed = [f"{part.title}: {row.cells[0]}" for part, row in checked if not row.ok]
        if failed:
            return f"FAILED: {len(failed)} of {count(len(checked), 'check')}: {'; '.join(failed)}"
        return f"Passed: {count(len(checked), 'check')}, none failed"

    def markdown(self) -> str:
        """Return the page as Markdown."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        compiled = "both sides compiled" if self.compiled else "nothing compiled"
        took = f"{self.seconds:.0f} s, {self.cpu_seconds:.0f} s of CPU time"
        yield from (MARK, "", f"{self.place}; {compiled}; {took}.")
        for part in self.parts:
            yield from table(part)
        if self.skipped:
            yield from ("", "## Not tried", "", *(f"- {text}" for text in self.skipped))
        yield from ("", "## Verdict", "", f"**{self.verdict}**")


def table(part: Part) -> Iterator[str]:
    """Yield the lines of a part."""
    checked = any(row.ok is not None for row in part.rows)
    columns = [*part.columns, *(["result"] if checked else [])]
    yield from ("", f"## {part.title}", "")
    if part.about:
        yield from (part.about, "")
    yield line(columns)
    yield line(["---"] * len(columns))
    words = {True: "passed", False: "**FAILED**", None: ""}
    for row in part.rows:
        yield line([*row.cells, *([words[row.ok]] if checked else [])])
    for row in part.rows:
        if row.why:
            yield from ("", f"{row.cells[0]}: {row.why}")


def line(cells: list[str]) -> str:
    """Return cells as a line of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
