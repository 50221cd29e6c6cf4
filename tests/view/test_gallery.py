"""The gallery in the documents is what the tool draws now."""

from pathlib import Path

import pytest

from piper.recipe import import_file
from piper.schedules.names import NAMES

DOCS = Path(__file__).parents[2] / "docs"
FILES: dict[str, str] = import_file(DOCS / "gallery.py").files()


@pytest.mark.parametrize("name", FILES)
def test_the_gallery_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_bytes() == FILES[name].encode(), "run `make gallery`, and look at what changed"


def test_every_schedule_is_in_the_gallery() -> None:
    assert {f"pictures/gallery-{name}.svg" for name in NAMES} <= set(FILES)


def test_no_picture_is_left_over() -> None:
    drawn = {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("gallery-*.svg")}
    assert drawn <= set(FILES)
