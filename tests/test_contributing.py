"""The recipes of CONTRIBUTING.md name files and functions that exist."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = {  # files of `piper/` that each recipe names, one by one; 0: in words
    "schedule": 2, "directive": 8, "collective": 7, "result of a step": 6, "communicator": 0, "launcher": 0,
    "kind of accelerator": 3, "method of a run": 3,
}  # fmt: skip


def section(name: str) -> str:
    """Return one recipe."""
    found = re.search(rf"^## Add a {name}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no recipe: Add a {name}"
    return found[1]


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:piper|tests|docs)/[\w/.]*)`", TEXT)
    assert len(paths) >= 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_recipe_names_as_many_files_as_a_change_may_touch() -> None:
    """The measure: files of `piper/` that a change touches, new ones included."""
    assert {name: len(re.findall(r"^\d+\. ", section(name), re.MULTILINE)) for name in FILES} == FILES
    for name in ("communicator", "launcher"):
        assert section(name).lstrip().startswith("Two files")


def test_names_in_the_recipes_exist() -> None:
    for path, name in [
        ("piper/schedules/grid.py", "def registered("),
        ("piper/directives/base.py", "def registered("),
        ("piper/ir/node.py", "class SlotNode"),
        ("piper/lower/lower.py", "LOWERING"),
        ("piper/plan/ops.py", "unchanged"),
        ("piper/plan/ops.py", "DOES"),
        ("piper/plan/ops.py", "class OfPass"),
        ("piper/ir/graph.py", "metrics: tuple"),
        ("piper/ir/ids.py", "def term_slot("),
        ("piper/ir/sharding.py", "CollectiveOp"),
        ("piper/lower/flow.py", "def moved("),
        ("piper/ir/step_sums.py", "class StepSum"),
        ("piper/proof/local_rules.py", "self.terms"),
        ("piper/runtime/comm/base.py", "on_streams"),
        ("piper/runtime/accelerator.py", "KINDS"),
        ("piper/workers/serve.py", "BETWEEN"),
        ("piper/workers/serve.py", "NEEDS"),
        ("piper/workers/serve.py", "def optimizer_state("),
        ("piper/run/launch.py", "def starter_of("),
    ]:
        assert name in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def test_the_tour_names_ten_files_and_their_lengths() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == 10
    for path, lines in rows:
        count = len((ROOT / "piper" / path).read_text(encoding="utf-8").splitlines())
        assert abs(count - int(lines)) <= 0.15 * count, f"{path} has {count} lines, the tour says {lines}"


def test_the_oldest_python_can_install_what_the_tests_need() -> None:
    """Debian's Python has the first patch level of its version, or nearly so; pip's own error names no package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    needs = {
        found.name: str(found.metadata["Requires-Python"] or "")
        for found in metadata.distributions()
        if re.sub(r"[-_.]+", "-", found.name).lower() in pinned
    }
    assert len(needs) > 20
    assert {name: spec for name, spec in needs.items() if not SpecifierSet(spec).contains(oldest)} == {}
