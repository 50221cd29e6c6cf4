"""The pictures of the documentation are what the tool draws."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from piper.recipe import import_file

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
DRAWN = import_file(PICTURES / "draw.py").pictures()


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_as_it_is_drawn(name: str) -> None:
    assert (PICTURES / name).read_text(encoding="utf-8") == DRAWN[name], "run `make pictures`"
    assert ElementTree.fromstring(DRAWN[name]).tag == "{http://www.w3.org/2000/svg}svg"
