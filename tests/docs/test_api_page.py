"""The reference of the Python API is what the docstrings say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run `python docs/api.py`"
