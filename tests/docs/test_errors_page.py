"""The pages of errors have every message that a user can see, and none that there is not."""

import re
from functools import cache
from pathlib import Path

from tests.docs.messages import messages

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("errors*.md"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)


@cache
def known() -> dict[str, str]:
    """Every message of the source. Reading it takes a second: not when tests are collected."""
    return messages(ROOT / "piper")


def test_every_error_has_a_row() -> None:
    told = {message for message, _, _ in ROWS}
    missing = {text: where for text, where in known().items() if text not in told}
    assert not missing, "add to docs/errors.md: | `message` | why | way out |"


def test_every_row_is_an_error() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "piper").rglob("*.py"))
    for message, _, _ in ROWS:
        pieces = [piece for piece in message.split("…") if piece.strip()]
        made_up_of = message in known() or (pieces and all(piece.strip() in source for piece in pieces))
        assert made_up_of, f"no error says: {message}"


def test_no_row_comes_twice_and_none_is_lost() -> None:
    said = [message for message, _, _ in ROWS]
    assert len(said) == len(set(said))
    assert len(said) == sum(line.startswith("| `") for line in PAGE.splitlines()), "a row of another form"
