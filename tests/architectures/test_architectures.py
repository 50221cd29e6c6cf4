"""Every architecture of the table trains as on one device, or is refused with the message the page shows."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from tests.architectures.checking import outcome
from tests.architectures.page import FOUND, page
from tests.architectures.table import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str) -> None:
    assert outcome(ARCHITECTURES[name]) == FOUND.get(name, "the numbers of one device")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_architecture_with_an_operator_of_its_own_library_on_processes() -> None:
    """Its experts run under eager autograd, and call an operator that only `transformers` defines."""
    assert outcome(ARCHITECTURES["ERNIE 4.5 MoE"], "local") == "the numbers of one device"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert len(ARCHITECTURES) - len(FOUND) >= 22
