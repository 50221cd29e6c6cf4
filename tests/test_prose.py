"""Holds docstrings, documents and messages to plain words: a verb first, and none of the words readers trip on."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = re.compile(
    r"\b(foretold|foretell|foretells|nobody|whoever|whatsoever|anew|told|tells it|so much as|made up|mend the|"
    r"a number that is none)\b",
    re.IGNORECASE,
)
VERBS = frozenset(
    """
    abort accept accumulate add adopt agree align allow annotate answer append apply ask assemble assert assign attend
    average await balance be begin bind block box bring broadcast build cache call capture cast change check choose
    claim clean clear close collect combine commit compare compile complain compute concatenate connect continue
    convert copy count cover create cut decide decode decorate deliver derive describe differentiate discard divide do
    download drain draw drive drop emit encode end ensure enter enumerate estimate evaluate exchange exclude execute
    expand explain export expose extend extract fail feed fetch fill find finish fit flatten follow forbid fork form
    format free freeze fuse gather generate get give go group guard hand handle hash have help hide hold import
    include infer initialise insert install interleave iterate join keep kill label launch lay lead leave let limit
    link list listen load localise lock look lower make map mark mask match measure meet merge move multiply must name
    normalise note number observe offer open order overlap pace pack pad pair parse pass pause perform pick place plan
    poll predict prepare present price print probe produce profile propagate prove provide publish pull push put
    quantise quote raise rank reach read rebuild receive recompute record redirect reduce refer refill refuse register
    release remember remove rename render reorder repeat replace replay report request require reset reshape resolve
    restart restore resume return reverse round run sample save say scale scan schedule search see seed select send
    separate set settle shape share ship show shut sign signal simulate skip slice snap sort split spread stack stand
    start state step stop store stream stretch strip study subtract sum supply swap switch synchronise synthesise tag
    take test time touch trace track train translate transpose travel treat try turn type unpack unpickle unwrap update
    use validate verify visit wait walk warm warn watch weave widen withdraw work wrap write yield zero
    """.split()
)
# Functions whose docstring does not begin with a verb yet, by package. It only shrinks.
LEFT: dict[str, int] = {}


def python_files() -> list[Path]:
    return sorted((ROOT / "piper").rglob("*.py"))


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def functions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the docstring of every function that has one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, node.name, text


def begins_with_a_verb(text: str) -> bool:
    found = re.match(r"[A-Za-z]+", text)
    return found is not None and found[0].lower() in VERBS


def verbless() -> dict[str, list[str]]:
    """Return the functions whose docstring begins with something else than a verb, by package."""
    found: dict[str, list[str]] = {}
    for path in python_files():
        inner = path.relative_to(ROOT / "piper")
        package = inner.parts[0] if len(inner.parts) > 1 else "."
        for line, name, text in functions(path):
            if not begins_with_a_verb(text):
                found.setdefault(package, []).append(f"{inner}:{line} {name}: {text.splitlines()[0]}")
    return found


def test_functions_say_with_a_verb_what_they_do() -> None:
    found = verbless()
    for package in sorted(found.keys() | LEFT.keys()):
        lines = found.get(package, [])
        assert len(lines) <= LEFT.get(package, 0), "\n".join([f"{package}: {len(lines)}", *lines[:40]])


def test_the_list_of_what_is_left_is_exact() -> None:
    assert {package: len(lines) for package, lines in verbless().items()} == LEFT


@pytest.mark.parametrize("path", [*python_files(), *documents()], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_that_readers_trip_on(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{path.name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if BANNED.search(line)]
    assert not found, "\n".join(found)
