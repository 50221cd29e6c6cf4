"""The pictures of the documentation are what the tool draws."""

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from piper.recipe import import_file

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NAMES = [
    "composed.svg",
    "place.svg",
    "replicate.svg",
    "zero.svg",
    "shard.svg",
    "ring.svg",
    "tensor.svg",
    "split.svg",
    "order.svg",
    "remat.svg",
    "remat-across.svg",
]


@pytest.fixture(scope="module")
def drawn() -> Mapping[str, str]:
    """Return every picture by the name of its file. Two of them compile a model."""
    made: Mapping[str, str] = import_file(PICTURES / "draw.py").pictures()
    return made


def test_every_picture_is_compared(drawn: Mapping[str, str]) -> None:
    assert [*drawn] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_as_it_is_drawn(name: str, drawn: Mapping[str, str]) -> None:
    assert (PICTURES / name).read_text(encoding="utf-8") == drawn[name], "run `make pictures`"
    assert ElementTree.fromstring(drawn[name]).tag == "{http://www.w3.org/2000/svg}svg"
