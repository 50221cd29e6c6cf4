"""The page of what does not compose is that of the refusals which the matrix accepts, and each is one."""

from pathlib import Path

import pytest

from piper.compiler import compile
from piper.errors import PiperError
from tests.limits import LIMITS, Limit, page

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"


def test_the_page_is_current(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "pytest --update-golden writes it"


def test_few_things_do_not_compose_and_each_has_a_reason() -> None:
    assert len(LIMITS) <= 10
    assert not [limit.what for limit in LIMITS if not limit.instead or "yet" in limit.why]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.message)
def test_what_does_not_compose_is_refused(limit: Limit) -> None:
    with pytest.raises(PiperError, match=limit.message):
        compile(limit.job(), device="cpu")
