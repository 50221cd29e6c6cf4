"""The gallery in the documents is what the tool draws now."""

from pathlib import Path

from piper.recipe import import_file
from piper.schedules.grid import NAMES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_gallery_is_up_to_date() -> None:
    """It is drawn once: every file is as drawn, every schedule has one, and no picture is left over."""
    drawn: dict[str, str] = import_file(DOCS / "gallery.py").files()
    there = {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("gallery-*.svg")} | {"gallery.md"}
    assert {f"pictures/gallery-{name}.svg" for name in NAMES} <= set(drawn)
    assert there == set(drawn), "run `make gallery`, and look at what changed"
    stale = [name for name, text in drawn.items() if (DOCS / name).read_bytes() != text.encode()]
    assert not stale, "run `make gallery`, and look at what changed"
