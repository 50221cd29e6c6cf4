"""The reference of the Python API is what the docstrings say."""

import re
import runpy
from pathlib import Path

import piper

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "api.py"))["page"]()
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run `python docs/api.py`"


def test_what_a_script_calls_on_a_run_is_listed_and_found_by_dir() -> None:
    api = runpy.run_path(str(DOCS / "api.py"))
    members = api["RETURNED"]["piper.Run"]
    assert set(members) <= {name for name in dir(piper.Run) if not name.startswith("_")}
    documented = set(re.findall(r"`run\.(\w+)", (DOCS / "run.md").read_text(encoding="utf-8")))
    assert documented - set(members) <= {"after_step"}
