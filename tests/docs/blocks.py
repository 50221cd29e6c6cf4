"""The code blocks of a page of documentation, and what is said of each.

A block's first word says how it is run, a second word names a file that it is saved as:

```python             runs, in one namespace with the others of its page
```python net.py      is saved as net.py; a second block of that name is added at its end
```console            `$ command` lines, each with what it prints
```bash               commands whose output is not shown
```text               what the block before it prints

A comment on the line before says what cannot be seen: `<!-- not run: why -->` for commands that need what a test
has not got, `<!-- figure -->` for a text that nothing prints. In shown output a line `...` stands for any lines,
and `…` for any text within a line. `<!-- after: page.md -->` anywhere: its reader has saved the files of that page.
"""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<ticks>```+)(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=ticks)$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"^<!-- (.*) -->\n\Z", re.MULTILINE)
AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    line: int  # of its first line of text, from 1
    language: str
    file: str | None
    text: str
    note: str  # the comment on the line before; empty without one

    @property
    def where(self) -> str:
        """How a failure names it: `tutorial.md:41`."""
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page, from the first to the last."""
    found = []
    for match in FENCE.finditer(text):
        words = match["info"].split()
        before = NOTE.search(text[: match.start()])
        found.append(
            Block(
                page=page,
                line=text[: match.start("text")].count("\n") + 1,
                language=words[0] if words else "",
                file=words[1] if len(words) > 1 else None,
                text=match["text"],
                note=before[1] if before else "",
            )
        )
    return found


def saved_before(page: Path) -> list[Block]:
    """Return the files of the page that a page goes on from, if there is one."""
    after = AFTER.search(page.read_text(encoding="utf-8"))
    if after is None:
        return []
    text = page.with_name(after[1]).read_text(encoding="utf-8")
    return [block for block in blocks_of(text, after[1]) if block.file is not None]


def pages(root: Path) -> list[Path]:
    """Return every page of the documentation, README first."""
    top = [root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return [*top, *sorted((root / "docs").rglob("*.md"))]


def looks_like(shown: str, printed: str) -> bool:
    """Whether a text is what is shown of it."""
    lines = []
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(".*?".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n")
    return re.fullmatch("".join(lines), printed.rstrip("\n") + "\n") is not None
