"""Each workaround says which version of which library it is for, and goes when no supported version needs it."""

import ast
import re
from pathlib import Path

import pytest

from tests.torch_names import oldest_torch

QUIRKS = Path(__file__).parents[2] / "piper" / "capture" / "quirks"
FILES = sorted(path for path in QUIRKS.glob("*.py") if path.name != "__init__.py")
AROUND = re.compile(r"^Works around: (torch|transformers) \d+\.\d+\. ", re.MULTILINE)
ENDS = re.compile(
    r"^Not needed from: (?:(?P<library>torch|transformers) (?P<version>\d+\.\d+)|no version yet)\.$", re.M
)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workaround_names_its_library_and_the_version_that_ends_it(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    around, ends = AROUND.search(said), ENDS.search(said)
    assert around, "say `Works around: torch 2.11. ...`"
    assert ends, "say `Not needed from: torch 2.13.` or `Not needed from: no version yet.`"
    if ends["library"] == "torch":
        assert numbers(ends["version"]) > numbers(oldest_torch()), "no supported version needs it: delete it"


def test_there_are_workarounds() -> None:
    assert len(FILES) >= 10


def test_only_workarounds_replace_functions_of_dynamo() -> None:
    """A patch of another library is a workaround; those of Inductor's clock stand with what they measure."""
    users = {
        path.relative_to(QUIRKS.parent).as_posix()
        for path in QUIRKS.parent.rglob("*.py")
        if "process.attributes import replaced" in path.read_text(encoding="utf-8")
    }
    assert {user for user in users if not user.startswith("quirks/")} == {"compile/tuning.py"}
