"""The list of mutants: small edits of `piper/`, each of which some test of the default run must notice."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")


class StaleError(Exception):
    """A mutant whose text is not in its file any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One edit of one file, and the tests that should fail with it."""

    id: str
    file: str  # from the root: "piper/plan/prove.py"; one that has moved is found by `old`
    old: str  # what is replaced; it stands in the file once, unless `nth` says which one is meant
    new: str
    tests: tuple[str, ...]  # tried first: files, or single tests of a file, as pytest takes them
    nth: int | None = None  # counted from 1
    equivalent: str = ""  # why no test can notice; empty: one must

    @property
    def package(self) -> str:
        """Return the package that the mutant changes, or the module of the top level: `plan`, `compiler`."""
        return self.file.split("/")[1].removesuffix(".py")


def load_mutants(path: Path = LIST) -> list[Mutant]:
    """Read the list of mutants."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return [mutant_of(entry) for entry in found["mutant"]]


def mutant_of(entry: dict[str, Any]) -> Mutant:
    """Read one entry; a key that no mutant has is an error."""
    return Mutant(**{**entry, "tests": tuple(entry["tests"])})


def mutated(text: str, mutant: Mutant) -> str:
    """Return a file's text with the mutant's edit made."""
    count = text.count(mutant.old)
    wanted = 1 if mutant.nth is None else mutant.nth
    if count < wanted or (mutant.nth is None and count > 1):
        raise StaleError(f"{mutant.id}: {mutant.file} has {count} times {mutant.old!r}")
    place = -1
    for _ in range(wanted):
        place = text.index(mutant.old, place + 1)
    return text[:place] + mutant.new + text[place + len(mutant.old) :]


def source_of(mutant: Mutant, root: Path = ROOT) -> Path:
    """Return the file that a mutant changes: the one it names, or the only other one that has its text."""
    named = root / mutant.file
    if named.exists() and mutant.old in named.read_text(encoding="utf-8"):
        return named
    sources = sorted((root / "piper").rglob("*.py"))
    found = [path for path in sources if mutant.old in path.read_text(encoding="utf-8")]
    if len(found) != 1:
        raise StaleError(f"{mutant.id}: {mutant.file} and {len(found)} other files have {mutant.old!r}")
    return found[0]


def missing_tests(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Return the tests of a mutant that are not there; the parameters of a test are not looked at."""
    missing = []
    for test in mutant.tests:
        file, _, name = test.partition("::")
        path = root / file
        function = name.partition("[")[0]
        if not path.exists() or (function and f"def {function}(" not in path.read_text(encoding="utf-8")):
            missing.append(test)
    return missing
